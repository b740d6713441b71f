"""Stage times as measured: what each pipeline costs now."""

from collections.abc import Mapping

from malleus_megatron.detector.samples import Sample
from malleus_megatron.detector.smoothing import Window, median_by_gpu, stage_time_s
from malleus_megatron.plan.plan import Plan

type StageTimes = tuple[tuple[float, ...], ...]
"""Forward plus backward of one micro-batch in seconds, per pipeline and stage."""


def measured_stage_times(window: Window, plan: Plan) -> StageTimes | None:
    """Time of every stage of the plan's layout: that of its slowest GPU.

    Args:
        window: Samples of the last iterations under this layout. Micro-batch counts may have
            changed in between: the time of one micro-batch does not depend on them.
        plan: Who holds which layers.

    Returns:
        None while a stage with layers has no GPU with a usable measurement. A stage without layers
        is not timed and counts as no time.
    """
    return _slowest_of_each_stage(median_by_gpu(window, _with_collectives_s), plan)


def _with_collectives_s(sample: Sample) -> float:
    """What the GPU saw of the stage's duration."""
    return stage_time_s(sample) + sample.num_layers * sample.layer_collectives_s


def _slowest_of_each_stage(times: Mapping[int, float], plan: Plan) -> StageTimes | None:
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.num_layers and times.keys().isdisjoint(stage.gpus) for stage in stages):
        return None
    return tuple(
        tuple(
            max((times[gpu] for gpu in stage.gpus if gpu in times), default=0.0)
            for stage in pipeline.stages
        )
        for pipeline in plan.pipelines
    )
