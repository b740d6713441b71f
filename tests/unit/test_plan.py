"""Plans as values: what is refused, and what makes two plans the same."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Pipeline, Plan, Prediction, Stage, check_world
from tests.harness.plans import plans


def stage(*gpus: int, layers: tuple[int, int] = (0, 4)) -> Stage:
    return Stage(gpus=gpus, layers=layers)


def pipeline(*stages: Stage, count: int = 4) -> Pipeline:
    return Pipeline(num_microbatches=count, stages=stages)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "num_layers": 4,
        "num_microbatches": 8,
        "pipelines": (pipeline(stage(0, 1)), pipeline(stage(2, 3))),
    }
    return Plan(**(values | changes))


def test_a_plan_knows_its_sums() -> None:
    two = pipeline(stage(4, layers=(0, 3)), stage(2, 3, layers=(3, 4)), count=5)
    made = plan(num_microbatches=9, pipelines=(pipeline(stage(0, 1)), two), standby=(5,))
    assert made.microbatch_counts == (4, 5)
    assert list(made.all_gpus()) == [0, 1, 4, 2, 3, 5]
    assert two.gpus == (4, 2, 3)
    assert two.num_layers == 4
    assert [s.num_layers for s in two.stages] == [3, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: stage(layers=(0, 4)), r"layers \[0, 4\) has no GPU"),
        (lambda: stage(0, layers=(3, 2)), r"\[3, 2\); need 0 <= start <= end"),
        (lambda: stage(0, layers=(-1, 2)), r"\[-1, 2\)"),
        (pipeline, "has no stage"),
        (lambda: pipeline(stage(0), count=0), "0 micro-batches; need >= 1"),
        (
            lambda: pipeline(stage(0, layers=(0, 2)), stage(1, layers=(3, 4))),
            "Stage 1 starts at layer 3; the one before ends at 2",
        ),
        (lambda: pipeline(stage(0, layers=(1, 4))), "Stage 0 starts at layer 1"),
        (lambda: plan(pipelines=()), "no pipeline"),
        (lambda: plan(num_layers=5), "Pipeline 0 holds 4 layers; the model has 5"),
        (lambda: plan(num_microbatches=9), r"Micro-batches 4 \+ 4 = 8; the step has 9"),
        (
            lambda: plan(pipelines=(pipeline(stage(0, 1)), pipeline(stage(1, 2)))),
            "GPU 1 stands in the plan twice",
        ),
        (lambda: plan(standby=(3,)), "GPU 3 stands in the plan twice"),
        (lambda: plan(standby=(-1,)), "GPU -1: numbers start at 0"),
        (lambda: plan(objective="beauty"), "'beauty' is unknown; known: step-time, bottleneck"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(make: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        make()


def test_what_was_predicted_does_not_make_another_plan() -> None:
    told = plan(predicted=Prediction(step_time_s=1.0))
    assert told == plan()
    assert hash(told) == hash(plan())
    assert told != plan(standby=(4,))


def test_plans_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().num_layers = 3  # type: ignore[misc]


@given(plans(), st.data())
def test_other_counts_keep_the_layout(made: Plan, data: st.DataObject) -> None:
    size = len(made.pipelines)
    counts = tuple(data.draw(st.lists(st.integers(1, 99), min_size=size, max_size=size)))
    other = made.with_counts(counts)
    assert other.microbatch_counts == counts
    assert other.num_microbatches == sum(counts)
    assert other.same_layout(made)
    assert made.with_counts(made.microbatch_counts) == made


def test_a_layout_is_stages_and_standby_gpus() -> None:
    swapped = plan(pipelines=(pipeline(stage(1, 0)), pipeline(stage(2, 3))))
    assert not swapped.same_layout(plan())
    assert not plan(standby=(4,)).same_layout(plan())


@pytest.mark.parametrize(
    ("counts", "said"), [((8,), "1 counts for 2 pipelines"), ((8, 0), "0 micro-batches")]
)
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        plan().with_counts(counts)


@given(plans())
def test_a_plan_fits_the_world_that_it_names(made: Plan) -> None:
    world_size = len(list(made.all_gpus()))
    check_world(made, world_size)
    with pytest.raises(BadInputError, match=f"is for {world_size} GPUs"):
        check_world(made, world_size + 1)


def test_a_plan_for_another_world_is_refused_with_both_worlds() -> None:
    with pytest.raises(BadInputError, match=r"for 4 GPUs \(0\.\.3\); the job has 8 \(0\.\.7\)"):
        check_world(plan(), 8)
    gap = plan(pipelines=(pipeline(stage(0, 1)), pipeline(stage(2, 4))))
    with pytest.raises(BadInputError, match=r"\(0, 1, 2, 4\); the job has 4"):
        check_world(gap, 4)
