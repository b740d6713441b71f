"""`python -m tests.chaos --seeds 0-19`: many jobs under random faults, one after the other.

A line a seed, and at the end whether enough has happened for the checks to mean something. Exit
status 1 if a job went wrong or too little happened.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from tests.chaos.run import run, train_stock
from tests.chaos.script import draw
from tests.chaos.verdict import too_little
from tests.harness.training import Grid

GRIDS = {
    8: Grid(pipelines=2, stages=2, tp=2, num_layers=4, num_microbatches=4),
    4: Grid(pipelines=2, stages=2, num_layers=4, num_microbatches=4),
}
"""By the number of ranks."""


def main() -> int:
    arguments = _parser().parse_args()
    place = arguments.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    grid = GRIDS[arguments.ranks]
    print(f"{len(arguments.seeds)} jobs of {grid.world} ranks; what they leave is in {place}")
    stock = place / "stock.jsonl"
    if not stock.exists():
        train_stock(grid, place, arguments.iterations)
    totals: Counter[str] = Counter()
    failed = 0
    for seed in (bar := tqdm(arguments.seeds, desc="chaos", unit="job", file=sys.stderr)):
        folder = place / f"seed-{seed}"
        folder.mkdir()
        verdict = run(draw(seed, grid, arguments.iterations), folder, stock)
        totals += Counter(verdict.counts)
        failed += bool(verdict.problems)
        with bar.external_write_mode():
            print(verdict.line(), *verdict.problems, sep="\n    ", flush=True)
    print("all:", ", ".join(f"{count} {name}" for name, count in sorted(totals.items())))
    missing = too_little(totals, len(arguments.seeds) * arguments.iterations)
    for line in missing:
        print(line)
    print(f"{len(arguments.seeds) - failed} of {len(arguments.seeds)} jobs held")
    return int(bool(failed or missing))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=_numbers, default=_numbers("0-19"), help="as in 0-4,7")
    parser.add_argument("--ranks", type=int, choices=GRIDS, default=8)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--out", type=Path, help="folder for what the jobs leave")
    return parser


def _numbers(text: str) -> list[int]:
    ends = [part.split("-") for part in text.split(",")]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]


if __name__ == "__main__":
    sys.exit(main())
