"""Layer times to straggling rates, and which GPUs are stragglers."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from malleus_megatron.detector.degrees import DegreeTimes, TimesByDegree
from malleus_megatron.detector.smoothing import Window, layer_time_s, median_by_gpu
from malleus_megatron.plan.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEstimate:
    """What the last iterations say about each GPU."""

    rates: Rates = field(default_factory=Rates)
    """Of every GPU that was measured, healthy ones too."""
    stragglers: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    """GPUs whose newest sample is missing or no time; their earlier ones still count."""
    healthy_s: TimesByDegree = ()
    """The reference at each degree that was measured: layer time / rate."""
    times: DegreeTimes
    """What is known of healthy times from now on."""


def estimate_rates(
    window: Window, degrees: Mapping[int, int], times: DegreeTimes, *, threshold: float
) -> RateEstimate:
    """Compare every GPU's time for one layer with that of healthy GPUs at its TP degree.

    Only layers are compared, so the embedding and the head, which make some stages longer by
    design, make no GPU look slow. Healthy are those within `threshold` of the fastest; their
    median is the reference, however many and however slow the others are. GPUs of unlike degrees
    are compared by what each takes over the time expected at its degree. Where all GPUs of a
    degree are slow, that expected time is the reference. A guess may turn out too long, so GPUs
    at a degree that is not learned yet do not make the others look slow.

    Args:
        window: Samples of the last iterations, oldest first.
        degrees: TP degree of every GPU that should have been measured; others are left out.
        times: What is known of healthy times.
        threshold: A GPU with a rate above it is a straggler.
    """
    measured = {
        gpu: time_s for gpu, time_s in median_by_gpu(window, layer_time_s).items() if gpu in degrees
    }
    newest = _newest(window)
    ignored = tuple(gpu for gpu in sorted(degrees) if gpu not in newest)
    if not measured:
        return RateEstimate(ignored=ignored, times=times)
    times = _with_anchor(times, measured, degrees, threshold)
    ratio = {gpu: time_s / times.expected_s(degrees[gpu]) for gpu, time_s in measured.items()}
    healthy = _healthy(ratio, measured, degrees, times, threshold)
    by_degree = {
        degree: median(measured[gpu] for gpu in healthy if degrees[gpu] == degree)
        for degree in {degrees[gpu] for gpu in healthy}
    }
    # The degree of the most healthy GPUs, which is compared best.
    numbers = Counter(degrees[gpu] for gpu in healthy if times.knows(degrees[gpu]))
    times = times.after(by_degree, max(numbers, key=lambda degree: (numbers[degree], degree)))
    reference_s = {
        degree: by_degree.get(degree, times.expected_s(degree))
        for degree in sorted({degrees[gpu] for gpu in measured})
    }
    rates = {gpu: time_s / reference_s[degrees[gpu]] for gpu, time_s in measured.items()}
    return RateEstimate(
        rates=Rates.of(rates),
        stragglers=tuple(sorted(gpu for gpu, rate in rates.items() if rate > threshold)),
        ignored=ignored,
        healthy_s=tuple(reference_s.items()),
        times=times,
    )


def _newest(window: Window) -> set[int]:
    """GPUs with a usable sample in the last iteration."""
    samples = window[-1] if window else ()
    return {sample.gpu for sample in samples if not math.isnan(layer_time_s(sample))}


def _with_anchor(
    times: DegreeTimes, measured: Mapping[int, float], degrees: Mapping[int, int], threshold: float
) -> DegreeTimes:
    """Where no degree in use is known, the GPUs at the one with the most are compared alone."""
    numbers = Counter(degrees[gpu] for gpu in measured)
    if any(times.knows(degree) for degree in numbers):
        return times
    anchor = max(numbers, key=lambda degree: (numbers[degree], degree))
    own = [time_s for gpu, time_s in measured.items() if degrees[gpu] == anchor]
    reference_s = median(time_s for time_s in own if time_s <= threshold * min(own))
    return times.after({anchor: reference_s}, anchor)


def _healthy(
    ratio: Mapping[int, float],
    measured: Mapping[int, float],
    degrees: Mapping[int, int],
    times: DegreeTimes,
    threshold: float,
) -> list[int]:
    """GPUs within the threshold of the fastest of the job and of the fastest at their degree."""
    fastest = min(value for gpu, value in ratio.items() if times.knows(degrees[gpu]))
    at_degree_s = {
        degree: min(time_s for gpu, time_s in measured.items() if degrees[gpu] == degree)
        for degree in {degrees[gpu] for gpu in measured}
    }
    return [
        gpu
        for gpu, time_s in measured.items()
        if ratio[gpu] <= threshold * fastest and time_s <= threshold * at_degree_s[degrees[gpu]]
    ]
