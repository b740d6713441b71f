"""Who has become a straggler and who has recovered: an event each, and lines that stay few."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from malleus_megatron.control.telemetry import ABSENT, IDLE, GpuReading, likely_reason
from malleus_megatron.control.values import Decision
from malleus_megatron.events import EventLog
from malleus_megatron.plan.rates import Rates

_MANY = 16
"""With more at a time one line speaks for all, and names so many."""
_MUCH_SLOWER = 1.5
"""A straggler whose rate has grown by this since it was told is told again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A new straggler."""

    gpu: int
    rate: float
    since: int | None
    """The iteration in which it first stood out."""
    delay: int | None
    """Iterations from then until that was certain."""


class StragglerNews:
    """Compares each decision with the one before."""

    def __init__(self, events: EventLog, say: Callable[[str], None]) -> None:
        """All GPUs are healthy.

        Args:
            events: Has an event for every GPU, however many there are.
            say: Prints one line into the training log.
        """
        self._events = events
        self._say = say
        self._told: dict[int, float] = {}
        """Stragglers, with the rate that was told."""
        self._unexplained: list[_Named] = []

    @property
    def asks_readings(self) -> bool:
        """Whether there are new ones, which wait for what their drivers say."""
        return bool(self._unexplained)

    def take(self, decision: Decision, iteration: int) -> None:
        """Say who has recovered or is much slower; new stragglers are named with their readings.

        A GPU whose rate is not known is what it was: a planner that was started anew knows none.
        """
        now, rates = frozenset(decision.stragglers), decision.rates
        known = {gpu for gpu, _ in rates}
        found = {one.gpu: one for one in decision.detections}
        for gpu in sorted(now - self._told.keys()):
            one = found.get(gpu)
            self._unexplained.append(
                _Named(
                    gpu=gpu,
                    rate=rates[gpu],
                    since=None if one is None else one.since,
                    delay=None if one is None else one.delay,
                )
            )
        recovered = sorted(known & self._told.keys() - now)
        for gpu in recovered:
            self._events.write("recovered", iteration, gpu=gpu, rate=rates[gpu])
        self._say_each(recovered, "GPU {} has recovered: rate {:.2f}", "GPUs have recovered", rates)
        slower = sorted(
            gpu
            for gpu in now & known & self._told.keys()
            if self._told[gpu] < math.inf and rates[gpu] >= _MUCH_SLOWER * self._told[gpu]
        )
        self._say_each(
            slower, "GPU {} is slower yet: rate {:.2f}", "stragglers are slower yet", rates
        )
        told = {gpu: rates[gpu] for gpu in (now - self._told.keys()).union(slower)}
        self._told = {g: r for g, r in self._told.items() if g not in recovered} | told

    def _say_each(self, gpus: Sequence[int], one: str, many: str, rates: Rates) -> None:
        if len(gpus) > _MANY:
            self._say(f"{len(gpus)} {many}: {_some(gpus)}")
            return
        for gpu in gpus:
            self._say(one.format(gpu, rates[gpu]))

    def explain(self, readings: Sequence[GpuReading], iteration: int) -> None:
        """Name the new stragglers, each with what sets its GPU apart.

        Args:
            readings: Of every GPU.
            iteration: The last one that has ended.
        """
        news, self._unexplained = self._unexplained, []
        reasons = _reasons([one.gpu for one in news], readings)
        for one, reason in zip(news, reasons, strict=True):
            self._events.write("straggler", iteration, reason=reason, **asdict(one))
            if len(news) <= _MANY:
                since = "" if one.since is None else f" since iteration {one.since}"
                self._say(
                    f"GPU {one.gpu} is a straggler: rate {one.rate:.2f}{since}{_likely(reason)}"
                )
        if len(news) > _MANY:
            rates = [one.rate for one in news]
            slowest = rates.index(max(rates))
            self._say(
                f"{len(news)} GPUs have become stragglers, with rates from {min(rates):.2f} to "
                f"{max(rates):.2f}: {_some([one.gpu for one in news])}. The slowest is GPU "
                f"{news[slowest].gpu}{_likely(reasons[slowest])}"
            )


def _reasons(gpus: Sequence[int], readings: Sequence[GpuReading]) -> list[str | None]:
    """What sets each apart; to go through all of its peers for each of many takes too long."""
    if len(gpus) <= _MANY:
        return [likely_reason(gpu, readings) for gpu in gpus]
    kinds: dict[float, list[GpuReading]] = {}
    for one in readings:
        kinds.setdefault(one.max_sm_mhz, []).append(one)
    usual = {kind: _usual(ones) for kind, ones in kinds.items() if not math.isnan(kind)}
    return [
        likely_reason(0, [mine, *([usual[mine.max_sm_mhz]] if mine.max_sm_mhz in usual else [])])
        for mine in (readings[gpu] for gpu in gpus)
    ]


def _usual(peers: Sequence[GpuReading]) -> GpuReading:
    """A GPU that stands for all of its kind; clocks of those that wait say nothing."""
    at_work = [one for one in peers if not one.has(IDLE)]
    return GpuReading(
        sm_mhz=_median([one.sm_mhz for one in at_work]),
        max_sm_mhz=peers[0].max_sm_mhz,
        other_processes=_median([one.other_processes for one in peers]),
        corrected_ecc=_median([one.corrected_ecc for one in peers]),
    )


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else ABSENT


def _likely(reason: str | None) -> str:
    return "" if reason is None else f"; likely: {reason}"


def _some(gpus: Sequence[int]) -> str:
    named = ", ".join(map(str, gpus[:_MANY]))
    return f"GPU {named} and {len(gpus) - _MANY} more"
