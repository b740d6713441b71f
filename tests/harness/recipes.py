"""Tiny recipes of every feature that level reshape covers, and random plans for them."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from tests.harness.training import Grid

BASE = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 "
    "--eval-interval 1000 --split 100,0,0 --num-workers 0 --distributed-timeout-minutes 1"
).split()

LLAMA = "--normalization RMSNorm --disable-bias-linear --swiglu --position-embedding-type rope"
GPT2 = "--normalization LayerNorm --position-embedding-type learned_absolute"
UNTIED = "--untie-embeddings-and-output-weights"
GROUPED = "--group-query-attention --num-query-groups 2"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BF16 = "--bf16 --use-distributed-optimizer"
CLIPPED = "--clip-grad 0.3"
DECOUPLED = "--decoupled-lr 3e-3 --decoupled-min-lr 1e-4 --weight-decay 0.1 --lr-warmup-iters 2"
SUMS_OVERLAPPED = "--overlap-grad-reduce"
ALL_OVERLAPPED = f"{SUMS_OVERLAPPED} --overlap-param-gather"
SMOOTH = "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --lr 1e-4"
"""Steps small enough that what bf16 rounds away in one does not grow in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model, its nominal grid, and the TP degrees that it allows."""

    name: str
    grid: Grid
    flags: str
    degrees: tuple[int, ...] = (1, 2, 4)
    relative: float = 1e-6
    sequences: int = 6
    """Of plans, in a normal test run: fewer where a step is slow."""

    @property
    def words(self) -> list[str]:
        return [*BASE, "--num-layers", str(self.grid.num_layers), *self.flags.split()]


RECIPES = (
    Recipe(
        name="llama, tied, TP2 x PP2",
        grid=Grid(pipelines=1, stages=2, tp=2, num_layers=6),
        flags=f"{LLAMA} {CLIPPED}",
    ),
    Recipe(
        name="llama, untied, grouped queries, decoupled rates, TP2 x DP2",
        grid=Grid(pipelines=2, tp=2, num_layers=6, num_microbatches=10),
        flags=f"{LLAMA} {UNTIED} {GROUPED} {DECOUPLED}",
        degrees=(1, 2),
    ),
    Recipe(
        name="gpt-2, tied, PP2 x DP2",
        grid=Grid(pipelines=2, stages=2, num_layers=8),
        flags=f"{GPT2} {CLIPPED}",
    ),
    Recipe(
        name="gpt-2, untied, recompute, TP4",
        grid=Grid(pipelines=1, tp=4, num_layers=6, num_microbatches=4),
        flags=f"{GPT2} {UNTIED} {RECOMPUTED}",
    ),
    Recipe(
        name="llama, sequence parallel, TP2 x PP2",
        grid=Grid(pipelines=1, stages=2, tp=2, num_layers=6),
        flags=f"{LLAMA} --sequence-parallel --qk-layernorm",
    ),
    Recipe(
        name="gpt-2, sequence parallel, per-token loss, TP2 x DP2",
        grid=Grid(pipelines=2, tp=2, num_layers=6),
        flags=f"{GPT2} {UNTIED} --sequence-parallel --calculate-per-token-loss {CLIPPED}",
    ),
    Recipe(
        name="llama, per-token loss, distributed optimizer in fp32, overlap, PP2 x DP2",
        grid=Grid(pipelines=2, stages=2, num_layers=8, num_microbatches=12),
        flags=f"{LLAMA} --calculate-per-token-loss --use-distributed-optimizer {CLIPPED} "
        f"{ALL_OVERLAPPED}",
    ),
    Recipe(
        name="llama, tied, grouped queries, sums overlapped, TP2 x PP2 x DP2",
        sequences=5,
        grid=Grid(pipelines=2, stages=2, tp=2, num_layers=8),
        flags=f"{LLAMA} {GROUPED} --sequence-parallel {CLIPPED} {SUMS_OVERLAPPED}",
        degrees=(1, 2),
    ),
    Recipe(
        name="gpt-2, tied, TP4 x PP2",
        grid=Grid(pipelines=1, stages=2, tp=4, num_layers=12, num_microbatches=4),
        flags=GPT2,
        sequences=4,
    ),
)

BF16_RECIPES = (
    Recipe(
        name="llama, bf16, distributed optimizer, overlap, TP2 x DP2",
        grid=Grid(pipelines=2, tp=2, num_layers=6, num_microbatches=16),
        flags=f"{LLAMA} {BF16} {SMOOTH} {CLIPPED} {ALL_OVERLAPPED}",
        relative=2e-4,
    ),
    Recipe(
        name="llama, bf16, distributed optimizer, gradients summed in bf16, untied, TP2 x PP2",
        grid=Grid(pipelines=1, stages=2, tp=2, num_layers=6, num_microbatches=16),
        flags=f"{LLAMA} {UNTIED} {BF16} {SMOOTH} --grad-reduce-in-bf16",
        relative=2e-4,
    ),
)


def random_job_plan(rng: random.Random, grid: Grid, degrees: Sequence[int]) -> Plan:
    """Any valid plan of a job: GPUs in any order, empty stages, standby GPUs, any counts."""
    gpus = list(range(grid.world))
    rng.shuffle(gpus)
    num_standby = rng.choice([0, 0, 0, 1, 2])
    free, standby = gpus[num_standby:], gpus[:num_standby]
    groups: list[tuple[int, ...]] = []
    while free:
        degree = rng.choice([d for d in degrees if d <= len(free)])
        groups.append(tuple(free[:degree]))
        free = free[degree:]
    num_pipelines = rng.randint(1, min(len(groups), grid.num_microbatches))
    ends = _cuts(rng, len(groups), num_pipelines, least=1)
    counts = _parts(rng, grid.num_microbatches, num_pipelines)
    pipelines = []
    for (start, end), count in zip(itertools.pairwise([0, *ends]), counts, strict=True):
        bounds = [0, *_cuts(rng, grid.num_layers, end - start, least=0)]
        stages = tuple(
            Stage(gpus=tp_group, layers=layers)
            for tp_group, layers in zip(groups[start:end], itertools.pairwise(bounds), strict=True)
        )
        pipelines.append(Pipeline(num_microbatches=count, stages=stages))
    return Plan(
        num_layers=grid.num_layers,
        num_microbatches=grid.num_microbatches,
        pipelines=tuple(pipelines),
        standby=tuple(standby),
    )


def _cuts(rng: random.Random, total: int, parts: int, *, least: int) -> list[int]:
    """Where each part ends; every part has at least so many."""
    spare = total - least * parts
    inner = sorted(rng.randint(0, spare) for _ in range(parts - 1))
    return [end + least * (number + 1) for number, end in enumerate([*inner, spare])]


def _parts(rng: random.Random, total: int, parts: int) -> list[int]:
    ends = _cuts(rng, total, parts, least=1)
    return [end - start for start, end in itertools.pairwise([0, *ends])]
