"""Small Megatron jobs on CPU: the recipe, how to run it, and what it recorded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.nominal import nominal_plan
from tests.harness.ranks import RankOutcome, run_script

ENTRY = ("-m", "malleus_megatron.pretrain_gpt")

TINY_GPT = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --attention-dropout 0 --hidden-dropout 0 "
    "--log-interval 1 --eval-iters 0 --eval-interval 1000 --split 100,0,0 --num-workers 0 "
    "--normalization RMSNorm --disable-bias-linear --swiglu --position-embedding-type rope "
    "--distributed-timeout-minutes 1"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A job's nominal grid."""

    pipelines: int
    stages: int = 1
    tp: int = 1
    num_microbatches: int = 8
    num_layers: int = 4
    growth: str | None = None
    """Batch sizes by tokens seen, "0:8 512:16"; the first is `num_microbatches`."""

    @property
    def world(self) -> int:
        return self.pipelines * self.stages * self.tp

    @property
    def flags(self) -> list[str]:
        return [
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.stages)),
            *(
                ("--global-batch-size", str(self.num_microbatches))
                if self.growth is None
                else ("--step-batch-size-schedule", self.growth)
            ),
        ]

    def plan(self, counts: Sequence[int]) -> dict[str, Any]:
        """plan.json of this grid with other micro-batch counts."""
        plan = nominal_plan(
            num_layers=self.num_layers,
            num_microbatches=self.num_microbatches,
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.stages,
            data_parallel_size=self.pipelines,
        )
        return plan_to_json(plan.with_counts(tuple(counts)))


def write_json(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def write_schedule(folder: Path, grid: Grid, counts_at: Mapping[int, Sequence[int]]) -> Path:
    """schedule.json, and its plans beside it."""
    entries = []
    for iteration, counts in counts_at.items():
        name = f"plan-{iteration}.json"
        write_json(folder / name, grid.plan(counts))
        entries.append({"iteration": iteration, "plan": name})
    return write_json(folder / "schedule.json", entries)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(
    grid: Grid,
    record: Path,
    *flags: str | Path,
    iterations: int = 4,
    recipe: Sequence[str] = TINY_GPT,
    timeout_s: float = 110.0,
    expect_exit: int | None = 0,
) -> list[RankOutcome]:
    """Train; every iteration's loss and gradient norm land in `record`."""
    return run_script(
        grid.world,
        [
            *(*ENTRY, *recipe, *grid.flags, "--train-iters", str(iterations)),
            *("--malleus-record", record, *flags),
        ],
        timeout_s=timeout_s,
        expect_exit=expect_exit,
    )


def assert_same_training(ours: Path, stock: Path, *, relative: float) -> None:
    """Loss and gradient norm of every iteration, to a relative tolerance (0: the same bits)."""
    mine, theirs = read_lines(ours), read_lines(stock)
    assert [line["iteration"] for line in mine] == [line["iteration"] for line in theirs]
    assert mine, "nothing was recorded"
    for a, b in zip(mine, theirs, strict=True):
        assert a["skipped"] == b["skipped"], f"iteration {a['iteration']}"
        for name in ("loss", "grad_norm"):
            if b[name] is None:
                # Megatron takes no norm of gradients that overflow.
                assert a[name] is None
                continue
            difference = abs(a[name] - b[name])
            assert difference <= relative * abs(b[name]), (
                f"iteration {a['iteration']}: {name} {a[name]!r} instead of {b[name]!r}, "
                f"relative difference {difference / abs(b[name]):.2e}"
            )
