"""One job under a script, and the stock job whose losses it must have."""

import dataclasses
import json
import time
from pathlib import Path

from tests.chaos.conductor import Conductor
from tests.chaos.script import PACE, Script
from tests.chaos.verdict import Verdict, judge
from tests.harness.ranks import RanksFailedError, run_script
from tests.harness.recipes import BASE, CLIPPED, LLAMA
from tests.harness.training import Grid, train, write_json

START_S = 300.0
STEP_S = 6.0
"""What a step takes beside its layers' pace where several processes share a core, at most."""


def recipe_of(grid: Grid) -> list[str]:
    """Small steps: what one rounds away does not grow in the next."""
    words = [*BASE, "--num-layers", str(grid.num_layers), *LLAMA.split(), *CLIPPED.split()]
    return [*words, "--lr", "1e-4", "--distributed-timeout-minutes", "3"]


def train_stock(grid: Grid, folder: Path, iterations: int) -> Path:
    """The reference's record."""
    record = folder / "stock.jsonl"
    train(
        grid,
        record,
        recipe=recipe_of(grid),
        iterations=iterations,
        timeout_s=START_S + iterations * STEP_S,
    )
    return record


def time_limit_s(script: Script) -> float:
    """Beyond it a job hangs: all layers on one GPU, one micro-batch after the other, and slowed."""
    grid = script.grid
    healthy_s = PACE["layer_forward_s"]["1"] + PACE["layer_backward_s"]["1"]
    work_s = grid.num_layers * grid.num_microbatches * healthy_s
    rates = [script.rate_at(iteration) for iteration in range(1, script.iterations + 1)]
    return START_S + sum(STEP_S + work_s * rate for rate in rates)


def run(script: Script, folder: Path, stock: Path) -> Verdict:
    """Run a job through its script and judge it. Its files stay in `folder`."""
    begun_s = time.monotonic()
    faults = [dataclasses.asdict(fault) for fault in script.faults]
    write_json(folder / "script.json", dataclasses.asdict(script))
    with Conductor(script, folder) as conductor:
        try:
            outcomes = run_script(
                script.grid.world,
                ["-m", "tests.chaos.job", *_words(script, folder, conductor)],
                env={
                    "CHAOS": json.dumps(faults),
                    "CHAOS_PROXY": conductor.proxy.url,
                    "CHAOS_SIDECAR": str(conductor.place.resolve()),
                },
                timeout_s=time_limit_s(script),
            )
        except RanksFailedError as error:
            (folder / "failure.txt").write_text(str(error), encoding="utf-8")
            verdict = Verdict(script=script, problems=[str(error).splitlines()[0]])
        else:
            outputs = [outcome.output for outcome in outcomes]
            for rank, output in enumerate(outputs):
                (folder / f"rank{rank}.txt").write_text(output, encoding="utf-8")
            verdict = judge(script, folder, stock, outputs)
    verdict.problems += [f"the test itself: {error}" for error in conductor.errors]
    verdict.seconds = time.monotonic() - begun_s
    return verdict


def _words(script: Script, folder: Path, conductor: Conductor) -> list[str | Path]:
    return [
        *(*recipe_of(script.grid), *script.grid.flags),
        *("--train-iters", str(script.iterations), "--malleus", "--malleus-require", "reshape"),
        *("--malleus-pace", write_json(folder / "pace.json", PACE)),
        *("--malleus-inject", write_json(folder / "injection.json", script.injection)),
        *("--malleus-record", folder / "losses.jsonl", "--malleus-log-dir", folder / "log"),
        *("--malleus-sidecar", "auto" if script.own_sidecar else conductor.proxy.url),
        *("--malleus-check-replicas", "10", "--malleus-on-bad-replica", "stop"),
    ]
