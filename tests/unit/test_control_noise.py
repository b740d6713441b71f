"""What noise does to the controller: nothing."""

import random
from itertools import pairwise

import pytest

from malleus_megatron.control.controller import Controller
from malleus_megatron.control.policy import Policy
from tests.unit.sidecar_cases import JOB, SLOW, observation


def test_a_small_gain_must_last_longer_than_a_large_one() -> None:
    """Rate 1.3 on one of two pipelines saves some ten per cent; rate 3 saves half."""
    first_offer = {}
    for rate in (1.3, 3.0):
        controller = Controller(JOB, Policy())
        gpu = next(iter(SLOW))
        for iteration in range(1, 30):
            if controller.observe(observation(iteration, {gpu: rate})).offer is not None:
                first_offer[rate] = iteration
                break
    policy = Policy()
    assert first_offer[3.0] == policy.window + policy.patience - 1
    assert first_offer[1.3] == policy.long_patience


def offers_in_noise(seed: int, *, spread: float, policy: Policy) -> int:
    """500 iterations of healthy GPUs; each time varies, and in one of 20 a GPU pauses."""
    rng = random.Random(seed)
    controller = Controller(JOB, policy)
    offers = 0
    for iteration in range(1, 501):
        rates = {
            gpu: rng.lognormvariate(0, spread) * (1.5 if rng.random() < 0.05 else 1.0)
            for gpu in JOB.nominal.all_gpus()
        }
        offers += controller.observe(observation(iteration, rates)).offer is not None
    return offers


def test_noise_of_five_percent_with_pauses_moves_nothing() -> None:
    assert [offers_in_noise(seed, spread=0.05, policy=Policy()) for seed in range(6)] == [0] * 6


@pytest.mark.parametrize(("spread", "most"), [(0.1, 0), (0.15, 0), (0.25, 2)])
def test_larger_noise_moves_next_to_nothing_either(spread: float, most: int) -> None:
    assert sum(offers_in_noise(s, spread=spread, policy=Policy()) for s in range(4)) <= most


def test_a_straggler_near_the_threshold_is_named_once() -> None:
    controller = Controller(JOB, Policy())
    gpu = next(iter(SLOW))
    named = []
    for iteration in range(1, 40):
        rate = 1.25 if iteration % 2 else 1.15
        named.append(gpu in controller.observe(observation(iteration, {gpu: rate})).stragglers)
    changes = sum(a != b for a, b in pairwise(named))
    assert changes == 1
