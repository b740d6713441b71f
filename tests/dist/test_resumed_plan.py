"""Whose plan a restarted job takes up: that of the folder which Megatron has loaded."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from malleus_megatron.adapter import saves
from malleus_megatron.adapter.plan_file import keep_plan
from malleus_megatron.plan.plan import Plan
from tests.harness.recipes import random_job_plan
from tests.harness.training import Grid

ITERATION = 4


def some_plan(seed: int) -> Plan:
    return random_job_plan(random.Random(seed), Grid(pipelines=2, tp=2), (1, 2))


def saved(root: Path, plan: Plan | None, last: int) -> None:
    """A folder of checkpoints with one of ITERATION, whose last one is another or the same."""
    folder = root / f"iter_{ITERATION:07d}"
    folder.mkdir(parents=True)
    assert keep_plan(plan, folder) is None
    (root / "latest_checkpointed_iteration.txt").write_text(str(last), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "persistent", "replaced", "last_replaced", "taken"),
    [
        (None, None, 1, ITERATION, None),  # stale: the job keeps no such checkpoints any more
        ("global", None, 1, 6, None),  # stale: Megatron's last one there is another
        ("global", None, 1, ITERATION, 1),
        ("global", 2, 1, ITERATION, 1),  # Megatron loads the non-persistent one of two
        ("global", 2, None, ITERATION, None),
        ("global", 2, 1, 2, 2),
        (None, 2, 1, ITERATION, 2),
    ],
)
def test_only_the_folder_that_was_loaded_counts(
    kind: str | None,
    persistent: int | None,
    replaced: int | None,
    last_replaced: int,
    taken: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(
        load=str(tmp_path),
        iteration=ITERATION,
        non_persistent_ckpt_type=kind,
        non_persistent_global_ckpt_dir=None,
    )
    monkeypatch.setattr(saves, "get_args", lambda: args)
    plans = {seed: None if seed is None else some_plan(seed) for seed in (None, 1, 2)}
    saved(tmp_path, plans[persistent], ITERATION)
    saved(tmp_path / "non_persistent", plans[replaced], last_replaced)
    assert saves._loaded_plan() == plans[taken]
