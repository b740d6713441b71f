"""Injected rates: exactly those GPUs are named, with the injected rates, under every plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, Detection
from malleus_megatron.plan.plan import Plan
from tests.unit.detected_job import DetectedJob, grid, noisy, staged

RATES = (1.2, 1.5, 2.57, 5.42, 12.53)
START = 11
LONGEST_DELAY = 16
PLANS = {
    "tp2": grid(2, pp=2, dp=2),
    "tp4": grid(4, pp=2, dp=1),
    "tp2 uneven": staged(((2, 1), (2, 7)), ((2, 5), (2, 3))),
    "tp4 uneven": staged(((4, 2), (4, 6))),
    "mixed": staged(((2, 4), (1, 1), (1, 3)), ((1, 2), (2, 5), (1, 1))),
    "mixed 4": staged(((4, 4), (2, 2), (1, 1), (1, 1))),
}
"""Eight GPUs each."""


def injected(plan: Plan, rates: dict[int, float], spread: float, seed: int = 0) -> DetectedJob:
    job = DetectedJob(grid(2), plan, spread=noisy(seed, spread))
    job.run(START - 1)
    assert job.ever_named == set()
    job.run(30, rates)
    return job


@pytest.mark.parametrize("slow", [(0,), (7,), (1, 4), (2, 3)])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_exactly_the_slowed_gpus_are_named(plan: Plan, rate: float, slow: tuple[int, ...]) -> None:
    job = injected(plan, dict.fromkeys(slow, rate), 0.02, seed=slow[0])
    last = job.decisions[-1]
    assert job.ever_named == set(slow) == set(last.stragglers)
    for gpu in slow:
        assert last.rates[gpu] == pytest.approx(rate, rel=0.05)
        named = first_named(job, gpu)
        assert named <= START + (2 if rate > 2.5 else LONGEST_DELAY)
    healthy = {gpu: rate for gpu, rate in last.rates if gpu not in slow}
    assert healthy == pytest.approx(dict.fromkeys(healthy, 1.0), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", RATES)
def test_in_noise_of_five_percent_small_rates_take_longer_and_are_right(
    rate: float, seed: int
) -> None:
    job = injected(PLANS["tp2"], {3: rate, 6: 2.57}, 0.05, seed)
    last = job.decisions[-1]
    assert job.ever_named == {3, 6}
    assert dict(last.rates)[3] == pytest.approx(rate, rel=0.05)
    assert dict(last.rates)[6] == pytest.approx(2.57, rel=0.05)
    assert first_named(job, 6) <= START + 2
    assert first_named(job, 3) <= START + LONGEST_DELAY


def first_named(job: DetectedJob, gpu: int) -> int:
    return next(d.iteration for d in job.decisions if gpu in d.stragglers)


def test_a_decision_says_when_a_straggler_first_stood_out_and_when_it_was_named() -> None:
    job = injected(PLANS["tp2"], {3: 2.57}, 0.02)
    for decision in job.decisions[START + 1 :]:
        assert decision.detections == (Detection(gpu=3, since=START, named=START + 2),)
    assert job.decisions[-1].detections[0].delay == 2
    assert job.decisions[START].detections == ()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("rate", [2.57, 5.42, 12.53])
def test_six_iterations_after_the_injection_the_job_runs_under_the_new_plan(
    rate: float, tp: int
) -> None:
    job = DetectedJob(grid(tp, dp=4 // tp), level=Level.reshape, spread=noisy(1, 0.05))
    job.run(START - 1)
    job.run(10, {1: rate})
    assert job.changes
    assert job.changes[0] - START <= 6


@pytest.mark.parametrize("num_slow", [1, 2, 4, 5])
def test_several_stragglers_at_once_do_not_become_the_reference(num_slow: int) -> None:
    for start in (1, START):  # slow from the beginning, or later
        job = DetectedJob(grid(2), spread=noisy(2, 0.03))
        job.run(start - 1)
        last = job.run(20, dict.fromkeys(range(num_slow), 2.57))
        assert last.stragglers == tuple(range(num_slow))
        assert last.rates[0] == pytest.approx(2.57, rel=0.05)


def test_while_one_gpu_is_as_it_was_the_others_are_stragglers() -> None:
    job = DetectedJob(grid(2))
    job.run(START)
    last = job.run(20, dict.fromkeys(range(7), 2.57))
    assert last.stragglers == tuple(range(7))
    assert last.common_rate == 1.0


@pytest.mark.parametrize("fast", [0.8, 0.5])
def test_a_lone_gpu_that_is_faster_is_no_reference(fast: float) -> None:
    for start in (1, START):
        job = DetectedJob(grid(2), level=Level.reshape, spread=noisy(3, 0.02))
        job.run(start - 1)
        last = job.run(60, {5: fast})
        assert job.ever_named == set()
        assert job.changes == []
        assert last.rates[5] == pytest.approx(fast, rel=0.05)


def test_a_job_whose_gpus_are_all_slow_says_so() -> None:
    job = DetectedJob(grid(2), spread=noisy(4, 0.03))
    assert job.run(40).common_rate == 1.0
    last = job.run(20, dict.fromkeys(range(8), 1.5))
    assert job.ever_named == set()
    assert last.common_rate == pytest.approx(1.5, rel=0.05)
    assert "All GPUs take 1.5 times as long" in last.warning
    last = job.run(30)
    assert (last.common_rate, last.warning) == (1.0, "")


def test_a_straggler_in_a_job_that_is_slow_as_a_whole_is_named_by_what_the_others_take() -> None:
    job = DetectedJob(grid(2))
    job.run(START)
    last = job.run(30, dict.fromkeys(range(8), 1.5) | {2: 1.5 * 2.57})
    assert last.stragglers == (2,)
    assert last.rates[2] == pytest.approx(2.57)
    assert last.common_rate == pytest.approx(1.5)


@pytest.mark.parametrize("rate", [1.5, 2.57, 5.42])
def test_a_rate_means_the_same_after_a_change_of_plan(rate: float) -> None:
    """The straggler ends alone at degree 1, whose time nobody knew beforehand."""
    job = DetectedJob(grid(2))
    job.run(START - 1)
    job.run(20, {1: rate, 6: 1.3})
    job.switch(staged(((1, 1), (1, 2), (2, 5)), ((2, 4), (1, 2), (1, 2))))
    for _ in range(40):
        last = job.run(1, {1: rate, 6: 1.3})
        assert last.stragglers == (1, 6)
        assert last.rates[1] == pytest.approx(rate, rel=0.05)
        assert last.rates[6] == pytest.approx(1.3, rel=0.05)


def test_a_straggler_that_heals_while_the_plan_changes_is_not_taken_for_slow_for_ever() -> None:
    job = DetectedJob(grid(2))
    job.run(START)
    job.run(20, {1: 2.57})
    job.switch(staged(((2, 4), (1, 1), (1, 3)), ((1, 2), (2, 5), (1, 1))))
    job.run(1, {1: 2.57})
    job.switch(staged(((1, 1), (1, 2), (2, 5)), ((2, 4), (1, 2), (1, 2))))
    assert job.run(30).stragglers == ()


def decisions(unit_s: float, order: list[int], seed: int, slow: float) -> list[Decision]:
    """Of a job whose times are multiplied with `unit_s` and whose GPU g is called order[g]."""
    plan, noise = PLANS["mixed"], noisy(seed, 0.03)
    table = [[noise(i, g) for g in range(8)] for i in range(30)]
    own = {name: gpu for gpu, name in enumerate(order)}
    job = DetectedJob(
        grid(2),
        renamed(plan, order),
        spread=lambda iteration, gpu: table[iteration - 1][own[gpu]],
        unit_s=unit_s,
    )
    job.run(8)
    job.run(22, {order[2]: slow})
    return job.decisions


def renamed(plan: Plan, order: list[int]) -> Plan:
    """The plan with GPU g called order[g]."""
    return replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(stage, gpus=tuple(order[gpu] for gpu in stage.gpus))
                    for stage in pipeline.stages
                ),
            )
            for pipeline in plan.pipelines
        ),
    )


@settings(max_examples=15, deadline=None)
@given(
    unit_s=st.floats(1e-3, 1e3),
    order=st.permutations(range(8)),
    seed=st.integers(0, 99),
    slow=st.floats(1.3, 9.0),
)
def test_rates_do_not_depend_on_the_unit_of_time_nor_on_the_names_of_the_gpus(
    unit_s: float, order: list[int], seed: int, slow: float
) -> None:
    plain = decisions(1.0, list(range(8)), seed, slow)
    other = decisions(unit_s, order, seed, slow)
    for one, two in zip(plain, other, strict=True):
        assert {order[gpu]: rate for gpu, rate in one.rates} == pytest.approx(dict(two.rates))
        assert sorted(order[gpu] for gpu in one.stragglers) == list(two.stragglers)


def test_the_default_threshold_is_below_the_smallest_rate_that_must_be_found() -> None:
    assert 1.0 < Policy().threshold < min(RATES)
