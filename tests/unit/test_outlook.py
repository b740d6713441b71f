"""What a re-plan would give: our own jobs by the controller's planner, others by workers."""

from dataclasses import replace

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.outlook import outlook, outlook_of_workers
from malleus_megatron.control.values import Freedom, JobDescription, Observation
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Model, Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan

LAYER_S = 3.0
NOMINAL = nominal_plan(
    num_layers=8,
    num_microbatches=16,
    tensor_parallel_size=1,
    pipeline_parallel_size=2,
    data_parallel_size=2,
)
FREEDOM = Freedom(cluster=Cluster(gpus_per_node=(4,)), tensor_parallel_sizes=(1,))
JOB = JobDescription(nominal=NOMINAL, level=Level.reshape, freedom=FREEDOM)


def observed(plan: Plan, rates: dict[int, float], iteration: int) -> Observation:
    samples = []
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for gpu in stage.gpus:
                layer_s = LAYER_S * rates.get(gpu, 1.0)
                samples.append(
                    Sample(
                        gpu=gpu,
                        iteration=iteration,
                        layer_forward_s=layer_s / 3,
                        layer_backward_s=2 * layer_s / 3,
                        stage_forward_s=stage.num_layers * layer_s / 3,
                        stage_backward_s=2 * stage.num_layers * layer_s / 3,
                        num_layers=stage.num_layers,
                        num_microbatches=pipeline.num_microbatches,
                    )
                )
    return Observation(
        iteration=iteration,
        generation=0,
        plan_id="",
        microbatch_counts=plan.microbatch_counts,
        samples=tuple(samples),
    )


@pytest.mark.parametrize("steps", [(10,), (10, 20, 30), tuple(range(0, 400, 10))])
def test_it_is_the_planners_plan_at_the_measured_rates(steps: tuple[int, ...]) -> None:
    found = outlook(JOB, [observed(NOMINAL, {2: 2.5}, step) for step in steps])
    problem = Problem(
        cluster=FREEDOM.cluster,
        model=Model(num_layers=8, layer_time_s=((1, LAYER_S),)),
        num_microbatches=16,
        tensor_parallel_sizes=(1,),
        num_pipelines=2,
        rates=Rates.of({2: 2.5}),
    )
    best = make_plan(problem)
    assert best.predicted is not None
    assert dict(found.rates) == {2: pytest.approx(2.5)}
    # 8 micro-batches through 4 layers at rate 2.5 and 4 healthy ones.
    assert found.present_s == pytest.approx(4 * LAYER_S + 8 * 4 * 2.5 * LAYER_S)
    assert found.lower_bound_s == pytest.approx(best.predicted.lower_bound)
    assert found.lower_bound_s is not None
    assert best.predicted.step_time_s is not None
    assert found.replanned_s <= best.predicted.step_time_s * 1.03
    assert found.lower_bound_s <= found.replanned_s < 0.7 * found.present_s
    assert found.plan is not None
    assert not found.plan.same_layout(NOMINAL)


def test_a_healthy_job_stays() -> None:
    found = outlook(JOB, [observed(NOMINAL, {}, step) for step in (10, 20, 30)])
    assert found.plan == NOMINAL
    assert found.replanned_s == found.present_s
    assert not found.rates.by_gpu


def test_a_job_that_was_planned_around_its_straggler_has_little_to_gain() -> None:
    first = outlook(JOB, [observed(NOMINAL, {2: 2.5}, 10)])
    assert first.plan is not None
    again = outlook(replace(JOB, present=first.plan), [observed(first.plan, {2: 2.5}, 20)])
    assert again.present_s == pytest.approx(first.replanned_s)
    assert again.replanned_s == pytest.approx(again.present_s)


def test_a_bound_for_another_number_of_pipelines_is_none() -> None:
    """The planner is asked for the recipe's two; the job runs well as one."""
    one = nominal_plan(
        num_layers=8,
        num_microbatches=16,
        tensor_parallel_size=1,
        pipeline_parallel_size=4,
        data_parallel_size=1,
    )
    found = outlook(replace(JOB, present=one), [observed(one, {2: 1.15}, 10)])
    assert found.plan is not None
    assert (len(found.plan.pipelines) == 2) == (found.lower_bound_s is not None)


def test_below_level_reshape_micro_batches_move() -> None:
    job = replace(JOB, level=Level.rebalance, freedom=None)
    found = outlook(job, [observed(NOMINAL, {2: 2.5}, 10)])
    assert found.plan is not None
    assert found.plan.same_layout(NOMINAL)
    assert sum(found.counts) == 16
    assert found.counts[0] < found.counts[1]
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= found.replanned_s < found.present_s


def test_of_foreign_workers_only_micro_batches_are_known() -> None:
    stages = [[3.0, 3.0], [3.0, 9.0]]
    found = outlook_of_workers(stages, [3.0, 3.0], 8)
    assert found.present_s == step_time_s(stages, (8, 8))
    assert found.counts[0] > found.counts[1]
    assert found.replanned_s == step_time_s(stages, found.counts) < found.present_s
    # 16 micro-batches of 6 s of work; three workers at full speed and one at a third.
    assert found.lower_bound_s is not None
    assert found.lower_bound_s == pytest.approx(16 * 6 / (3 + 1 / 3))
    assert found.lower_bound_s < found.replanned_s
