"""Layer times to straggling rates, iteration by iteration.

    samples -> layer time of each GPU, over what a healthy one takes at its TP degree
            -> minus what healthy GPUs show in this iteration       (reference)
            -> one reading a GPU -> its track: level, shift, name   (shifts)

Only layers are compared, so the embedding and the head, which make some stages longer by design,
make no GPU look slow; and what slows all GPUs down together leaves every rate as it is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from malleus_megatron.detector.degrees import DegreeTimes
from malleus_megatron.detector.reference import healthy_level
from malleus_megatron.detector.samples import Sample
from malleus_megatron.detector.shifts import Sensitivity, Track, common_spread
from malleus_megatron.detector.smoothing import layer_time_s

_ALIKE = math.log(1.1)
_ALIKE_SPREADS = 2.5

type Logs = Mapping[int, float]
"""GPU -> logarithm of a time in seconds, or of a ratio of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a detector gets of one iteration."""

    iteration: int
    samples: Sequence[Sample]
    degrees: Mapping[int, int]
    """TP degree of every GPU that holds layers; samples of others are left out."""
    probes: Sequence[tuple[int, float]] = ()
    """Pairs (GPU that holds no layer, rate)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """What all iterations so far say about the GPUs. A value: `after` makes the next one."""

    times: DegreeTimes
    tracks: Mapping[int, Track] = field(default_factory=dict)
    """Of every GPU that ever had a reading."""
    job: Track = field(default_factory=Track)
    """Of what the healthy GPUs take all together, over the time when they were first seen."""
    best: float = 0.0
    """The lowest level that the job has had."""
    ignored: tuple[int, ...] = ()
    """GPUs that hold layers and gave no usable sample in the last iteration."""

    def after(self, seen: Seen, wanted: Sensitivity) -> "Rating":
        """With one more iteration."""
        logs = dict(_usable(seen))
        ignored = tuple(gpu for gpu in sorted(seen.degrees) if gpu not in logs)
        spread = common_spread(self.tracks.values())
        rating, readings = self._compared(logs, seen, spread, wanted) if logs else (self, {})
        probed = {gpu: math.log(rate) for gpu, rate in seen.probes if gpu not in seen.degrees}
        moved = {
            gpu: self.tracks.get(gpu, Track()).after((seen.iteration, value), spread, wanted)
            for gpu, value in (readings | probed).items()
        }
        others = {
            gpu: track.judged(wanted.threshold)
            for gpu, track in self.tracks.items()
            if gpu not in moved
        }
        return replace(rating, tracks=dict(sorted((others | moved).items())), ignored=ignored)

    @property
    def common(self) -> float:
        """What healthy GPUs take now over what they took at best."""
        return math.exp(self.job.level - self.best)

    def healthy_s(self, degree: int, window: int) -> float:
        """A layer on healthy GPUs at a TP degree now: the median of the last iterations.

        Raises:
            BadInputError: nothing was ever measured and nothing is known beforehand.
        """
        return self.times.expected_s(degree) * math.exp(self._scale(window) or 0.0)

    def _scale(self, window: int) -> float | None:
        """Of the job, over the last readings; None if there was never one."""
        values = [value for _, value in self.job.readings[-window:]]
        return median(values) if values else None

    def _compared(
        self, logs: Logs, seen: Seen, spread: float, wanted: Sensitivity
    ) -> tuple["Rating", dict[int, float]]:
        """Each GPU's reading, and what was learned of degrees and of the job as a whole."""
        alike = max(_ALIKE, _ALIKE_SPREADS * spread)
        times = self._relearned(seen.degrees)
        if not any(times.knows(seen.degrees[gpu]) for gpu in logs) and not self.job.readings:
            times = _anchored(times, logs, seen.degrees, alike)
        ratios = {
            gpu: value - math.log(times.expected_s(seen.degrees[gpu]))
            for gpu, value in logs.items()
        }
        compared = [gpu for gpu in logs if times.knows(seen.degrees[gpu])]
        if compared:
            scale = self._reference({gpu: ratios[gpu] for gpu in compared}, alike)
            rating = self._rescaled((seen.iteration, scale), wanted)
        else:  # degrees that are all new: the job is taken to go on as it did
            scale, rating = self._scale(wanted.window) or 0.0, self
        readings = {gpu: ratios[gpu] - scale for gpu in compared}
        for degree in sorted({seen.degrees[gpu] for gpu in logs}):
            if not times.is_learning(degree):
                continue
            own = {gpu: value for gpu, value in ratios.items() if seen.degrees[gpu] == degree}
            lesson_s = self._lesson_s(own, times.expected_s(degree), scale, alike)
            if times.is_plausible(degree, lesson_s):
                times = times.taught(degree, lesson_s, by_stragglers=self._all_named(own))
            elif not times.knows(degree):
                readings |= {gpu: value - scale for gpu, value in own.items()}
        return replace(rating, times=times), readings

    def _reference(self, ratios: Logs, alike: float) -> float:
        """What healthy GPUs show. Known stragglers have no say, unless there is no other."""
        unnamed = [value for gpu, value in ratios.items() if not self._is_named(gpu)]
        if unnamed:
            usual = self.job.level if self.job.readings else None
            return healthy_level(unnamed, usual, alike)
        return median(value - self._level(gpu) for gpu, value in ratios.items())

    def _rescaled(self, reading: tuple[int, float], wanted: Sensitivity) -> "Rating":
        job = self.job.after(reading, common_spread((self.job,)), wanted)
        return replace(self, job=job, best=min(self.best, job.level))

    def _lesson_s(self, ratios: Logs, guess_s: float, scale: float, alike: float) -> float:
        """A degree's time if each of its GPUs has the rate that it had; healthy ones know best."""
        healthy = [gpu for gpu in ratios if not self._is_named(gpu)]
        own = [ratios[gpu] - scale - self._level(gpu) for gpu in healthy or ratios]
        return guess_s * math.exp(healthy_level(own, None, alike))

    def _relearned(self, degrees: Mapping[int, int]) -> DegreeTimes:
        """Without what only stragglers taught, where there is a healthy GPU to learn from now."""
        healthy = {degree for gpu, degree in degrees.items() if not self._is_named(gpu)}
        return self.times.without(self.times.provisional & healthy)

    def _all_named(self, gpus: Iterable[int]) -> bool:
        return all(self._is_named(gpu) for gpu in gpus)

    def _is_named(self, gpu: int) -> bool:
        return gpu in self.tracks and self.tracks[gpu].named is not None

    def _level(self, gpu: int) -> float:
        return self.tracks[gpu].level if gpu in self.tracks else 0.0


def _usable(seen: Seen) -> Iterator[tuple[int, float]]:
    for sample in seen.samples:
        time_s = layer_time_s(sample)
        if sample.gpu in seen.degrees and not math.isnan(time_s):
            yield sample.gpu, math.log(time_s)


def _anchored(
    times: DegreeTimes, logs: Logs, degrees: Mapping[int, int], alike: float
) -> DegreeTimes:
    """With the degree of the most GPUs as the first that is known."""
    numbers = Counter(degrees[gpu] for gpu in logs)
    anchor = max(numbers, key=lambda degree: (numbers[degree], degree))
    own = [value for gpu, value in logs.items() if degrees[gpu] == anchor]
    if times.prior:
        return times.anchored(anchor, times.expected_s(anchor))
    return times.anchored(anchor, math.exp(healthy_level(own, None, alike)))
