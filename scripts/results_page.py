"""docs/results.md and its picture, from the raw results beside it: what stragglers cost a job.

`make bench` measures and simulates (tests/bench) and then calls this.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from malleus_megatron.simulator.picture import svg
from malleus_megatron.simulator.policies import Simulation
from malleus_megatron.simulator.replay import Run, Span

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS / "results"
MEASURED, SIMULATED = "situations.json", "simulation.json"
_HEAD = (
    "# What stragglers cost, and what is left of it",
    "",
    "Command: `make bench`; raw results: [results/](results/).",
)
JOBS = {"stock": "stock Megatron", "split": "micro-batches only", "malleus": "Malleus"}


def main() -> None:
    """Write the page and the picture."""
    lines = [*_HEAD]
    if (RESULTS / MEASURED).exists():
        measured = _read(MEASURED)
        (RESULTS / "trace.svg").write_text(_picture(measured), encoding="utf-8")
        lines += [*_measured(measured), *_trace(measured)]
    if (RESULTS / SIMULATED).exists():
        lines += _simulated(_read(SIMULATED))
    (DOCS / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measured(document: dict[str, Any]) -> Iterator[str]:
    layer_s = ", ".join(f"TP{d} {time:g} s" for d, time in sorted(document["layer_s"].items()))
    yield from (
        "",
        "## Seven situations, three ways to cope",
        "",
        "**Paced**: 8 processes on CPU, each layer held to a set time. Step times measure plans "
        "and protocol, not a machine.",
        "8 ranks as 2 nodes of 4 GPUs, 16 layers, nominal TP2 x PP2 x DP2, 32 micro-batches; a "
        f"layer takes {layer_s}, forward and backward.",
        "Seconds of a step, in brackets times the healthy stock step. **Target**: the healthy "
        "stock step x bound / healthy bound, where the bound is what no plan of two",
        "pipelines is below (proved by the planner). Micro-batches only: the best split from the "
        "first slow iteration on. Malleus: measured, named, planned and moved by",
        "the job.",
        "",
    )
    yield from _table(
        ("situation", *JOBS.values(), "target", "Malleus / target", "simulated: largest error"),
        (
            (
                row["situation"],
                *(f"{row[job]['step_s']:.2f} ({row[job]['to_healthy']:.2f})" for job in JOBS),
                f"{row['target_s']:.2f}",
                f"{row['malleus']['to_target']:.3f}",
                f"{max(abs(row[job]['to_simulated'] - 1) for job in JOBS):.1%}",
            )
            for row in document["rows"]
        ),
    )


def _trace(document: dict[str, Any]) -> Iterator[str]:
    yield from (
        "",
        "## One trace through all of them",
        "",
        "![Step time over the trace](results/trace.svg)",
        "",
        "The same job under Malleus, one situation after the other without a restart; the GPUs of "
        "one heal where those of the next slow down. Iterations: from the change",
        "of rates to the first step under a new plan.",
        "",
    )
    yield from _table(
        ("situation", "iterations", "plans", "last plan", "moved, MiB", "switching, s"),
        (
            (
                row["situation"],
                _or_none(row["malleus"]["iterations_to_plan"]),
                str(row["malleus"]["plans"]),
                f"`{row['malleus']['layout']}`",
                f"{row['malleus']['migrated_bytes'] / 2**20:.1f}",
                f"{row['malleus']['migration_s']:.2f}",
            )
            for row in document["rows"]
        ),
    )
    yield from (
        "",
        f"Largest relative difference of a loss to a stock job that nobody slows down: "
        f"{document['largest_loss_difference']:.1e} over {sum(document['held'])} iterations. "
        f"Longest step while the planner may have worked: "
        f"{document['longest_step_while_planning']:.3f} of the slow steps before.",
    )


def _simulated(document: dict[str, Any]) -> Iterator[str]:
    yield from (
        "",
        "## Simulated: 64 and 1024 GPUs",
        "",
        f"The seven situations in turn, {document['held']} iterations each; the last step of each, "
        "times the healthy one of the nominal plan. Model costs are those of the",
        'published planner\'s settings (layer times and memory; "32B" is its 32-GPU setting on '
        "twice the nodes, pipelines and micro-batches). Policies: [simulate.md](simulate.md).",
        "Total: the whole trace, waiting for new plans and switching included.",
    )
    for title, setting in document["settings"].items():
        healthy_s, policies = setting["healthy_step_s"], setting["step_s"]
        situations = list(next(iter(policies.values())))
        yield from (
            "",
            f"**{title}**: {setting['num_pipelines']} pipelines, {setting['num_microbatches']} "
            f"micro-batches; bound by {setting['bound_by']}.",
            "",
        )
        total_s = sum(document["held"] * healthy_s for _ in situations)
        yield from _table(
            ("policy", *situations, "total"),
            (
                (
                    policy,
                    *(f"{policies[policy][name] / healthy_s:.3f}" for name in situations),
                    f"{setting['total_s'][policy] / total_s:.3f}",
                )
                for policy in policies
            ),
        )


def _picture(document: dict[str, Any]) -> str:
    """Measured steps over the trace; stock's and the targets as its situations last."""
    held, rows = document["held"], document["rows"]
    steps = document["steps"]["malleus"]
    ours = tuple(_one(step["iteration"], step["seconds"]) for step in steps)
    runs = [Run(policy="Malleus", spans=ours)]
    for name, values in (
        ("stock", [row["stock"]["step_s"] for row in rows]),
        ("target", [row["target_s"] for row in rows]),
    ):
        start, spans = 1, []
        for number, seconds in zip(held, values, strict=True):
            end = start + number
            spans.append(Span(from_iteration=start, to_iteration=end, step_time_s=seconds))
            start = end
        runs.append(Run(policy=name, spans=tuple(spans)))
    simulation = Simulation(
        num_iterations=sum(held),
        healthy_step_s=rows[0]["stock"]["step_s"],
        trace=(),
        bound=runs[-1],
        bound_by="planner",
        capacity=runs[-1],
        runs=tuple(runs),
    )
    return svg(simulation, "Step time through seven situations (paced)")


def _one(iteration: int, seconds: float) -> Span:
    return Span(from_iteration=iteration, to_iteration=iteration + 1, step_time_s=seconds)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '\\|') for cell in row)} |"


def _or_none(value: int | None) -> str:
    return "-" if value is None else str(value)


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


if __name__ == "__main__":
    main()
