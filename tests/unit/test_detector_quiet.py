"""What is no straggler: noise, pauses, heavy stages, and GPUs that come and go."""

import random

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from tests.unit.detected_job import LAYER_S, DetectedJob, grid, noisy, staged

PAUSE_S = 0.3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dp", [1, 2, 8])
def test_noise_of_five_percent_on_each_rank_names_nobody(dp: int, seed: int) -> None:
    job = DetectedJob(grid(2, dp=dp), level=Level.reshape, spread=noisy(seed, 0.05))
    job.run(500)
    assert job.ever_named == set()
    assert job.changes == []


@pytest.mark.parametrize("spread", [0.1, 0.15])
def test_the_noisier_a_job_the_more_a_straggler_must_stand_out(spread: float) -> None:
    job = DetectedJob(grid(2), spread=noisy(7, spread))
    job.run(500)
    assert job.ever_named == set()
    job.run(40, {2: 2.57})
    assert job.ever_named == {2}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("together", [1, 2])
def test_pauses_are_not_a_shift(seed: int, together: int) -> None:
    """Garbage collection, a checkpoint: 300 ms on a random rank every 20 iterations."""
    rng, noise = random.Random(seed), noisy(seed, 0.02)
    paused = {
        iteration + more: rng.randrange(8)
        for iteration in range(20, 500, 20)
        for more in range(together)
    }

    def spread(iteration: int, gpu: int) -> float:
        extra = PAUSE_S / LAYER_S[2] if paused.get(iteration) == gpu else 0.0
        return noise(iteration, gpu) + extra

    job = DetectedJob(grid(2), level=Level.reshape, spread=spread)
    job.run(500)
    assert job.ever_named == set()
    assert job.changes == []


def test_a_pause_of_the_same_gpu_over_and_over_is_none_either() -> None:
    job = DetectedJob(
        grid(2), level=Level.reshape, spread=lambda i, g: 9.0 if g == 3 and i % 4 < 1 else 1.0
    )
    job.run(200)
    assert (job.ever_named, job.changes) == (set(), [])


def test_iterations_that_are_slow_on_all_ranks_name_nobody() -> None:
    """Evaluation, a save: every tenth iteration takes four times as long, noise beside it."""
    noise = noisy(1, 0.03)
    job = DetectedJob(
        grid(2),
        level=Level.reshape,
        spread=lambda i, g: noise(i, g) * (4.0 if i % 10 == 0 or i == 1 else 1.0),
    )
    last = job.run(300)
    assert (job.ever_named, job.changes) == (set(), [])
    assert last.common_rate == 1.0


def test_a_head_of_nine_layers_names_nobody() -> None:
    job = DetectedJob(grid(2), head=9.0, spread=noisy(2, 0.05))
    job.run(200)
    assert job.ever_named == set()


@pytest.mark.parametrize("seed", range(3))
def test_stages_of_one_to_eight_layers_name_nobody(seed: int) -> None:
    plan = staged(((2, 1), (1, 8), (1, 3)), ((2, 4), (1, 2), (1, 6)))
    job = DetectedJob(grid(2, layers=12), plan, head=9.0, spread=noisy(seed, 0.05))
    job.run(500)
    assert job.ever_named == set()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [1.5, 3.0])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_straggler_whose_times_vary_is_planned_for_once(dp: int, rate: float, seed: int) -> None:
    job = DetectedJob(grid(2, dp=dp), level=Level.reshape, spread=noisy(seed, 0.05))
    job.run(10)
    job.run(200, {2: rate})
    assert 1 <= len(job.changes) <= 2


@pytest.mark.parametrize("rate", [1.05, 1.09, 1.15, 1.2, 1.5])
def test_a_plan_takes_what_it_promised_at_small_rates_too(rate: float) -> None:
    job = DetectedJob(grid(2), level=Level.reshape)
    job.run(30, {2: rate})
    job.run(30, {2: rate, 5: 3.0})
    predicted = job.plan.predicted
    assert predicted is not None
    assert job.decisions[-1].step_time_s == pytest.approx(predicted.step_time_s, rel=0.03)


@pytest.mark.parametrize("rate", [1.2, 1.5, 3.0, 12.53])
def test_a_gpu_that_heals_is_seen_to_heal(rate: float) -> None:
    job = DetectedJob(grid(2), level=Level.reshape, spread=noisy(5, 0.03))
    job.run(10)
    job.run(40, {2: rate})
    assert job.decisions[-1].stragglers == (2,)
    last = job.run(30)
    assert last.stragglers == ()
    assert last.rates[2] == pytest.approx(1.0, rel=0.05)
    assert job.plan == job.nominal


@pytest.mark.parametrize("probe_every", [1, 5])
def test_a_gpu_on_standby_is_seen_to_heal_by_its_probes(probe_every: int) -> None:
    job = DetectedJob(grid(2, dp=1), level=Level.reshape, sizes=(1, 2), probe_every=probe_every)
    job.run(10)
    job.run(30, {1: 12.53})
    assert job.plan.standby == (1,)
    last = job.run(60)
    assert last.stragglers == ()
    assert job.plan == job.nominal


@pytest.mark.parametrize("period", range(2, 9))
@pytest.mark.parametrize("rate", [1.5, 4.0])
def test_a_gpu_that_flaps_faster_than_the_patience_causes_one_change_at_most(
    rate: float, period: int
) -> None:
    assert period <= Policy().long_patience
    for slow_part in range(1, period):
        job = DetectedJob(
            grid(2), level=Level.reshape, spread=noisy(period, 0.02), knows_layer_times=True
        )
        job.run(10)
        while job.iteration < 120:
            job.run(slow_part, {2: rate})
            job.run(period - slow_part)
        assert len(job.changes) <= 1, slow_part


def test_the_settings_may_change_while_the_job_runs() -> None:
    job = DetectedJob(grid(2), policy=Policy(threshold=2.0))
    job.run(10)
    assert job.run(30, {2: 1.5}).stragglers == ()
    job.controller.policy = Policy(threshold=1.3)
    assert job.run(1, {2: 1.5}).stragglers == (2,)
    job.controller.policy = Policy(threshold=3.0)
    assert job.run(1, {2: 1.5}).stragglers == ()
