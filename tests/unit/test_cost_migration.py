"""The closed form of a transfer's time, and what it learns."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.cost.migration import (
    LinkSpeeds,
    RoundLoad,
    corrected,
    round_time_s,
    transfer_time_s,
)

SPEEDS = LinkSpeeds(
    inside_bytes_per_s=100.0, between_bytes_per_s=10.0, copy_bytes_per_s=1000.0, round_s=0.5
)


def load(inside: int, between: int) -> RoundLoad:
    return RoundLoad(inside_bytes=inside, between_bytes=between)


def test_a_round_waits_for_its_slower_link() -> None:
    assert round_time_s(SPEEDS, load(200, 0)) == pytest.approx(2.5)
    assert round_time_s(SPEEDS, load(200, 30)) == pytest.approx(3.5)
    assert round_time_s(SPEEDS, load(0, 0)) == pytest.approx(0.5)


def test_rounds_and_copies_add_up() -> None:
    rounds = [load(200, 0), load(200, 30)]
    assert transfer_time_s(SPEEDS, rounds, [500, 1500]) == pytest.approx(2.5 + 3.5 + 2.0)
    assert transfer_time_s(replace(SPEEDS, correction=1.5), rounds, []) == pytest.approx(9.0)
    assert transfer_time_s(SPEEDS, [], []) == 0.0


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_more_bytes_never_take_less_time(inside: int, between: int, more: int) -> None:
    least = round_time_s(SPEEDS, load(inside, between))
    assert round_time_s(SPEEDS, load(inside + more, between)) >= least
    assert round_time_s(SPEEDS, load(inside, between + more)) >= least


def test_predictions_come_nearer_with_every_migration() -> None:
    """Links that are really three times as slow as measured."""
    speeds, rounds = SPEEDS, [load(200, 0)] * 4
    true_s = 3 * transfer_time_s(SPEEDS, rounds, [])
    ratios = []
    for _ in range(5):
        predicted_s = transfer_time_s(speeds, rounds, [])
        ratios.append(true_s / predicted_s)
        speeds = corrected(speeds, predicted_s=predicted_s, measured_s=true_s)
    assert ratios[0] == pytest.approx(3)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 1.1


def test_one_migration_that_was_held_up_moves_the_correction_by_two_at_most() -> None:
    assert corrected(SPEEDS, predicted_s=1.0, measured_s=1000.0).correction == pytest.approx(2.0)
    assert corrected(SPEEDS, predicted_s=1.0, measured_s=1e-6).correction == pytest.approx(0.5)
    assert corrected(SPEEDS, predicted_s=0.0, measured_s=1.0) == SPEEDS
