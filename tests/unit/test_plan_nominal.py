"""The nominal plan against Megatron's rank order, written out."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.nominal import Cell, grid_plan, nominal_plan
from malleus_megatron.plan.plan import check_world

sizes = st.integers(1, 4)


@given(tp=sizes, pp=sizes, dp=sizes, layers=st.integers(1, 4), count=st.integers(1, 4))
def test_ranks_are_those_of_megatrons_grid(
    tp: int, pp: int, dp: int, layers: int, count: int
) -> None:
    """Megatron's default order is tp-cp-ep-dp-pp: rank = tp + TP * (dp + DP * pp)."""
    plan = nominal_plan(
        num_layers=layers * pp,
        num_microbatches=count * dp,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )
    for dp_rank, pipeline in enumerate(plan.pipelines):
        assert pipeline.num_microbatches == count
        for pp_rank, stage in enumerate(pipeline.stages):
            assert stage.layers == (layers * pp_rank, layers * (pp_rank + 1))
            assert stage.gpus == tuple(
                tp_rank + tp * (dp_rank + dp * pp_rank) for tp_rank in range(tp)
            )
    check_world(plan, tp * pp * dp)


def grid(stage_layers: list[int], num_pipelines: int) -> list[Cell]:
    return [
        Cell(
            gpu=pipeline + num_pipelines * stage,
            pipeline=pipeline,
            stage=stage,
            tp_rank=0,
            num_layers=layers,
        )
        for stage, layers in enumerate(stage_layers)
        for pipeline in range(num_pipelines)
    ]


def test_stages_may_have_layers_of_their_own_number() -> None:
    plan = grid_plan(grid([1, 4, 2], 2), 6)
    assert (plan.num_layers, plan.microbatch_counts) == (7, (3, 3))
    for pipeline in plan.pipelines:
        assert [stage.layers for stage in pipeline.stages] == [(0, 1), (1, 5), (5, 7)]


@given(st.randoms(use_true_random=False))
def test_cells_may_come_in_any_order(random: Random) -> None:
    cells = grid([2, 2], 3)
    assert grid_plan(random.sample(cells, len(cells)), 6) == grid_plan(cells, 6)


def test_gpus_of_a_stage_stand_in_tp_order() -> None:
    cells = [
        Cell(gpu=gpu, pipeline=0, stage=0, tp_rank=tp_rank, num_layers=4)
        for gpu, tp_rank in ((0, 1), (1, 0), (2, 2))
    ]
    assert grid_plan(cells, 1).pipelines[0].stages[0].gpus == (1, 0, 2)


@pytest.mark.parametrize(
    ("num_layers", "num_microbatches", "said"),
    [
        (7, 4, "7 layers do not divide by 2 stages"),
        (8, 5, "5 micro-batches do not divide by 2 pipelines"),
    ],
)
def test_what_does_not_divide_is_refused(num_layers: int, num_microbatches: int, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        nominal_plan(
            num_layers=num_layers,
            num_microbatches=num_microbatches,
            tensor_parallel_size=1,
            pipeline_parallel_size=2,
            data_parallel_size=2,
        )
