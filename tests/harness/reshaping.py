"""Jobs of several ranks that switch plans: how to run them, and what they said."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from malleus_megatron.plan.codec import plan_from_json, plan_to_json
from malleus_megatron.plan.plan import Plan
from tests.harness.ranks import run_script
from tests.harness.recipes import Recipe
from tests.harness.training import Grid, read_lines, train, write_json

UNDER_PLANS = ("--malleus", "--malleus-sidecar", "none", "--malleus-require", "reshape")


def write_plans(folder: Path, plans_at: Mapping[int, Plan | tuple[str, Plan]]) -> Path:
    """schedule.json, and its plans beside it, by a name or by their iteration."""
    entries = []
    for iteration, asked in plans_at.items():
        name, plan = asked if isinstance(asked, tuple) else (f"plan-{iteration}", asked)
        write_json(folder / f"{name}.json", plan_to_json(plan))
        entries.append({"iteration": iteration, "plan": f"{name}.json"})
    return write_json(folder / "schedule.json", entries)


def nominal_of(grid: Grid) -> Plan:
    share = grid.num_microbatches // grid.pipelines
    return plan_from_json(grid.plan([share] * grid.pipelines))


def run_job(
    script: str,
    recipe: Recipe,
    folder: Path,
    plans_at: Mapping[int, tuple[str, Plan]],
    *,
    iterations: int,
    env: Mapping[str, str],
    flags: Sequence[str] = (),
    timeout_s: float = 110.0,
    expect_exit: int = 0,
) -> Path:
    """Run a script's job, which switches plans at iterations; every rank ends with the same status.

    Returns:
        The job's record. Events and the ranks' logs lie beside it.
    """
    record = folder / "ours.jsonl"
    words: list[str | Path] = [*recipe.words, *recipe.grid.flags, "--train-iters", str(iterations)]
    ours: list[str | Path] = [
        *UNDER_PLANS,
        *("--malleus-plan-schedule", write_plans(folder, plans_at)),
        *("--malleus-record", record, "--malleus-log-dir", folder),
        *flags,
    ]
    run_script(
        recipe.grid.world,
        ["-m", f"tests.e2e.{script}", *words, *ours],
        env={"LOGS": str(folder), "PLANS": str(folder), **env},
        timeout_s=timeout_s,
        expect_exit=expect_exit,
    )
    return record


def train_stock(recipe: Recipe, folder: Path, *, iterations: int) -> Path:
    stock = folder / "stock.jsonl"
    train(recipe.grid, stock, recipe=recipe.words, iterations=iterations)
    return stock


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(folder / "events.jsonl") if event["event"] == kind]
