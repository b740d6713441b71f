"""The controller against a simulated job whose true rates are known."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.controller import Controller
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, JobDescription, Observation
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.planner.batches import balance_microbatches

STAGE_S = 0.4


def grid(num_microbatches: int = 16, dp: int = 2, pp: int = 2) -> Plan:
    return nominal_plan(
        num_layers=4 * pp,
        num_microbatches=num_microbatches,
        tensor_parallel_size=1,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )


@dataclass
class SimulatedJob:
    """Runs iterations under its plan; takes an offer one iteration late, as a job does."""

    plan: Plan
    policy: Policy = field(default_factory=Policy)
    level: Level = Level.rebalance
    noise: Callable[[], float] = lambda: 1.0
    takes_offers: bool = True
    controller: Controller = field(init=False)
    decisions: list[Decision] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        job = JobDescription(nominal=self.plan, level=self.level)
        self.controller = Controller(job, self.policy, clock=lambda: 0.0)

    @property
    def iteration(self) -> int:
        return len(self.decisions)

    @property
    def offers(self) -> list[Plan]:
        return [decision.offer for decision in self.decisions if decision.offer is not None]

    def run(self, iterations: int, rates: dict[int, float] | None = None) -> Decision:
        """Train with these rates and return what the last iteration showed."""
        for _ in range(iterations):
            waiting = self.decisions[-1].offer if self.decisions else None
            self.decisions.append(self.controller.observe(self.observation(rates or {})))
            if waiting is not None and self.takes_offers:
                self.plan = waiting
        return self.decisions[-1]

    def observation(self, rates: dict[int, float]) -> Observation:
        return Observation(
            iteration=self.iteration + 1,
            plan_id=plan_id(self.plan),
            generation=len(self.offers),
            microbatch_counts=self.plan.microbatch_counts,
            samples=tuple(
                self.sample(gpu, rates.get(gpu, 1.0)) for gpu in sorted(self.plan.all_gpus())
            ),
        )

    def sample(self, gpu: int, rate: float) -> Sample:
        stage_s = STAGE_S * rate * self.noise()
        return Sample(
            gpu=gpu,
            iteration=self.iteration + 1,
            layer_forward_s=stage_s / 12,
            layer_backward_s=stage_s / 6,
            stage_forward_s=stage_s / 3,
            stage_backward_s=stage_s * 2 / 3,
            num_layers=4,
            num_microbatches=4,
        )


def true_stages(plan: Plan, rates: dict[int, float]) -> list[list[float]]:
    return [
        [STAGE_S * max(rates.get(gpu, 1.0) for gpu in stage.gpus) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]


def test_a_straggler_moves_the_microbatches_and_the_plan_says_what_it_expects() -> None:
    job = SimulatedJob(grid())
    job.run(5)
    assert job.offers == []
    slow = job.plan.pipelines[1].stages[0].gpus[0]
    last = job.run(8, {slow: 3.0})

    (offer,) = job.offers
    best = balance_microbatches(true_stages(offer, {slow: 3.0}), 16)
    assert offer.microbatch_counts == best.counts == (12, 4)
    assert offer.same_layout(grid())
    assert offer.predicted is not None
    assert offer.predicted.step_time_s == pytest.approx(best.step_time_s)
    assert offer.predicted.lower_bound == pytest.approx(best.lower_bound_s)
    assert offer.predicted.healthy_step_time_s == pytest.approx(
        step_time_s(true_stages(offer, {}), (8, 8))
    )
    assert offer.planning is not None
    assert last.stragglers == (slow,)
    assert last.rates[slow] == pytest.approx(3.0)
    assert last.step_time_s == pytest.approx(best.step_time_s)
    assert "taken" in str(job.controller.offers.last_outcome)


def test_a_gpu_that_recovers_brings_the_equal_counts_back() -> None:
    job = SimulatedJob(grid())
    job.run(4, {0: 3.0})
    job.run(3, {0: 3.0})
    assert job.plan.microbatch_counts == (4, 12)
    job.run(Policy().long_patience + Policy().patience + 1)
    assert job.plan == grid()
    assert len(job.offers) == 2


@pytest.mark.parametrize("seed", range(5))
def test_healthy_gpus_with_noise_keep_the_stock_counts(seed: int) -> None:
    draw = random.Random(seed)
    job = SimulatedJob(grid(256, dp=4), noise=lambda: draw.uniform(0.98, 1.02))
    job.run(60)
    assert job.offers == []


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_one_offer_settles_it(seed: int) -> None:
    draw = random.Random(seed)
    job = SimulatedJob(grid(64, dp=4), noise=lambda: draw.uniform(0.99, 1.01))
    job.run(60, {3: 2.6})
    assert len(job.offers) == 1


def test_one_noisy_iteration_is_no_reason_to_change() -> None:
    job = SimulatedJob(grid())
    for _ in range(5):
        job.run(4)
        job.run(1, {1: 9.0})
    assert job.offers == []
    assert all(decision.stragglers == () for decision in job.decisions)


def test_nothing_is_decided_before_the_window_is_full() -> None:
    job = SimulatedJob(grid(), policy=Policy(window=4, patience=1))
    for _ in range(3):
        assert job.run(1, {0: 3.0}) == Decision(iteration=job.iteration)
    assert job.run(1, {0: 3.0}).offer is not None


def test_the_gain_must_last() -> None:
    job = SimulatedJob(grid(), policy=Policy(window=1, patience=3))
    job.run(2, {0: 3.0})
    assert job.offers == []
    assert job.run(1, {0: 3.0}).offer is not None


def test_what_stops_before_it_is_certain_is_counted_anew() -> None:
    job = SimulatedJob(grid(), policy=Policy(window=3, patience=1))
    for _ in range(3):
        job.run(2, {0: 3.0})
        job.run(2)
    assert job.offers == []
    job.run(2, {0: 3.0})
    assert job.offers == []
    assert job.run(1, {0: 3.0}).offer is not None


def test_a_gain_that_is_too_small_is_left_alone() -> None:
    job = SimulatedJob(grid(), policy=Policy(min_gain=0.6))
    job.run(10, {0: 3.0})
    assert job.offers == []


def test_level_observe_has_rates_and_never_an_offer() -> None:
    job = SimulatedJob(grid(), level=Level.observe)
    assert job.run(10, {0: 3.0}).stragglers == (0,)
    assert job.offers == []


def test_one_offer_is_out_until_it_is_forgotten() -> None:
    job = SimulatedJob(grid(), takes_offers=False, policy=Policy(offer_timeout_iterations=6))
    job.run(21, {0: 3.0})
    made_at = [decision.iteration for decision in job.decisions if decision.offer is not None]
    assert made_at == [4, 10, 16]
    assert "not taken within 6 iterations" in str(job.controller.offers.last_outcome)


def test_a_refused_plan_rests_and_another_one_may_be_offered() -> None:
    job = SimulatedJob(grid(), takes_offers=False, policy=Policy(offer_timeout_iterations=20))
    job.run(4, {0: 3.0})
    refused = job.offers[0]
    job.controller.reject(plan_id(refused), "hashes differ")
    assert "refused: hashes differ" in str(job.controller.offers.last_outcome)
    job.run(10, {0: 3.0})
    assert job.offers == [refused]
    job.run(4, {0: 6.0})
    assert len(job.offers) == 2
    assert job.offers[1] != refused


def test_refusing_something_that_is_not_offered_changes_nothing() -> None:
    job = SimulatedJob(grid(), takes_offers=False)
    job.controller.reject("sha256:0", "unknown")
    job.run(4, {0: 3.0})
    job.controller.reject("sha256:0", "unknown")
    assert job.controller.offers.pending == plan_id(job.offers[0])


def test_the_number_of_microbatches_of_the_step_may_change() -> None:
    job = SimulatedJob(grid(16), takes_offers=False)
    job.run(4, {0: 3.0})
    assert job.offers[0].num_microbatches == 16
    job.plan = grid(32)
    job.run(1, {0: 3.0})
    assert job.offers[1].num_microbatches == 32
    assert job.offers[1].microbatch_counts == (8, 24)
    assert "micro-batches of the step changed" in str(job.controller.offers.last_outcome)


def test_samples_outlive_a_change_of_counts() -> None:
    """Two iterations after the switch the window holds both plans' samples; no shift is seen."""
    job = SimulatedJob(grid())
    job.run(6, {0: 3.0})
    switched = job.iteration
    assert job.plan.microbatch_counts == (4, 12)
    job.run(3, {0: 3.0})
    for decision in job.decisions[switched:]:
        assert decision.rates[0] == pytest.approx(3.0)


def test_a_job_that_goes_back_is_seen_afresh() -> None:
    job = SimulatedJob(grid(), takes_offers=False)
    job.run(5, {0: 3.0})
    job.decisions.clear()
    assert job.run(1, {0: 3.0}) == Decision(iteration=1)
    assert job.controller.offers.pending is None


def test_a_stage_that_nobody_measures_gives_rates_but_no_offer() -> None:
    job = SimulatedJob(grid())
    for iteration in range(1, 7):
        seen = job.observation({1: 3.0})
        decision = job.controller.observe(
            replace(seen, iteration=iteration, samples=seen.samples[1:])
        )
    assert decision.ignored == (0,)
    assert decision.stragglers == (1,)
    assert (decision.step_time_s, decision.offer) == (None, None)


def test_settings_may_change_while_the_job_runs() -> None:
    job = SimulatedJob(grid(), policy=Policy(min_gain=0.6, window=8))
    job.run(10, {0: 3.0})
    job.controller.policy = Policy(window=2)
    assert job.run(2, {0: 3.0}).offer is not None


def test_same_observations_same_decisions() -> None:
    def decisions() -> Sequence[Decision]:
        draw = random.Random(7)
        job = SimulatedJob(grid(48, dp=4), noise=lambda: draw.uniform(0.9, 1.1))
        job.run(20, {5: 2.0})
        job.run(20)
        return job.decisions

    assert decisions() == decisions()


def test_observations_of_another_layout_are_refused() -> None:
    job = SimulatedJob(grid())
    seen = job.observation({})
    with pytest.raises(BadInputError, match="micro-batches of 3 pipelines; the job's layout has 2"):
        job.controller.observe(replace(seen, microbatch_counts=(5, 5, 6)))
    with pytest.raises(BadInputError, match=r"samples of GPUs \[9\].*has 4 GPUs"):
        job.controller.observe(replace(seen, samples=(job.sample(9, 1.0),)))
    with pytest.raises(BadInputError, match=r"several samples of GPUs \[0\]"):
        replace(seen, samples=(*seen.samples, seen.samples[0]))
    with pytest.raises(BadInputError, match=r"micro-batches \[16, 0\]"):
        replace(seen, microbatch_counts=(16, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 1.0}, "threshold 1.0 must be above 1"),
        ({"threshold": float("nan")}, "threshold nan"),
        ({"min_gain": 1.0}, "min_gain 1.0"),
        ({"min_gain": -0.1}, "min_gain -0.1"),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"patience": 0}, "patience 0 must be at least 1"),
        ({"offer_timeout_iterations": 0}, "offer_timeout_iterations 0"),
    ],
)
def test_settings_without_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        replace(Policy(), **change)
