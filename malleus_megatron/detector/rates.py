"""Layer times to straggling rates, and which GPUs are stragglers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from malleus_megatron.detector.smoothing import Window, layer_time_s, median_by_gpu
from malleus_megatron.plan.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEstimate:
    """What the last iterations say about each GPU."""

    rates: Rates
    """Of every GPU that was measured, healthy ones too."""
    stragglers: tuple[int, ...]
    ignored: tuple[int, ...]
    """GPUs whose newest sample is missing or no time; their earlier ones still count."""


def estimate_rates(window: Window, gpus: Sequence[int], *, threshold: float) -> RateEstimate:
    """Compare every GPU's time for one layer with that of the healthy GPUs.

    Only layers are compared, so the embedding and the head, which make some stages longer by
    design, make no GPU look slow. Healthy are those within `threshold` of the fastest; their
    median is the reference, however many and however slow the others are.

    Args:
        window: Samples of the last iterations, oldest first.
        gpus: All that should have been measured.
        threshold: A GPU with a rate above it is a straggler.
    """
    times = median_by_gpu(window, layer_time_s)
    reference_s = _reference_s(list(times.values()), threshold)
    rates = Rates.of({gpu: time_s / reference_s for gpu, time_s in times.items()})
    measured = {
        sample.gpu
        for sample in (window[-1] if window else ())
        if not math.isnan(layer_time_s(sample))
    }
    return RateEstimate(
        rates=rates,
        stragglers=tuple(gpu for gpu, rate in rates if rate > threshold),
        ignored=tuple(gpu for gpu in gpus if gpu not in measured),
    )


def _reference_s(times_s: Sequence[float], threshold: float) -> float:
    if not times_s:
        return math.nan
    fastest_s = min(times_s)
    return median(time_s for time_s in times_s if time_s <= threshold * fastest_s)
