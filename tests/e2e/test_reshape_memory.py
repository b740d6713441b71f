"""A switch stays within a bound on memory: both states whole, or old state leaves on the way."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_reshape_safety import RANKS, events_of, nominal_of, plan_of, run_job
from tests.harness.recipes import BF16, CLIPPED, LLAMA, Recipe
from tests.harness.training import Grid

pytestmark = pytest.mark.e2e

import os
SCRIPT=os.environ.get("SCRIPT","there_and_back")
MIB = 2**20
WIDE = "--hidden-size 256 --num-attention-heads 4"
"""So wide that state outweighs what else is in memory: 60 MiB in all."""
GRID = Grid(pipelines=2, stages=2, num_microbatches=4)
B = plan_of((4, [((0, 3), 3), ((1,), 1)]), standby=(2,))
C = plan_of((1, [((3,), 4)]), (3, [((2,), 1), ((0, 1), 3)]))


def tour(flags: str, bound_mib: int, folder: Path) -> list[list[dict]]:
    recipe = Recipe(name="wide", grid=GRID, flags=f"{LLAMA} {CLIPPED} {flags} {WIDE}")
    run_job(
        SCRIPT,
        recipe,
        folder,
        {4: ("B", B), 5: ("C", C), 6: ("nominal", nominal_of(GRID))},
        iterations=6,
        env={"CHECK_AT": "5,6", "BUFFER_BYTES": str(MIB)},
        flags=["--malleus-migration-memory", str(bound_mib)],
    )
    logs = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in RANKS]
    print(
        [
            [
                f"{m['to']} {m['gave_back']} {m['extra_bytes'] / MIB:.1f}"
                for m in logs[0]["tour"]["moves"]
            ]
        ]
    )
    return logs


@pytest.mark.parametrize("bound_mib", [3, 6, 10, 20, 64])
@pytest.mark.parametrize("flags", [BF16, "--bf16", "", "--use-distributed-optimizer"])
def test_x(flags, bound_mib, tmp_path):
    try:
        logs = tour(flags, bound_mib, tmp_path)
    except Exception as e: print(chr(10).join(l for l in str(e).splitlines() if "XX" in l)[:1500])
    for e in events_of(tmp_path, "warning"):
        print(e["message"][:400])
