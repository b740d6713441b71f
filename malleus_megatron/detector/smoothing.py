"""A GPU's time over the last few iterations: the median of what it measured."""

import math
from collections.abc import Callable, Sequence
from statistics import median_low

from malleus_megatron.detector.samples import Sample

type Window = Sequence[Sequence[Sample]]
"""Samples of the last iterations, oldest first."""


def layer_time_s(sample: Sample) -> float:
    """Forward plus backward of one layer, or NaN if the GPU gave no usable measurement."""
    return _sum_s(sample.layer_forward_s, sample.layer_backward_s)


def stage_time_s(sample: Sample) -> float:
    """Forward plus backward of the stage, or NaN if the GPU gave no usable measurement."""
    return _sum_s(sample.stage_forward_s, sample.stage_backward_s)


def median_by_gpu(window: Window, time_s: Callable[[Sample], float]) -> dict[int, float]:
    """Median time of every GPU that has a usable one; the median of an even number is the lower.

    The lower one, so that among two iterations a single slow one never decides.
    """
    times: dict[int, list[float]] = {}
    for samples in window:
        for sample in samples:
            value = time_s(sample)
            if not math.isnan(value):
                times.setdefault(sample.gpu, []).append(value)
    return {gpu: median_low(values) for gpu, values in times.items()}


def _sum_s(forward_s: float, backward_s: float) -> float:
    """NaN unless both are times and together above 0; frozen layers have no backward."""
    total_s = forward_s + backward_s
    usable = forward_s >= 0 and backward_s >= 0 and 0 < total_s < math.inf
    return total_s if usable else math.nan
