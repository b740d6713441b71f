"""Time of a pipeline and of a step under the 1F1B schedule."""

from collections.abc import Sequence


def pipeline_time_s(stage_times_s: Sequence[float], num_microbatches: int) -> float:
    """Fill and drain once through all stages, then the slowest stage for each further micro-batch.

    The objective `step-time`: sum_j t_j + (m - 1) * max_j t_j. With no time for communication it is
    never below what 1F1B takes, and exact where all stages are equal.

    Args:
        stage_times_s: Forward plus backward of one micro-batch, per stage.
        num_microbatches: Of this pipeline and step, at least 1.
    """
    return sum(stage_times_s) + (num_microbatches - 1) * max(stage_times_s)


def step_time_s(pipelines: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """The slowest pipeline's time; gradients are summed when all are done."""
    return max(
        pipeline_time_s(stages, count) for stages, count in zip(pipelines, counts, strict=True)
    )
