"""Random streams after a switch: another seed each time, and one that every library takes."""

import numpy as np
import pytest

from malleus_megatron.adapter.reshape.stage import seed_at

LARGEST_STAGE_OFFSET = 100 * 1000
"""Megatron adds 100 for each stage."""


@pytest.mark.parametrize("seed", [1, 1234, 2**31])
def test_seeds_stay_where_numpy_takes_them(seed: int) -> None:
    for iteration in (1, 4293, 4295, 10**6, 10**9):
        found = seed_at(seed, iteration)
        assert found > 0
        np.random.seed(found + LARGEST_STAGE_OFFSET)


def test_no_two_iterations_of_a_long_job_share_a_seed() -> None:
    seeds = {seed_at(1234, iteration) for iteration in range(200_000)}
    assert len(seeds) == 200_000
