"""Checkpoints written from a plan's stages are Megatron's: stock loads them under any grid.

A save run is under plan A at iteration 2, B at 4 and C at 5, and saves each time, the last time
after its training loop. Stock goes on from each and is compared with a stock run never stopped.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.plan.codec import plan_id, plan_to_json
from tests.harness.plans import plan_of
from tests.harness.ranks import RankOutcome, run_ranks, run_script
from tests.harness.recipes import (
    ALL_OVERLAPPED,
    BASE,
    BF16,
    CLIPPED,
    GPT2,
    GROUPED,
    LLAMA,
    SMOOTH,
    UNTIED,
)
from tests.harness.reshaping import UNDER_PLANS, write_plans
from tests.harness.training import Grid, read_lines, train, write_json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("saving_script.py")
TP2_DP2 = Grid(pipelines=2, tp=2)
PP2_DP2 = Grid(pipelines=2, stages=2)
TP1 = Grid(pipelines=4)
TP2_PP2 = Grid(pipelines=1, stages=2, tp=2)
PP4 = Grid(pipelines=1, stages=4)

MIXED_TP = plan_of((3, [((3,), 1), ((0,), 3)]), (5, [((1, 2), 4)]))
UNLIKE_LAYERS = plan_of((6, [((0,), 3), ((1,), 1)]), (2, [((2,), 1), ((3,), 3)]))
STANDBY = plan_of((8, [((1, 2), 3), ((3,), 1)]), standby=(0,))
PLANS = {2: MIXED_TP, 4: UNLIKE_LAYERS, 5: STANDBY}
SAVING = ("--save-interval", "2")
LAST = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe, how it saves, and from where it is loaded under which grid."""

    model: str
    loads: tuple[tuple[int, Grid], ...]
    nominal: Grid = TP2_PP2
    saving: str = ""
    writer: str = ""
    """See `saving_script`."""
    stock: str = ""
    """Flags by which stock writes the same form."""
    relative: float = 1e-6


RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
IN_BACKGROUND = "--async-save --async-strategy mcore --use-persistent-ckpt-worker"
CASES = {
    "fp32": Case(
        model=f"{LLAMA} {CLIPPED} --rerun-mode validate_results",
        loads=((2, TP1), (4, TP2_PP2), (5, PP4)),
    ),
    "fp32, distributed optimizer": Case(
        model=f"{GPT2} {UNTIED} --use-distributed-optimizer",
        nominal=PP2_DP2,
        stock=RESHARDABLE,
        loads=((2, TP2_PP2), (5, TP1)),
    ),
    "bf16, in the background": Case(
        model=f"{LLAMA} {UNTIED} {GROUPED} {SMOOTH} --bf16",
        saving=IN_BACKGROUND,
        writer="slow",
        relative=2e-4,
        # Written while the next step changes tensors in place (2), and while a plan changes (4).
        loads=((2, PP4), (4, PP4), (5, TP2_PP2)),
    ),
    "bf16, distributed optimizer, overlap": Case(
        model=f"{LLAMA} {SMOOTH} {CLIPPED} {BF16} {RESHARDABLE} {ALL_OVERLAPPED}",
        nominal=TP2_DP2,
        relative=2e-4,
        loads=((4, TP1),),
    ),
}
"""Every plan is loaded under every grid by one of them."""


def words_of(case: Case, grid: Grid) -> list[str]:
    """The recipe, with the same padded vocabulary under every grid."""
    return [
        *(*BASE, "--num-layers", "4", "--lr-decay-iters", "9", "--override-opt-param-scheduler"),
        *("--make-vocab-size-divisible-by", str(128 // grid.tp), "--ckpt-format", "torch_dist"),
        *case.model.split(),
    ]


def under(*flags: object) -> tuple[str, ...]:
    return (*UNDER_PLANS, *map(str, flags))


def save_under_plans(case: Case, folder: Path, iterations: int = 5) -> list[RankOutcome]:
    """Train and save; checkpoints, losses and events lie in the folder."""
    grid = case.nominal
    return run_script(
        4,
        [
            *(str(SCRIPT), *words_of(case, grid), *grid.flags, *case.saving.split(), *SAVING),
            *("--train-iters", str(iterations), "--save", str(folder / "checkpoints")),
            *("--malleus-record", str(folder / "ours.jsonl")),
            *under("--malleus-plan-schedule", write_plans(folder, PLANS)),
            *("--malleus-log-dir", str(folder)),
        ],
        env={"WRITER": case.writer or "plain"},
        expect_exit=None if case.writer.startswith("dies") else 0,
    )


@pytest.fixture(scope="module")
def stock_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of undisturbed stock runs, each made once: losses, and a checkpoint of 5."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder, case = tmp_path_factory.mktemp("stock"), CASES[name]
        words = words_of(case, case.nominal)
        saving = ("--save", str(folder), "--save-interval", "5", *case.stock.split())
        train(case.nominal, folder / "stock.jsonl", *saving, recipe=words, iterations=LAST)
        return folder

    return folder_of


def go_on(
    case: Case, grid: Grid, record: Path, checkpoints: Path, step: int, *flags: str | Path
) -> list[RankOutcome]:
    """Two iterations from a checkpoint."""
    loading = ("--load", str(checkpoints), "--ckpt-step", str(step))
    return train(grid, record, *loading, *flags, recipe=words_of(case, grid), iterations=step + 2)


def assert_goes_on(record: Path, stock: Path, step: int, relative: float) -> None:
    """The iterations after a step, as in the stock run of that folder."""
    found, expected = read_lines(record), read_lines(stock / "stock.jsonl")[step : step + 2]
    assert [line["iteration"] for line in found] == [step + 1, step + 2]
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=relative, abs=0), mine


@pytest.mark.parametrize("name", CASES)
def test_stock_goes_on_from_a_plans_checkpoint(
    name: str, stock_runs: Callable[[str], Path], tmp_path: Path
) -> None:
    case, stock = CASES[name], stock_runs(name)
    output = save_under_plans(case, tmp_path)[0].output
    happened = [event["event"] for event in read_lines(tmp_path / "events.jsonl")]
    assert "warning" not in happened
    assert happened.count("migration") == len(PLANS), "a save moves nothing"
    if case.writer:
        written = "successfully saved checkpoint from iteration       4"
        assert output.index("iteration 5: plan 3") < output.index(written)
    saved = tmp_path / "checkpoints"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "5"
    for step, grid in case.loads:
        later = tmp_path / f"from-{step}.jsonl"
        go_on(case, grid, later, saved, step)
        assert_goes_on(later, stock, step, case.relative)
    folders = tuple(str(folder / "iter_0000005") for folder in (saved, stock))
    mine, theirs = run_ranks(2, described, folders)
    assert {key: (mine.get(key), theirs.get(key)) for key in mine.keys() | theirs.keys()} == {
        key: (value, value) for key, value in theirs.items()
    }
    if case.nominal == TP2_PP2:
        # As of a nominal grid just seeded: whatever their seats were, TP peers must draw alike.
        (streams,) = run_ranks(1, random_streams, folders[0])
        for pp_rank in range(2):
            a, b = (streams[pp_rank, tp_rank] for tp_rank in range(2))
            assert a["shared"] == b["shared"]
            assert a["own"] != b["own"]
        assert streams[0, 0]["shared"] != streams[1, 0]["shared"]


NOT_COMPARED = (
    *("args.malleus", "args.rank", "args.save", "args.train_iters"),
    # Counted from --train-iters, and without a meaning for a constant decay.
    "opt_param_scheduler.wd_incr_steps",
    # What the stock run, of which one checkpoint is compared, has otherwise.
    *("args.async_save", "args.use_persistent_ckpt_worker"),
    "args.dist_ckpt_optim_fully_reshardable",
)
"""Beginnings of keys."""


def described(folders: tuple[str, str]) -> dict[str, str]:
    """What is in a rank's checkpoint: keys and shapes, what is common to ranks, random streams."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    folder = folders[dist.get_rank()]
    found = {
        key: str(tuple(getattr(value, "size", ())))
        for key, value in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    }
    common = dist_checkpointing.load_common_state_dict(folder)
    common["args"] = vars(common["args"])
    found |= {key: text for key, text in leaves(common) if not key.startswith(NOT_COMPARED)}
    return found


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Values by dotted keys. What sharded parts leave behind when they are taken out is empty."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{key}.{number}")
    else:
        yield key, str(value)


def random_streams(folder: str) -> dict[tuple[int, int], dict[str, bytes]]:
    """By (pipeline rank, TP rank): torch's stream, and that for tensors cut up by TP."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    wanted = {
        f"{pp}.{tp}": ShardedObject("rng_state", None, (2, 2), (pp, tp))
        for pp in range(2)
        for tp in range(2)
    }
    loaded = dist_checkpointing.load(wanted, folder)
    return {
        (pp, tp): {
            "shared": bytes(loaded[f"{pp}.{tp}"][0]["torch_rng_state"].numpy()),
            "own": bytes(
                loaded[f"{pp}.{tp}"][0]["rng_tracker_states"]["model-parallel-rng"].numpy()
            ),
        }
        for pp in range(2)
        for tp in range(2)
    }


def test_a_killed_save_leaves_the_one_before_and_its_plan(
    stock_runs: Callable[[str], Path], tmp_path: Path
) -> None:
    """And a job that goes on is under that plan again, as in stock, and saves over the ruin."""
    stock = stock_runs("fp32")
    case = replace(CASES["fp32"], writer="dies in iter_0000004")
    outcomes = save_under_plans(case, tmp_path)
    assert any(outcome.exit_code != 0 for outcome in outcomes)
    saved = tmp_path / "checkpoints"
    assert (saved / "iter_0000004").exists()
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
    again, events = tmp_path / "again.jsonl", tmp_path / "again"
    go_on(
        case,
        case.nominal,
        again,
        saved,
        2,
        *under("--malleus-log-dir", events),
        *("--save", str(saved), *SAVING),
    )
    assert_goes_on(again, stock, 2, case.relative)
    plans = [event for event in read_lines(events / "events.jsonl") if event["event"] == "plan"]
    assert [(event["iteration"], event["plan"]) for event in plans] == [(3, plan_id(MIXED_TP))]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    fewer = Grid(pipelines=2)
    ranks = go_on(case, fewer, tmp_path / "fewer.jsonl", saved, 2, *under())
    assert "the checkpoint's plan is not taken up: The plan is for" in ranks[0].output
    assert_goes_on(tmp_path / "fewer.jsonl", stock, 2, case.relative)


def test_another_format_goes_by_way_of_the_nominal_stages(
    stock_runs: Callable[[str], Path], tmp_path: Path
) -> None:
    stock = stock_runs("fp32")
    case = replace(CASES["fp32"], model=f"{CASES['fp32'].model} --ckpt-format torch")
    save_under_plans(case, tmp_path)
    later = tmp_path / "later.jsonl"
    go_on(case, case.nominal, later, tmp_path / "checkpoints", 5)
    assert_goes_on(later, stock, 5, case.relative)


def test_a_stock_checkpoint_starts_under_a_plan(
    stock_runs: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "fp32, distributed optimizer"
    case, stock = CASES[name], stock_runs(name)
    start = write_json(tmp_path / "plan.json", plan_to_json(UNLIKE_LAYERS))
    later = tmp_path / "later.jsonl"
    flags = under("--malleus-plan", start, "--malleus-log-dir", tmp_path)
    go_on(case, case.nominal, later, stock, 5, *flags)
    assert_goes_on(later, stock, 5, case.relative)
    events = read_lines(tmp_path / "events.jsonl")
    assert any(event["event"] == "plan" and event["iteration"] == 6 for event in events)
