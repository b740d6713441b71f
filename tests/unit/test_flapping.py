"""GPUs that are slow now and then: a layout must earn its switch while it is the best one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.controller import Controller
from malleus_megatron.control.lives import Lives
from malleus_megatron.control.reshape import Terms, reshaped
from malleus_megatron.control.values import Decision
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Model, Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan
from tests.unit.detected_job import LAYER_S, DetectedJob, grid, noisy

DEAR_S = 100.0
HEALTHY_S = 23.0
NOMINAL = grid(2, pp=2, dp=4, layers=16)

type Slow = Callable[[int], Mapping[int, float]]
"""Iteration -> rates."""


@dataclass
class PricedJob(DetectedJob):
    """Knows what its steps and its switches of layout take."""

    switch_s: float = DEAR_S

    def __post_init__(self) -> None:
        super().__post_init__()
        self.job = replace(self.job, switch_s=self.switch_s)
        self.controller = Controller(self.job, self.policy, clock=lambda: 0.0)
        self.steps_s = self.stock_s = 0.0
        self.relaid: list[int] = []
        """First iterations under another layout."""

    def go(self, iterations: int, slow: Slow) -> None:
        for _ in range(iterations):
            rates = slow(self.iteration + 1)
            self.steps_s += self.step_s(self.plan, rates)
            self.stock_s += self.step_s(self.nominal, rates)
            self.run(1, rates)

    def switch(self, plan: Plan) -> None:
        if not plan.same_layout(self.plan):
            self.relaid.append(self.iteration + 1)
        super().switch(plan)

    def step_s(self, plan: Plan, rates: Mapping[int, float]) -> float:
        """What a step takes under a plan at these rates."""
        stages = [
            [
                LAYER_S[len(stage.gpus)]
                * self.unit_s
                * stage.num_layers
                * max(rates.get(gpu, 1.0) for gpu in stage.gpus)
                for stage in pipeline.stages
            ]
            for pipeline in plan.pipelines
        ]
        return step_time_s(stages, plan.microbatch_counts)


def priced(nominal: Plan = NOMINAL, *, switch_s: float = DEAR_S, unit_s: float = 8.0) -> PricedJob:
    return PricedJob(
        nominal, level=Level.reshape, unit_s=unit_s, spread=noisy(1, 0.01), switch_s=switch_s
    )


def flapping(starts: Mapping[int, int], slow: int = 12, healthy: int = 12) -> Slow:
    """GPU -> where in its cycle it begins; it is slow in the first part of the cycle."""
    cycle = slow + healthy
    return lambda iteration: {
        gpu: 2.5 for gpu, start in starts.items() if (iteration + start) % cycle < slow
    }


ONE = flapping({1: 0})
FOUR = flapping({1: 0, 5: 6, 9: 12, 13: 18})


@pytest.mark.parametrize("slow", [ONE, FOUR], ids=["one", "four"])
def test_dear_switches_do_not_make_a_job_slower_than_stock(slow: Slow) -> None:
    """They did: by 2 and by 19 switches in 100 iterations."""
    job = priced()
    assert job.step_s(NOMINAL, {}) == pytest.approx(HEALTHY_S, rel=0.01)
    job.go(100, slow)
    assert 1 <= len(job.relaid) <= 3
    assert job.steps_s + len(job.relaid) * DEAR_S <= job.stock_s


def test_once_calm_a_lasting_straggler_is_planned_around_at_once() -> None:
    job = priced()
    job.go(72, FOUR)
    job.go(40, lambda _: {})
    before = job.iteration
    job.go(12, lambda _: {6: 2.57})
    (change, *_) = [relaid for relaid in job.relaid if relaid > before]
    assert change - before <= 6


def test_a_straggler_that_lasts_is_planned_around_though_others_flapped_before() -> None:
    """What it costs meanwhile is less than two switches."""
    job = priced()
    job.go(72, FOUR)
    before, seen = job.iteration, len(job.relaid)
    job.go(30, lambda _: {6: 5.42})
    assert len(job.relaid) > seen
    best_s = job.step_s(job.plan, {6: 5.42})
    assert best_s < 0.8 * job.step_s(NOMINAL, {6: 5.42})
    assert job.relaid[-1] - before <= 20


def test_a_healed_job_comes_back_to_its_recipe() -> None:
    job = priced()
    job.go(72, ONE)
    job.go(150, lambda _: {})
    assert job.plan.same_layout(NOMINAL)


SITUATIONS: Sequence[tuple[int, Mapping[int, float]]] = (
    (15, {2: 2.57}),
    (17, {2: 2.57, 5: 5.42}),
    (15, {5: 5.42}),
    (20, {}),
    (16, dict.fromkeys(range(4), 2.35)),
    (18, {2: 12.53, 7: 1.6}),
    (15, {7: 1.6}),
    (20, {}),
)


def test_cheap_switches_are_decided_as_if_layouts_lived_for_the_horizon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decisions() -> list[Decision]:
        nominal = grid(2, pp=2, dp=2, layers=16)
        job = priced(nominal, switch_s=1.0, unit_s=3.13)
        assert job.step_s(nominal, {}) == pytest.approx(9.0, rel=0.01)
        job.go(6, lambda _: {})
        for number, rates in SITUATIONS:
            job.go(number, lambda _, rates=rates: rates)  # type: ignore[misc]
        assert len(job.relaid) >= 5
        return job.decisions

    now = decisions()
    monkeypatch.setattr(Lives, "expected", lambda _self, _iteration, horizon: float(horizon))
    assert now == decisions()


def test_a_plan_away_from_a_failed_gpu_is_never_held_back() -> None:
    nominal = grid(2, pp=2, dp=2)
    problem = Problem(
        cluster=Cluster(gpus_per_node=(8,)),
        model=Model(num_layers=8, layer_time_s=tuple(sorted(LAYER_S.items()))),
        num_microbatches=16,
        tensor_parallel_sizes=(1, 2, 4),
        num_pipelines=2,
        rates=Rates.of({1: float("inf")}),
    )
    job = replace(PricedJob(nominal, level=Level.reshape).job, switch_s=1e6)
    terms = Terms(min_gain=0.03, charge_s=1e4, least_s=1e6)
    planned = make_plan(problem)
    counts = nominal.microbatch_counts
    move = reshaped(job, problem, counts, planned, terms=terms, sure=problem.rates)
    assert move is not None
    assert move.plan.same_layout(planned)


def test_lives_count_for_the_horizon_until_two_have_ended() -> None:
    first, second = grid(2), grid(1, pp=4)
    lives = Lives().after(3, first)
    assert lives.expected(50, 200) == 200
    lives = lives.after(60, second).after(66, first)
    assert lives.expected(66, 200) == 200
    lives = lives.after(78, second)
    assert lives.ended == (6, 12)
    assert lives.expected(78, 200) == 6
    assert lives.expected(90, 200) == 10
    assert lives.expected(90, 8) == 8
    assert lives.expected(1000, 200) == 200
    assert lives.after(90, second) is lives
    assert lives.after(80, first).ended == (12, 2)
