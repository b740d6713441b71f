"""Straggling rates as values."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.rates import HEALTHY, Rates, check_rate, have_moved

good = st.floats(min_value=0, exclude_min=True, allow_nan=False)


@given(st.dictionaries(st.integers(0, 1000), good))
def test_a_gpu_without_a_rate_is_healthy(rates: dict[int, float]) -> None:
    made = Rates.of(rates)
    for gpu in range(0, 1001, 7):
        assert made[gpu] == rates.get(gpu, HEALTHY)
    assert dict(made) == rates
    assert list(made) == sorted(rates.items())


def test_a_look_up_does_not_go_through_all_gpus() -> None:
    """Pages, curves and the controller ask for each of thousands."""
    made = Rates.of(dict.fromkeys(range(100_000), 1.5))
    start = time.process_time()
    assert all(made[gpu] == 1.5 for gpu in range(0, 100_000, 100))
    assert time.process_time() - start < 0.5  # through all of them it takes seconds


@given(st.dictionaries(st.integers(0, 9), good))
def test_rates_are_the_same_in_whatever_order_they_come(rates: dict[int, float]) -> None:
    backwards = dict(reversed(rates.items()))
    assert Rates.of(backwards) == Rates.of(rates)
    assert hash(Rates.of(backwards)) == hash(Rates.of(rates))


@pytest.mark.parametrize("rate", [math.nan, 0, 0.0, -1, -0.5, -math.inf])
def test_a_rate_is_above_zero(rate: float) -> None:
    with pytest.raises(BadInputError, match=rf"GPU 3: rate {rate} must be above 0"):
        check_rate(3, rate)
    with pytest.raises(BadInputError, match="GPU 3"):
        Rates.of({3: rate})


@pytest.mark.parametrize("rate", ["2", None, True, [2.0], 1 + 2j])
def test_a_rate_is_a_number(rate: Any) -> None:
    with pytest.raises(BadInputError, match=r"GPU 3: rate .* is not a number"):
        check_rate(3, rate)


def test_a_whole_number_is_a_rate() -> None:
    assert check_rate(0, 3) == 3.0
    assert isinstance(check_rate(0, 3), float)
    assert check_rate(0, 10**400) == math.inf


@pytest.mark.parametrize("pairs", [((1, 2.0), (0, 2.0)), ((1, 2.0), (1, 3.0))])
def test_each_gpu_stands_once_and_in_order(pairs: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(BadInputError, match="each GPU once, in order"):
        Rates(by_gpu=pairs)


@pytest.mark.parametrize(
    ("before", "now", "moved"),
    [
        ({}, {}, False),
        ({0: 1.0}, {0: 1.05}, False),
        ({0: 1.0}, {0: 1.06}, True),
        ({0: 2.0}, {0: 1.8}, True),
        ({}, {5: 1.04}, False),
        ({}, {5: 1.2}, True),
        ({5: 1.2}, {}, True),
        ({0: math.inf}, {0: math.inf}, False),
        ({0: 2.0}, {0: math.inf}, True),
        ({0: math.inf}, {0: 1.0}, True),
    ],
)
def test_rates_have_moved_if_one_has(
    before: dict[int, float], now: dict[int, float], moved: bool
) -> None:
    assert have_moved(Rates.of(before), Rates.of(now), by=0.05 + 1e-9) == moved
