"""One GPU's track: what is a shift, and what is only noise."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from malleus_megatron.detector.shifts import Sensitivity, Track, common_spread

WANTED = Sensitivity(threshold=1.1, window=3, large_shift=1.75, patience=8, long_window=16)
QUIET = 0.01


def followed(
    rates: Sequence[float], track: Track | None = None, *, start: int = 1, step: int = 1
) -> Track:
    track = track or Track()
    for number, rate in enumerate(rates):
        reading = (start + step * number, math.log(rate))
        track = track.after(reading, QUIET, WANTED)
    return track


HEALTHY = followed([1.0] * 20)
SLOW = followed([3.0] * 20, HEALTHY, start=21)


def first(track: Track, rate: float, *, named: bool, step: int = 1) -> int:
    """Readings of a rate until the GPU is named, or cleared."""
    for number in range(1, 100):
        track = track.after((100 + step * number, math.log(rate)), QUIET, WANTED)
        if (track.named is not None) == named:
            return number
    return 100


@pytest.mark.parametrize(
    ("rate", "readings"), [(1.08, 100), (1.2, 6), (1.5, 6), (1.8, 3), (2.57, 3), (12.53, 3)]
)
def test_a_large_shift_is_seen_at_once_and_a_small_one_after_patience(
    rate: float, readings: int
) -> None:
    assert first(HEALTHY, rate, named=True) == readings


@pytest.mark.parametrize(("rate", "readings"), [(1.0, 8), (1.03, 8), (2.5, 100)])
def test_a_recovery_takes_patience(rate: float, readings: int) -> None:
    assert first(SLOW, rate, named=False) == readings


def test_rare_readings_need_as_many_iterations_and_not_as_many_readings() -> None:
    assert first(SLOW, 1.0, named=False, step=4) == 3


def test_a_pause_changes_nothing() -> None:
    for track in (HEALTHY, SLOW):
        paused = followed([30.0, 30.0], track, start=50)
        assert (paused.level, paused.named) == (track.level, track.named)


def test_the_level_is_the_median_of_what_belongs_to_it() -> None:
    track = followed([2.9, 3.1, 3.0, 1.0, 3.05, 9.0, 2.95, 3.0], SLOW, start=50)
    assert math.exp(track.level) == pytest.approx(3.0, rel=0.01)


def test_a_slow_drift_is_followed_and_named() -> None:
    track = followed([1.0 + 0.001 * number for number in range(300)], HEALTHY, start=21)
    assert math.exp(track.level) == pytest.approx(1.29, rel=0.02)
    assert track.named is not None


def test_a_straggler_may_become_slower() -> None:
    assert math.exp(followed([6.0] * 3, SLOW, start=50).level) == pytest.approx(6.0)


def test_what_a_noisy_job_does_not_tell_from_noise_is_not_named() -> None:
    track = HEALTHY
    for number in range(30):
        track = track.after((21 + number, math.log(1.15)), 0.1, WANTED)
    assert track.named is None
    assert math.exp(track.level) == pytest.approx(1.15)


def test_a_failed_gpu_is_named_and_may_come_back() -> None:
    failed = followed([math.inf] * 3, HEALTHY, start=21)
    assert failed.level == math.inf
    assert failed.named == 23
    again = followed([math.inf] * 20, failed, start=24)
    assert again.level == math.inf
    assert first(again, 1.0, named=False) == 8


def test_another_threshold_is_another_judgement() -> None:
    track = followed([1.5] * 20, HEALTHY, start=21)
    assert track.named is not None
    assert track.judged(3.0).named is None
    assert track.judged(1.4).named == track.named
    assert replace(track, named=None, since=None).judged(1.4).named == 40


def test_the_spread_is_that_of_neighbours_whatever_the_level() -> None:
    values = [0.0, 0.05, 0.0, 0.05] * 4
    tracks = [
        Track(readings=tuple((i, level + value) for i, value in enumerate(values)))
        for level in (0.0, 1.0, 2.0)
    ]
    assert common_spread(tracks) == pytest.approx(0.05 * 1.4826 / math.sqrt(2))
    assert common_spread([]) == common_spread([Track()]) == 0.005
