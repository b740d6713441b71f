"""Planning has its share of the time and no more, and nobody waits who has become slower."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from malleus_megatron.control.replanning import Replanner
from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.plan import Plan, PlanningNote
from malleus_megatron.plan.problem import Model, Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan
from tests.unit.detected_job import LAYER_S, grid

NOMINAL = grid(2, pp=2, dp=2)
MIN_GAIN = 0.03
SLOW = 2.5
BOTH, OTHERS = {1: SLOW, 5: SLOW}, {0: SLOW, 4: SLOW}
"""As slow a step, by other GPUs."""


class Job:
    """Its planner counts so many seconds of work for each plan."""

    def __init__(self, planning_s: float) -> None:
        self.plannings = 0
        self.planning_s = planning_s
        self.present = NOMINAL
        self.replanner = Replanner(lambda: 0.0, self._make)

    def _make(self, problem: Problem) -> Plan:
        self.plannings += 1
        return replace(make_plan(problem), planning=PlanningNote(seconds=self.planning_s, seed=0))

    def problem(self, rates: Mapping[int, float]) -> Problem:
        return Problem(
            cluster=Cluster(gpus_per_node=(8,)),
            model=Model(num_layers=8, layer_time_s=tuple(sorted(LAYER_S.items()))),
            num_microbatches=16,
            tensor_parallel_sizes=(1, 2, 4),
            num_pipelines=2,
            rates=Rates.of(dict(rates)),
            current_plan=self.present,
        )

    def asks(self, iteration: int, rates: Mapping[int, float]) -> bool:
        """Whether the planner is asked after this iteration."""
        before = self.plannings
        self.replanner.plan(self.problem(rates), iteration=iteration, min_gain=MIN_GAIN)
        return self.plannings > before


STEP_S = plan_costs(Job(0.0).problem(BOTH), NOMINAL).step_time_s


def test_while_many_gpus_flap_planning_takes_a_fifth_of_the_time() -> None:
    job = Job(2 * STEP_S)
    asked = [job.asks(iteration, (BOTH, OTHERS)[iteration % 2]) for iteration in range(1, 101)]
    assert asked[0]
    assert 9 <= sum(asked) <= 12
    assert sum(asked) * job.planning_s <= 0.21 * (100 * STEP_S + sum(asked) * job.planning_s)


@pytest.mark.parametrize("planning_s", [0.0, 0.01, 0.2 * STEP_S])
def test_short_planning_is_done_whenever_something_has_moved(planning_s: float) -> None:
    job = Job(planning_s)
    assert all(job.asks(iteration, (BOTH, OTHERS)[iteration % 2]) for iteration in range(1, 21))


def test_a_job_that_has_become_slower_does_not_wait() -> None:
    job = Job(10 * STEP_S)
    assert job.asks(1, BOTH)
    assert not job.asks(2, OTHERS)
    assert job.asks(3, {0: SLOW, 4: 1.2 * SLOW})


def test_another_layout_a_failed_gpu_or_an_earlier_iteration_does_not_wait() -> None:
    job = Job(10 * STEP_S)
    assert job.asks(5, BOTH)
    job.present = grid(2, pp=4, dp=1)
    assert job.asks(6, OTHERS)
    job.present = NOMINAL
    assert job.asks(7, BOTH)
    assert job.asks(2, OTHERS)
    assert job.asks(3, {1: float("inf")})
