"""Which plans a job may switch to."""

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.degrees import ModelWidths
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Pipeline, Plan, Stage


def nominal(pipelines: int = 2, microbatches: int = 8) -> Plan:
    return nominal_plan(
        num_layers=8,
        num_microbatches=microbatches,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        data_parallel_size=pipelines,
    )


def test_other_counts_are_taken_and_counted() -> None:
    current = CurrentPlan(nominal(), Level.rebalance)
    plan = nominal().with_counts((5, 3))
    current.check(plan)
    current.switch(plan)
    assert (current.generation, current.counts(8)) == (1, (5, 3))


def test_shares_follow_the_batch_size() -> None:
    current = CurrentPlan(nominal(), Level.rebalance)
    current.switch(nominal().with_counts((6, 2)))
    assert current.counts(16) == (13, 3)
    assert current.generation == 1


def test_uneven_counts_need_rebalance() -> None:
    current = CurrentPlan(nominal(), Level.observe)
    with pytest.raises(BadInputError, match="5, 3.*observe"):
        current.check(nominal().with_counts((5, 3)))


def test_a_plan_for_another_world_is_refused_with_both_sizes() -> None:
    current = CurrentPlan(nominal(), Level.rebalance)
    with pytest.raises(BadInputError, match=r"8 GPUs \(0\.\.7\); the job has 4 \(0\.\.3\)"):
        current.check(nominal(pipelines=4))


def test_a_plan_of_another_depth_is_refused() -> None:
    other = nominal_plan(
        num_layers=10,
        num_microbatches=8,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        data_parallel_size=2,
    )
    with pytest.raises(BadInputError, match="10 layers; the model has 8"):
        CurrentPlan(nominal(), Level.rebalance).check(other)


def test_a_plan_that_moves_layers_needs_reshape() -> None:
    stages = (Stage(gpus=(0,), layers=(0, 3)), Stage(gpus=(2,), layers=(3, 8)))
    moved = Plan(
        num_layers=8,
        num_microbatches=8,
        pipelines=(Pipeline(num_microbatches=4, stages=stages), nominal().pipelines[1]),
    )
    with pytest.raises(BadInputError, match=r"stage 0 has GPUs \[0\] and layers \[0, 3\].*reshape"):
        CurrentPlan(nominal(), Level.rebalance).check(moved)


def test_a_standby_gpu_needs_reshape() -> None:
    pipelines = nominal().pipelines
    one = Plan(
        num_layers=8,
        num_microbatches=4,
        pipelines=pipelines[:1],
        standby=(1, 3),
    )
    with pytest.raises(BadInputError, match="1 pipelines; the nominal plan has 2"):
        CurrentPlan(nominal(), Level.rebalance).check(one)


def test_the_nominal_layout_fits_whatever_its_degree() -> None:
    """Megatron lets a TP degree exceed the query groups; only other layouts must divide them."""
    wide = nominal_plan(
        num_layers=8,
        num_microbatches=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        data_parallel_size=2,
    )
    widths = ModelWidths(
        num_attention_heads=4, num_query_groups=1, ffn_hidden_size=64, padded_vocab_size=256
    )
    current = CurrentPlan(wide, Level.reshape, widths)
    current.check(wide.with_counts((5, 3)))
    turned = Plan(num_layers=8, num_microbatches=8, pipelines=wide.pipelines[::-1])
    with pytest.raises(BadInputError, match="query groups 1"):
        current.check(turned)
