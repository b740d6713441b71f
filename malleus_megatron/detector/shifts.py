"""One GPU's rate over time: what it is, and when it has shifted and does not merely vary."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

type Reading = tuple[int, float]
"""An iteration, and the logarithm of the rate that it showed."""

_SURE = 6.0
"""A shift of n readings stands out by this many standard deviations / sqrt(n). Healthy GPUs whose
times are normally distributed pass that less than once in 1e9 iterations for each length n."""
_LEAST_SPREAD = 0.005
_BAND = math.log(1.1)
_ENOUGH_FOR_OWN = 9
_NORMAL = 1.4826 / math.sqrt(2)
"""Median of absolute differences of two normal values -> standard deviation of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How much and how long a GPU must stand out."""

    threshold: float
    """A GPU with a rate above it is a straggler."""
    window: int
    """Readings that a large shift to a slower rate must last, all of them."""
    large_shift: float
    """A rate that has grown by this factor has shifted a lot: to see that late costs most."""
    patience: int
    """Readings that a smaller shift must last, and iterations that a recovery must last."""
    long_window: int
    """Readings that count at most; so many show the smallest shifts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What is known of one GPU's rate. All rates are logarithms: 0 is healthy."""

    level: float = 0.0
    """Its present rate."""
    is_measured: bool = False
    """False: too few readings so far; the level is where it started."""
    readings: tuple[Reading, ...] = ()
    """Since the last shift, oldest first."""
    doubt: float = math.inf
    """A level within that of another may be the same."""
    since: int | None = None
    """Of a straggler: the iteration in which it first stood out."""
    named: int | None = None
    """Of a straggler: the iteration in which that was certain."""

    def after(self, reading: Reading, common_spread: float, wanted: Sensitivity) -> "Track":
        """With one more reading.

        A level shifts when three of four recent readings, and of few readings all, are beyond it
        by more than chance explains; so a pause in between, or one in ten, changes nothing. Up, to
        a slower rate, few readings are enough if they stand out far; down, it takes patience.
        Between shifts the level is the median of the readings that belong to it.

        Args:
            reading: Of an iteration after the last one's.
            common_spread: Standard deviation of the readings of the job's GPUs.
            wanted: The settings.
        """
        readings = (*self.readings, reading)[-wanted.long_window :]
        spread = max(common_spread, _own_spread(readings))
        level, is_measured = self.level, self.is_measured
        shifted = _shifted(readings, level, spread, wanted)
        if shifted is not None:
            readings, is_measured = shifted, True
            level = median(value for _, value in readings)
        elif is_measured or len(readings) >= wanted.long_window:
            band = max(_BAND, _SURE * common_spread)
            if self.named is not None:  # readings of a healthy GPU do not belong to a straggler
                band = min(band, level / 2)
            level, is_measured = _refined(readings, level, band), True
        doubt = _SURE * spread / math.sqrt(len(readings))
        moved = replace(self, level=level, is_measured=is_measured, readings=readings, doubt=doubt)
        return moved.judged(wanted.threshold)

    def judged(self, threshold: float) -> "Track":
        """Named if three of four readings are above the threshold, and the level for sure.

        It is cleared when three of four are below and the level has fallen to half of it: what
        comes and goes neither names a GPU nor clears it.
        """
        bar = max(math.log(threshold), 0.0 if self.named else self.doubt)
        low, high = _quartiles(self.readings)
        if (
            self.named is None
            and self.is_measured
            and low > math.log(threshold)
            and self.level > bar
        ):
            newest = self.readings[-1][0]
            outstanding = (at for at, value in self.readings if value >= self.level / 2)
            return replace(self, since=next(outstanding, newest), named=newest)
        if self.named is not None and high < max(bar, self.doubt) and self.level <= bar / 2:
            return replace(self, since=None, named=None)
        return self


def common_spread(tracks: Iterable[Track]) -> float:
    """Standard deviation of a reading, over all GPUs, whatever their rates and shifts are."""
    spreads = [_spread(track.readings) for track in tracks if len(track.readings) > 1]
    return max(_LEAST_SPREAD, median(spreads)) if spreads else _LEAST_SPREAD


def _own_spread(readings: Sequence[Reading]) -> float:
    """Of a GPU that may vary more than the others; 0 while too little is known of it."""
    return _spread(readings) if len(readings) >= _ENOUGH_FOR_OWN else 0.0


def _spread(readings: Sequence[Reading]) -> float:
    """By the differences between neighbours, so that a shift or a pause hardly counts."""
    values = [value for _, value in readings]
    return _NORMAL * median(
        0.0 if before == after else abs(after - before) for before, after in pairwise(values)
    )


def _shifted(
    readings: tuple[Reading, ...], level: float, spread: float, wanted: Sensitivity
) -> tuple[Reading, ...] | None:
    """The readings since the level's shift, or None if it has not shifted."""
    newest = readings[-1][1]
    is_up = newest > level
    lengths = _lengths_up(wanted) if is_up else _lengths_down(readings, level, wanted)
    for length in lengths:
        margin = _SURE * spread / math.sqrt(length)
        if length > len(readings) or level - margin <= newest <= level + margin:
            continue
        low, high = _quartiles(readings[-length:])
        least = margin if length >= wanted.patience else max(margin, math.log(wanted.large_shift))
        if low > level + least or high < level - margin:
            return readings[-length:]
    return None


def _quartiles(readings: Sequence[Reading]) -> tuple[float, float]:
    """Three of four readings are no less than the first, three of four no more than the second."""
    values = sorted(value for _, value in readings)
    quarter = len(values) // 4
    return values[quarter], values[-1 - quarter]


def _lengths_up(wanted: Sensitivity) -> list[int]:
    lengths = {wanted.window, wanted.patience, wanted.long_window}
    return sorted(length for length in lengths if length >= wanted.window)


def _lengths_down(readings: Sequence[Reading], level: float, wanted: Sensitivity) -> list[int]:
    """As many as span the patience since a low one; not every iteration need have a reading."""
    last = readings[-1][0]
    patient = next(
        (
            length
            for length in range(min(wanted.window, wanted.patience), len(readings) + 1)
            if readings[-length][1] < level and last - readings[-length][0] + 1 >= wanted.patience
        ),
        wanted.long_window,
    )
    return sorted({patient, max(patient, wanted.long_window)})


def _refined(readings: Sequence[Reading], level: float, band: float) -> float:
    """The median of the readings that are near the level; pauses are far from it."""
    near = [value for _, value in readings if level - band <= value <= level + band]
    return median(near) if near else level
