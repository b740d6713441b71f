"""Stock Megatron on CPU: every layout trains the same model, and a resumed job goes on as if whole.

All layouts start from one checkpoint that a single rank wrote, since Megatron draws the weights of
each stage from another seed.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.training import Grid, assert_same_training, read_lines, train

pytestmark = pytest.mark.e2e

FP32 = 2e-6
BF16 = 2e-3
"""Other TP degrees and bucket orders round elsewhere; from the second step on Adam sees it."""

ONE = Grid(pipelines=1)
TP = Grid(pipelines=1, tp=2)
PP = Grid(pipelines=1, stages=2)
DP = Grid(pipelines=2)
DIST_OPT = "--use-distributed-optimizer"
OVERLAP = f"{DIST_OPT} --overlap-grad-reduce --overlap-param-gather"
EXPERTS = "--num-experts 4 --moe-router-dtype fp32 --moe-router-load-balancing-type none"
ALLTOALL = "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a job is spread over ranks; `model` are the flags that it shares with its reference."""

    grid: Grid
    flags: str = ""
    model: str = ""
    relative: float = FP32


GQA = "--group-query-attention --num-query-groups 2 --qk-layernorm"
GPT3 = "--normalization LayerNorm --position-embedding-type learned_absolute --apply-layernorm-1p"

LAYOUTS = {
    "tp": Layout(grid=TP, model=GQA),
    "tp, sequence parallel": Layout(grid=TP, flags="--sequence-parallel", model=GQA),
    "tp, layer norm of 1 + weight": Layout(grid=TP, flags="--sequence-parallel", model=GPT3),
    "tp, hidden dropout": Layout(grid=TP, model="--hidden-dropout 0.1"),
    "pp": Layout(grid=PP),
    "pp, two chunks a stage": Layout(grid=PP, flags="--num-layers-per-virtual-pipeline-stage 1"),
    "pp, untied embeddings, tokens ahead": Layout(
        grid=PP, model="--untie-embeddings-and-output-weights --mtp-num-layers 1"
    ),
    "dp": Layout(grid=DP),
    "dp, distributed optimizer, overlapped": Layout(grid=DP, flags=OVERLAP),
    "dp, averaged in the collective": Layout(grid=DP, flags="--ddp-average-in-collective"),
    "dp, bf16": Layout(grid=DP, flags=OVERLAP, model="--bf16", relative=BF16),
    "dp, bf16, fp32 residual": Layout(
        grid=DP, flags=DIST_OPT, model="--bf16 --fp32-residual-connection", relative=BF16
    ),
    "tp, pp, everything recomputed": Layout(
        grid=Grid(pipelines=1, stages=2, tp=2), flags=f"--sequence-parallel {FULL_RECOMPUTE}"
    ),
    "dp, attention recomputed": Layout(grid=DP, flags="--recompute-activations"),
    "ep, allgather": Layout(grid=DP, flags="--expert-model-parallel-size 2", model=EXPERTS),
    "ep, tp, alltoall": Layout(
        grid=Grid(pipelines=2, tp=2),
        flags=f"--expert-model-parallel-size 2 --sequence-parallel {ALLTOALL}",
        model=EXPERTS,
    ),
    "dp, mla": Layout(
        grid=DP, model="--multi-latent-attention --qk-layernorm --q-lora-rank 16 --v-head-dim 24"
    ),
}


class Reference:
    """One-rank runs, made once for each model: the checkpoint they start from and their record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, Path]] = {}

    def of(self, model: str) -> tuple[Path, Path]:
        """The checkpoint, and the record of three iterations from it on one rank."""
        if model not in self._made:
            folder = self._folder / str(len(self._made))
            folder.mkdir(exist_ok=True)
            start, record = folder / "start", folder / "one.jsonl"
            words = model.split()
            train(
                ONE,
                folder / "first.jsonl",
                *words,
                "--save",
                start,
                "--save-interval",
                "1",
                iterations=1,
            )
            train(ONE, record, *words, *from_weights(start), iterations=3)
            self._made[model] = start, record
        return self._made[model]


def from_weights(folder: Path) -> tuple[str | Path, ...]:
    return ("--load", folder, "--finetune", "--exit-on-missing-checkpoint")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(name: str, reference: Reference, tmp_path: Path):
    layout = LAYOUTS[name]
    start, record = reference.of(layout.model)
    ours = tmp_path / "ours.jsonl"
    words = [
        *(*layout.model.split(), *layout.flags.split(), *from_weights(start)),
        *("--make-vocab-size-divisible-by", str(128 // layout.grid.tp)),
    ]
    train(layout.grid, ours, *words, iterations=3)
    assert_same_training(ours, record, relative=layout.relative)


RESUMED = {
    "fp32": "",
    "fp32, distributed optimizer": DIST_OPT,
    "bf16, distributed optimizer, overlapped": f"--bf16 {OVERLAP}",
    "bf16, fully reshardable": f"--bf16 {DIST_OPT} --dist-ckpt-optim-fully-reshardable",
    "saved in the background": f"{DIST_OPT} --async-save --async-strategy mcore "
    "--use-persistent-ckpt-worker",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_job_goes_on_with_the_same_bits(name: str, tmp_path: Path):
    flags, checkpoints = RESUMED[name].split(), tmp_path / "checkpoints"
    whole, first, second = (tmp_path / f"{part}.jsonl" for part in ("whole", "first", "second"))
    train(DP, whole, *flags, iterations=6)
    saving = ("--save", checkpoints, "--save-interval", "3", "--exit-interval", "3")
    train(DP, first, *flags, *saving, iterations=6)
    train(DP, second, *flags, "--load", checkpoints, iterations=6)
    assert read_lines(first) + read_lines(second) == read_lines(whole)


OTHERS = {
    "timers, norms, zeros, memory": (
        DP,
        "--timing-log-level 2 --log-params-norm --log-num-zeros-in-grad --log-memory-interval 1 "
        f"--log-throughput --log-device-memory-used {DIST_OPT}",
    ),
    "evaluation": (DP, "--eval-iters 1 --eval-interval 2 --split 80,10,10"),
    "tensorboard": (DP, "--log-timers-to-tensorboard --log-memory-to-tensorboard"),
    "torch profiler": (
        ONE,
        "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2",
    ),
    "no rerun machine": (DP, "--rerun-mode disabled"),
    "deterministic": (DP, "--deterministic-mode"),
    "data workers": (ONE, "--num-workers 2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_watches_changes_no_loss(name: str, reference: Reference, tmp_path: Path):
    grid, flags = OTHERS[name]
    start, record = reference.of("")
    ours = tmp_path / "ours.jsonl"
    words = [*flags.split(), "--tensorboard-dir", tmp_path / "board", *from_weights(start)]
    train(grid, ours, *words, iterations=3)
    assert_same_training(ours, record, relative=FP32)


def test_fp16_trains_with_its_loss_scale(tmp_path: Path):
    record = tmp_path / "fp16.jsonl"
    train(DP, record, "--fp16", "--initial-loss-scale", "1024", iterations=3)
    losses = [line["loss"] for line in read_lines(record)]
    assert [line["skipped"] for line in read_lines(record)] == [False] * 3
    assert losses[2] < losses[0]
