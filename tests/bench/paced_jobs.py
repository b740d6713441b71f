"""One trace, three jobs: stock Megatron, micro-batches only, and Malleus."""

import itertools
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malleus_megatron.plan.codec import plan_to_json
from tests.bench.situations import SITUATIONS, Span, Work, injection
from tests.harness.ranks import run_script
from tests.harness.training import TINY_GPT, read_lines, write_json

SHORT_HELD = (5, *(2 for _ in SITUATIONS[1:-1]), 3)
"""For what needs no time to find its plan; the first iterations of a job are longer."""
JOB_LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One iteration."""

    iteration: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Where a bench's jobs run, and what they train."""

    work: Work
    folder: Path

    def flags(self, trace: Sequence[Span], *more: str) -> list[str]:
        """Megatron's flags."""
        grid = self.work.grid
        return [
            *(*TINY_GPT, *grid.flags, "--num-layers", str(grid.num_layers)),
            *("--train-iters", str(trace[-1].end - 1), *more),
            # A pipeline may wait for the other longer than the recipe's minute.
            *("--distributed-timeout-minutes", "20"),
        ]

    def stock(self, trace: Sequence[Span]) -> list[Step]:
        """No seam of the plugin is there; the layers are paced and slowed all the same."""
        env = {
            "STOCK_PACE": str(self._pace()),
            "STOCK_INJECT": str(self._injection("stock", trace)),
        }
        return self._timed("stock", "tests.bench.timed_job", self.flags(trace), env)

    def split(self, trace: Sequence[Span]) -> list[Step]:
        """The best micro-batches for each situation, from its first iteration on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        schedule = []
        for number, span in enumerate(trace[1:], start=1):
            plan = plan_to_json(self.work.split(span.situation.rates))
            path = write_json(self.folder / f"split-{number}.json", plan)
            schedule.append({"iteration": span.start, "plan": path.name})
        path = write_json(self.folder / "schedule.json", schedule)
        flags = ["--malleus-sidecar", "none", "--malleus-plan-schedule", str(path)]
        return self._ours("split", trace, flags)

    def malleus(self, trace: Sequence[Span]) -> list[Step]:
        """Measured, detected, planned and moved by the job itself."""
        return self._ours("malleus", trace, [])

    def undisturbed(self, trace: Sequence[Span]) -> list[dict[str, Any]]:
        """What a stock job that nobody slows down trains: each iteration's loss."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.folder / "losses.jsonl"
        record.unlink(missing_ok=True)  # a job appends
        flags = self.flags(trace, "--malleus-record", str(record))
        self._run("malleus_megatron.pretrain_gpt", flags, {})
        return read_lines(record)

    def events(self, name: str) -> list[dict[str, Any]]:
        """What a job of ours wrote."""
        return read_lines(self.folder / name / "events.jsonl")

    def _ours(self, name: str, trace: Sequence[Span], flags: Sequence[str]) -> list[Step]:
        ours = ["--malleus", "--malleus-pace", str(self._pace())]
        ours += ["--malleus-inject", str(self._injection(name, trace))]
        ours += ["--malleus-log-dir", str(self.folder / name)]
        if not (self.folder / f"times-{name}.json").exists():
            shutil.rmtree(self.folder / name, ignore_errors=True)  # a job appends
        return self._timed(name, "tests.bench.two_nodes", self.flags(trace, *ours, *flags), {})

    def _timed(
        self, name: str, module: str, flags: Sequence[str], env: Mapping[str, str]
    ) -> list[Step]:
        """Steps from the beginning of one to that of the next; the last has no end.

        A job whose times are there has run: a bench that was broken off goes on.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        times = self.folder / f"times-{name}.json"
        if not times.exists():
            unfinished = times.with_suffix(".unfinished")
            self._run(module, flags, {"STEP_TIMES": str(unfinished), **env})
            unfinished.rename(times)
        begun = json.loads(times.read_text(encoding="utf-8"))
        return [
            Step(iteration=number, seconds=after - before)
            for number, (before, after) in enumerate(itertools.pairwise(begun), start=1)
        ]

    def _pace(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return write_json(self.folder / "pace.json", self.work.pace)

    def _injection(self, name: str, trace: Sequence[Span]) -> Path:
        entries = [asdict(entry) for entry in injection(trace).entries]
        return write_json(self.folder / f"injection-{name}.json", entries)

    def _run(self, module: str, flags: Sequence[str], env: Mapping[str, str]) -> None:
        world = self.work.grid.world
        run_script(world, ["-m", module, *flags], env=env, timeout_s=JOB_LIMIT_S)


def settled_s(steps: Sequence[Step], span: Span, *, last: int = 4) -> float:
    """The median of a situation's last steps."""
    there = [step.seconds for step in steps if span.start <= step.iteration < span.end]
    return statistics.median(there[-last:])
