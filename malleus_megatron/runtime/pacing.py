"""CPU mode: layers are held to nominal times by sleeping, so that processes overlap as GPUs do."""

import time
from dataclasses import dataclass, replace

from malleus_megatron.plan.pace import LayerPace, Pace
from malleus_megatron.runtime.stopwatch import Stopwatch
from malleus_megatron.runtime.windows import LayerCall, Phase

MISS_RATIO = 1.05
"""Work that takes longer than this times its target is a miss."""

_LARGEST_CORRECTION = 0.05
_LARGEST_LATENESS_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceReport:
    """How well this machine holds the pace, over all layer calls of one GPU so far."""

    num_calls: int = 0
    num_missed: int = 0
    worst_phase: Phase = Phase.forward
    worst_target_s: float = 0.0
    worst_needed_s: float = 0.0
    """Real work of the call that exceeded its target most, without waiting for others."""

    @property
    def worst_ratio(self) -> float:
        """Needed / target of the worst miss; 0 if there is none."""
        return self.worst_needed_s / self.worst_target_s if self.num_missed else 0.0

    def message(self) -> str:
        """One sentence for a person, with the numbers and the remedy."""
        return (
            f"This machine cannot hold the pace: {self.num_missed} of {self.num_calls} layer calls "
            f"took more than {MISS_RATIO} times their time; at worst a {self.worst_phase} took "
            f"{self.worst_needed_s:.4f} s instead of {self.worst_target_s:.4f} s. Lengthen the "
            "times of the pace file, shrink the model, or run fewer processes."
        )


class Pacer:
    """Holds each layer to `rate x nominal time`."""

    def __init__(self, pace: Pace, stopwatch: Stopwatch) -> None:
        """`reset` must name the TP degree before the first layer."""
        self.rate = 1.0
        self.report = PaceReport()
        self._pace = pace
        self._nominal: LayerPace | None = None
        self._stopwatch = stopwatch
        self._sleeper = Sleeper()

    def reset(self, tp_degree: int) -> None:
        """Take the nominal times of a TP degree.

        Raises:
            BadInputError: the pace has no times for it.
        """
        self._nominal = self._pace.at(tp_degree)

    def stretch(self, call: LayerCall) -> float:
        """Sleep for what is left of the call's time.

        A wait inside the call passes in that time, too: it is this machine's, whose few cores
        let one rank run after the other, or a slow peer's, which lasts longer than the call.
        """
        assert self._nominal is not None, "reset names the TP degree first"
        forward = call.phase is Phase.forward
        nominal_s = self._nominal.forward_s if forward else self._nominal.backward_s
        target_s, needed_s = self.rate * nominal_s, call.own_s(self._stopwatch)
        self._count(call.phase, target_s, needed_s)
        left_s = max(0.0, target_s - needed_s)
        call.hidden_s = min(left_s, call.paused_s(self._stopwatch))
        return self._sleeper.sleep(left_s - call.hidden_s)

    def _count(self, phase: Phase, target_s: float, needed_s: float) -> None:
        report = replace(self.report, num_calls=self.report.num_calls + 1)
        if needed_s > MISS_RATIO * target_s:
            report = replace(report, num_missed=report.num_missed + 1)
            if needed_s / target_s > self.report.worst_ratio:
                report = replace(
                    report,
                    worst_phase=phase,
                    worst_target_s=target_s,
                    worst_needed_s=needed_s,
                )
        self.report = report


class Sleeper:
    """Sleeps that are right on average.

    `time.sleep` returns about 0.1 ms late, and later on a busy machine. A sleep's lateness is taken
    off the next ones, at most a twentieth of each: one late call leaves the median as it is.
    """

    def __init__(self) -> None:
        """Not late."""
        self._late_s = 0.0

    def sleep(self, duration_s: float) -> float:
        """Sleep; a duration that is not above 0 returns at once. Returns the seconds asked for."""
        if duration_s <= 0:
            return 0.0
        correction_s = min(self._late_s, _LARGEST_CORRECTION * duration_s)
        deadline = time.perf_counter() + duration_s - correction_s
        time.sleep(duration_s - correction_s)
        late_s = self._late_s - correction_s + time.perf_counter() - deadline
        self._late_s = min(late_s, _LARGEST_LATENESS_S)
        return duration_s
