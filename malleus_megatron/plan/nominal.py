"""The nominal plan: the uniform one that a recipe's own flags describe."""

from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Pipeline, Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Where one GPU stands in the nominal grid."""

    gpu: int
    pipeline: int
    stage: int
    tp_rank: int
    num_layers: int
    """Of its stage."""


def grid_plan(cells: Sequence[Cell], num_microbatches: int) -> Plan:
    """The plan of a grid of GPUs, each pipeline's layers counted up from its first stage.

    Args:
        cells: One for each GPU.
        num_microbatches: Of the whole job and step; divided equally over the pipelines.

    Raises:
        BadInputError: micro-batches do not divide by the pipelines.
    """
    num_pipelines = 1 + max(cell.pipeline for cell in cells)
    if num_microbatches % num_pipelines:
        raise BadInputError(
            f"{num_microbatches} micro-batches do not divide by {num_pipelines} pipelines."
        )
    pipelines = tuple(
        Pipeline(
            num_microbatches=num_microbatches // num_pipelines,
            stages=_stages([cell for cell in cells if cell.pipeline == pipeline]),
        )
        for pipeline in range(num_pipelines)
    )
    return Plan(
        num_layers=pipelines[0].num_layers, num_microbatches=num_microbatches, pipelines=pipelines
    )


def nominal_plan(
    *,
    num_layers: int,
    num_microbatches: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
) -> Plan:
    """The plan of Megatron's default rank order: tp fastest, then dp, then pp.

    Raises:
        BadInputError: layers or micro-batches do not divide.
    """
    if num_layers % pipeline_parallel_size:
        raise BadInputError(
            f"{num_layers} layers do not divide by {pipeline_parallel_size} stages."
        )
    cells = [
        Cell(
            gpu=tp_rank + tensor_parallel_size * (pipeline + data_parallel_size * stage),
            pipeline=pipeline,
            stage=stage,
            tp_rank=tp_rank,
            num_layers=num_layers // pipeline_parallel_size,
        )
        for stage in range(pipeline_parallel_size)
        for pipeline in range(data_parallel_size)
        for tp_rank in range(tensor_parallel_size)
    ]
    return grid_plan(cells, num_microbatches)


def _stages(cells: Sequence[Cell]) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    start = 0
    for index in range(1 + max(cell.stage for cell in cells)):
        members = sorted((c for c in cells if c.stage == index), key=lambda c: (c.tp_rank, c.gpu))
        end = start + members[0].num_layers
        stages.append(Stage(gpus=tuple(cell.gpu for cell in members), layers=(start, end)))
        start = end
    return tuple(stages)
