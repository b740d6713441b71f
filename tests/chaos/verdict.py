"""What a job of chaos must be: the same training, no rank that fails, a warning a fault at most."""

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.script import Fault, Script, warning_of
from tests.harness.training import read_lines

RELATIVE = 1e-6
SAYS = "malleus: "
WARNS = f"{SAYS}warning: "

OF_THE_MACHINE = (r"The pace is not held", r"All GPUs take [\d.]+ times as long")
"""True of a busy machine, without a fault of the script's; each of them once."""

NO_EVENTS = "Events are no longer written"
OF_THE_LOG = re.compile(rf"{NO_EVENTS}|Plans are no longer kept")
"""Warnings of the log itself are no events."""

UNWELCOME = re.compile(r"Traceback \(most recent call last\)|^malleus_megatron\S* ", re.MULTILINE)

COUNTED = {
    "plans": r"^malleus: iteration \d+: plan \d+, ",
    "migrations": r"^malleus: iteration \d+: moved ",
    "stragglers": r"^malleus: GPU \d+ is a straggler",
    "recoveries": r"^malleus: GPU \d+ has recovered",
    "refusals": r"^malleus: warning: A plan was not taken",
    "failed switches": r"^malleus: warning: A plan was not taken: .*failed on rank",
    "restarts": r"^malleus: warning: .*it is started again \(",
    "sidecar faults": r"^malleus: warning: The sidecar ",
}
"""What must have happened often enough in all jobs together, for the checks to mean something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A warning, and the iteration that had ended; inf if that is not known."""

    text: str
    iteration: float


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Of one job."""

    script: Script
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    worst: float = math.nan
    """Relative difference of a loss or gradient norm."""
    num_warnings: int = 0
    seconds: float = math.nan

    def line(self) -> str:
        """For people."""
        state = "ok" if not self.problems else f"FAILED ({len(self.problems)} problems)"
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return (
            f"seed {self.script.seed}: {state}; {self.script.iterations} iterations in "
            f"{self.seconds:.0f} s, {'own' if self.script.own_sidecar else 'given'} sidecar; "
            f"{counts}; {len(self.script.faults)} faults, {self.num_warnings} warnings; "
            f"worst difference {self.worst:.1e}"
        )


def judge(script: Script, folder: Path, stock: Path, outputs: Sequence[str]) -> Verdict:
    """Look at what a job of all ranks left."""
    verdict = Verdict(script=script)
    _compare(verdict, folder / "losses.jsonl", stock)
    for rank, output in enumerate(outputs):
        if found := UNWELCOME.search(output):
            line = output[found.start() :].splitlines()[0]
            verdict.problems.append(f"rank {rank} writes: {line}")
        if rank and WARNS in output:
            verdict.problems.append(f"rank {rank} warns; rank 0 speaks for all")
    warned = _warned(outputs[0], folder / "log" / "events.jsonl", verdict.problems)
    verdict.num_warnings = len(warned)
    verdict.problems += unexplained(warned, script.faults, own_sidecar=script.own_sidecar)
    verdict.counts = {
        name: len(re.findall(pattern, outputs[0], re.MULTILINE))
        for name, pattern in COUNTED.items()
    }
    return verdict


def unexplained(
    warned: Iterable[Warned], faults: Sequence[Fault], *, own_sidecar: bool
) -> list[str]:
    """Warnings beyond one for each fault that may have caused them, and had begun by then."""
    left = [(fault, warning_of(fault, own_sidecar=own_sidecar)) for fault in faults]
    machine = list(OF_THE_MACHINE)
    problems = []
    for one in warned:
        found = next(
            (
                entry
                for entry in left
                if entry[1] is not None
                # A fault begins when another rank has recorded the loss before its iteration;
                # rank 0 may warn before it has told the end of either.
                and entry[0].iteration <= one.iteration + 2
                and re.search(entry[1], one.text)
            ),
            None,
        )
        if found is not None:
            left.remove(found)
            continue
        cause = next((pattern for pattern in machine if re.search(pattern, one.text)), None)
        if cause is not None:
            machine.remove(cause)
        else:
            problems.append(f"no fault left for the warning after {one.iteration}: {one.text}")
    return problems


def _warned(output: str, events: Path, problems: list[str]) -> list[Warned]:
    """All warnings of the log; the events, as far as they were written, say when they came."""
    lines = output.splitlines()
    texts = [line.removeprefix(WARNS) for line in lines if line.startswith(WARNS)]
    of_the_log = [text for text in texts if OF_THE_LOG.search(text)]
    texts = [text for text in texts if text not in of_the_log]
    has_gaps = any(NO_EVENTS in text for text in of_the_log)
    written = _events(events)
    left, warned = deque(written), []
    for text in texts:
        differs = bool(left) and left[0]["message"] != text
        if differs and not has_gaps:
            problems.append(f"the log and the events differ: {text!r}, {left[0]['message']!r}")
        is_missing = not left or (differs and has_gaps)
        iteration = math.inf if is_missing else left.popleft()["iteration"]
        warned.append(Warned(text=text, iteration=iteration))
    if left or (len(written) < len(texts) and not has_gaps):
        problems.append(f"{len(texts)} warnings in the log, {len(written)} in the events")
    return [*warned, *(Warned(text=text, iteration=math.inf) for text in of_the_log)]


def _events(path: Path) -> list[Mapping[str, Any]]:
    """Warnings; on a disk that filled up any line may be cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = path.with_name("whole.jsonl")
    whole.write_text("".join(line for line in lines if line.endswith("}\n")), encoding="utf-8")
    return [event for event in read_lines(whole) if event["event"] == "warning"]


def _compare(verdict: Verdict, ours: Path, stock: Path) -> None:
    mine, theirs = read_lines(ours), read_lines(stock)[: verdict.script.iterations]
    if [line["iteration"] for line in mine] != [line["iteration"] for line in theirs]:
        verdict.problems.append(f"{len(mine)} iterations are recorded, {len(theirs)} in stock")
    verdict.worst = 0.0
    for a, b in zip(mine, theirs, strict=False):
        for name in ("loss", "grad_norm"):
            difference = abs(a[name] - b[name]) / abs(b[name])
            verdict.worst = max(verdict.worst, difference)
            if not difference <= RELATIVE:
                verdict.problems.append(
                    f"iteration {a['iteration']}: {name} {a[name]!r} instead of {b[name]!r}"
                )


LEAST = {
    "plans": 3,
    "migrations": 2,
    "stragglers": 1,
    "recoveries": 0.5,
    "refusals": 1,
    "failed switches": 0.4,
    "restarts": 0.7,
    "sidecar faults": 1.5,
}
"""Of each, in 200 iterations on the average."""


def too_little(totals: Mapping[str, int], iterations: int) -> list[str]:
    """What did not happen often enough in so many iterations of all jobs."""
    return [
        f"only {totals.get(name, 0)} {name}: at least {math.ceil(least * iterations / 200)} "
        "make the checks mean something"
        for name, least in LEAST.items()
        if totals.get(name, 0) < math.ceil(least * iterations / 200)
    ]
