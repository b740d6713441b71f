"""Memory of a plan's stages, and what does not fit: the memory rule of a problem."""

from malleus_megatron.cost.stage import ends_mib, num_inflight, stage_memory_mib
from malleus_megatron.plan.plan import Pipeline, Plan
from malleus_megatron.plan.problem import ModelMemory
from malleus_megatron.plan.render import in_mib

ROUNDING = 1e-9

type StageMib = tuple[tuple[float, ...], ...]
"""Of each pipeline and stage: what each of the stage's GPUs needs."""


def plan_memory_mib(memory: ModelMemory, plan: Plan, *, sharing: int | None = None) -> StageMib:
    """Memory of each stage's GPUs, the reserve not counted.

    Args:
        memory: The model's sizes.
        plan: Any plan of the model.
        sharing: Pipelines that share optimizer state out among them; None: all of the plan.
    """
    mine = memory.among(len(plan.pipelines) if sharing is None else sharing)
    return tuple(_pipeline_mib(mine, pipeline) for pipeline in plan.pipelines)


def memory_faults(memory: ModelMemory, plan: Plan, limit_mib: float) -> list[str]:
    """Every stage that needs more than a limit, with the numbers; empty if the plan fits."""
    return [
        f"Pipeline {number}, stage {index}: {stage.num_layers} layers on {len(stage.gpus)} GPUs "
        f"{list(stage.gpus)} need {in_mib(need_mib)} MiB a GPU; {in_mib(limit_mib)} MiB may be "
        "used."
        for number, (pipeline, needs_mib) in enumerate(
            zip(plan.pipelines, plan_memory_mib(memory, plan), strict=True)
        )
        for index, (stage, need_mib) in enumerate(zip(pipeline.stages, needs_mib, strict=True))
        if need_mib > limit_mib * (1 + ROUNDING)
    ]


def _pipeline_mib(memory: ModelMemory, pipeline: Pipeline) -> tuple[float, ...]:
    num_stages = len(pipeline.stages)
    return tuple(
        stage_memory_mib(
            memory,
            len(stage.gpus),
            num_layers=stage.num_layers,
            inflight=num_inflight(
                stage=index, num_stages=num_stages, num_microbatches=pipeline.num_microbatches
            ),
            ends_mib=ends_mib(memory, first=index == 0, last=index == num_stages - 1),
        )
        for index, stage in enumerate(pipeline.stages)
    )
