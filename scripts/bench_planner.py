"""Measure the planner: quality and proved gap on known problems, time and memory as clusters grow.

Published figures stand beside ours where they exist; they were measured by running the published
program on two quiet cores, so read ratios, not seconds. Seconds are of the processor: the planner
is one thread. Wall time is in the JSON.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner.search import make_plan

PROBLEMS = Path(__file__).resolve().parents[2] / "shared" / "problems"
KNOWN = ("A1", "A3", "B", "Cx", "D", "D1", "D-node", "E", "scale-64-4", "scale-64-8")
ALIKE = 12.53
TIMED = (
    (64, 8, ALIKE, None),
    (64, 8, None, None),
    (1024, 1, ALIKE, 283.0),
    (1024, 16, None, None),
    (1024, 64, None, None),
    (4096, 40, None, None),
)
"""GPUs, stragglers, their rate (None: 16 different ones), seconds of the published planner (None:
it does not finish in 300 s)."""
GROWTH = ((64, 1), (128, 2), (256, 4), (512, 8), (1024, 16), (2048, 20), (4096, 40))
BAR = 40


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="times are medians of so many")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one run, no growth")
    arguments = parser.parse_args()
    runs = 1 if arguments.quick else arguments.runs
    document: dict[str, Any] = {"quality": [], "time": [], "growth": []}
    if PROBLEMS.is_dir():
        document["quality"] = [
            _quality(name, objective) for objective in ("step-time", "bottleneck") for name in KNOWN
        ]
    document["time"] = [_timed(*row, runs=runs) for row in TIMED]
    if not arguments.quick:
        document["growth"] = [_timed(*row, None, None, runs=1) for row in GROWTH]
    document["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if arguments.json:
        print(json.dumps(document, sort_keys=True))
    else:
        print("\n".join(_report(document)))
    return 0


def scale_problem(num_gpus: int, num_stragglers: int, rate: float | None = None) -> dict[str, Any]:
    """Nodes of 8, TP 8, 32 GPUs a pipeline; stragglers of one rate or 16, spread over the nodes."""
    nodes = num_gpus // 8
    pipelines = num_gpus // 32
    return {
        "schema_version": 1,
        "cluster": {"gpus_per_node": [8] * nodes, "memory_mib": None},
        "model": {
            "num_layers": 80,
            "layer_time_s": {"8": 1.0, "4": 1.9, "2": 3.66, "1": 7.22},
        },
        "batch": {"num_microbatches": 32 * pipelines},
        "parallel": {"tensor_parallel_sizes": [1, 2, 4, 8], "num_pipelines": pipelines},
        "rate_floor": 1.2,
        "rates": {
            str(i * nodes // num_stragglers * 8 + i % 8): rate or 1.5 + 0.5 * (i % 16)
            for i in range(num_stragglers)
        },
    }


def _quality(name: str, objective: str) -> dict[str, Any]:
    document = json.loads((PROBLEMS / f"{name}.json").read_text(encoding="utf-8"))
    row = _solved(document, objective) | {"problem": name}
    if objective == "bottleneck":
        reference = document.get("reference", {})
        row["best_known"] = reference.get("best_known_bottleneck")
        row["published"] = reference.get("published_planner_bottleneck")
    return row


def _solved(document: dict[str, Any], objective: str) -> dict[str, Any]:
    problem = problem_from_json(document)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    plan = make_plan(problem, objective)
    wall_s, seconds = time.monotonic() - started_s, time.process_time() - started_cpu_s
    predicted = plan.predicted
    if predicted is None or predicted.lower_bound is None or predicted.step_time_s is None:
        raise AssertionError("a plan of the planner says what it predicts")
    value = predicted.step_time_s if objective == "step-time" else predicted.bottleneck or 0.0
    return {
        "objective": objective,
        "value": value,
        "lower_bound": predicted.lower_bound,
        "gap": 1 - predicted.lower_bound / value,
        "seconds": seconds,
        "wall_seconds": wall_s,
    }


def _timed(
    num_gpus: int, stragglers: int, rate: float | None, published_s: float | None, *, runs: int
) -> dict[str, Any]:
    print(f"timing {num_gpus} GPUs, {stragglers} stragglers ...", file=sys.stderr)
    document = scale_problem(num_gpus, stragglers, rate)
    rows = [_solved(document, "step-time") for _ in range(runs)]
    seconds = statistics.median(row["seconds"] for row in rows)
    return rows[0] | {
        "gpus": num_gpus,
        "stragglers": stragglers,
        "rate": rate,
        "seconds": seconds,
        "published_seconds": published_s,
        "times_faster": None if published_s is None else published_s / seconds,
    }


def _report(document: dict[str, Any]) -> list[str]:
    lines = ["problem      objective       value      bound    gap  published best known  seconds"]
    lines += [
        f"{row['problem']:12} {row['objective']:10} {row['value']:10.2f} "
        f"{row['lower_bound']:10.2f} "
        f"{row['gap']:6.2%} {row.get('published') or '-':>10} "
        f"{row.get('best_known') or '-':>11} "
        f"{row['seconds']:8.2f}"
        for row in document["quality"]
    ]
    lines += ["", " GPUs  stragglers    rate  seconds  published s   faster    gap"]
    for row in document["time"]:
        seconds = row["published_seconds"]
        published = "> 300" if seconds is None else f"{seconds:g}"
        faster = "" if row["times_faster"] is None else f"{row['times_faster']:.0f}x"
        lines.append(
            f"{row['gpus']:5} {row['stragglers']:11} {row['rate'] or '16':>7} "
            f"{row['seconds']:8.2f} {published:>12} {faster:>8} {row['gap']:6.2%}"
        )
    if document["growth"]:
        longest_s = max(row["seconds"] for row in document["growth"])
        lines += ["", "growth (1 straggler in 64 GPUs, 1 in 100 above 1024)"]
        lines += [
            f"{row['gpus']:5} GPUs {row['seconds']:7.2f} s "
            + "#" * max(1, round(BAR * row["seconds"] / longest_s))
            for row in document["growth"]
        ]
    return [*lines, "", f"peak memory {document['peak_memory_mib']:.0f} MiB"]


if __name__ == "__main__":
    sys.exit(main())
