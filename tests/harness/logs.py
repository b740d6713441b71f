"""The log folder of a job that never ran: a GPU slows down, the plan changes, it recovers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from malleus_megatron.plan.codec import canonical_json, plan_id, plan_to_json
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan, Prediction

NOMINAL = nominal_plan(
    num_layers=8,
    num_microbatches=16,
    tensor_parallel_size=1,
    pipeline_parallel_size=2,
    data_parallel_size=2,
)
SLOW_GPU, RATE = NOMINAL.pipelines[1].stages[0].gpus[0], 2.57
MOVED = NOMINAL.with_counts((12, 4), Prediction(step_time_s=1.25))
HOSTILE = "<script>window.pwned = true</script>"
SLOWS, CHANGES, RECOVERS, RETURNS, LAST = 11, 15, 26, 30, 40

type Line = dict[str, Any]


def job_events(first: int = 1, last: int = LAST) -> Iterator[Line]:
    """What the job says from an iteration to another."""
    yield {
        "event": "level",
        "iteration": 0,
        "level": "rebalance",
        "reason": "a test",
        "generation": 0,
        "plan": plan_id(NOMINAL),
        "layout": "8 x (0:4 | 2:4), ...",
        "gpus": 4,
    }
    for iteration in range(first, last + 1):
        yield from _boundary(iteration)
        yield _iteration(iteration)
        yield from _seen(iteration)


def write_log(folder: Path, lines: Iterator[Line] | list[Line]) -> list[Line]:
    """Append the events to the folder's events.jsonl; its plans lie beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = list(lines)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, sort_keys=True) + "\n" for line in written)
    for generation, plan in enumerate((NOMINAL, MOVED, NOMINAL)):
        keep_plan(folder, generation, plan)
    return written


def keep_plan(folder: Path, generation: int, plan: Plan) -> None:
    """As a job keeps it."""
    path = folder / "plans" / f"generation-{generation}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(canonical_json(plan_to_json(plan)) + "\n", encoding="utf-8")


def _iteration(iteration: int) -> Line:
    generation = (iteration >= CHANGES) + (iteration >= RETURNS)
    slow = SLOWS <= iteration < RECOVERS
    base = 1.0 if not slow else 1.3 if generation else 2.0
    return {
        "event": "iteration",
        "iteration": iteration,
        "step_time_s": base + iteration / 1000,
        "loss": 6.0 - iteration / 10,
        "grad_norm": 1.0,
        "skipped": False,
        "generation": generation,
        "plan": plan_id(MOVED if generation == 1 else NOMINAL),
    }


def _boundary(iteration: int) -> Iterator[Line]:
    plans = {CHANGES: (1, MOVED), RETURNS: (2, NOMINAL)}
    if iteration in plans:
        generation, plan = plans[iteration]
        document = plan_to_json(plan)
        yield {
            "event": "plan",
            "iteration": iteration,
            "generation": generation,
            "plan": plan_id(plan),
            "layout": f"layout of {generation}",
            "micro_batches": list(plan.microbatch_counts),
            "seconds": 0.125,
            "predicted": document.get("predicted", {}),
        }
        yield {
            "event": "migration",
            "iteration": iteration,
            "generation": generation,
            "bytes": 3 * 2**20,
            "seconds": 0.5,
            "predicted_seconds": 0.4,
            "peak_extra_bytes": 2**20,
        }


def _seen(iteration: int) -> Iterator[Line]:
    if iteration in {3, SLOWS + 2, RECOVERS + 2}:
        slow = SLOWS < iteration < RECOVERS
        rates = {str(gpu): RATE if slow and gpu == SLOW_GPU else 1.01 for gpu in range(4)}
        yield {"event": "rates", "iteration": iteration, "rates": rates}
    if iteration == SLOWS + 2:
        yield {"event": "straggler", "iteration": iteration, "gpu": SLOW_GPU, "rate": RATE,
               "since": SLOWS, "delay": 2, "reason": "thermal slowdown, 93 C"}  # fmt: skip
        yield {"event": "warning", "iteration": iteration, "message": f"Look: {HOSTILE}"}
    if iteration == RECOVERS + 2:
        yield {"event": "recovered", "iteration": iteration, "gpu": SLOW_GPU, "rate": 1.01}
