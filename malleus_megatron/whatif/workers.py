"""How fast each worker computes, measured against the same stage in the other pipelines."""

import math
from dataclasses import dataclass

import numpy as np

from malleus_megatron.whatif.operations import COMPUTE
from malleus_megatron.whatif.rows import Flags, Floats
from malleus_megatron.whatif.trace import Trace

THRESHOLD = 1.2
"""A worker with a rate above it is a straggler; the planner's own default."""
SHORTEST_RUN = 3
SHORTEST_SHARE = 0.2
"""Fewer steps in a row, or a smaller share of all steps, are noise and not a straggler."""
SURE = 5.0
"""Standard deviations of the noise that a straggler's mean over its steps must stand out."""
MEDIAN_DEVIATION = 0.6745
"""Median of |x| for a normal x of standard deviation 1."""
WIDE, WIDE_DEVIATION = 0.95, 1.96
"""And this quantile: sequence lengths have long tails."""
MEDIAN_ERROR = 1.25
"""Standard error of a median / that of a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that is slow over a run of steps."""

    dp_rank: int
    stage: int
    rate: float
    """Median over the steps in which it is slow."""
    first_step: int
    last_step: int


def microbatch_times_s(trace: Trace) -> Floats:
    """Median forward plus median backward of each worker in each step, [stage, step, dp].

    Medians: single pauses and a few long micro-batches do not count.
    """
    return np.array(
        [
            sum(np.median(trace.duration_s[trace.of(stage, kind)], axis=0) for kind in COMPUTE)
            for stage in range(trace.num_stages)
        ]
    )


def step_rates(times_s: Floats) -> Floats:
    """Rate of each worker in each step, [stage, step, dp], from `microbatch_times_s`.

    The reference is the lower median of its stage over all pipelines: a stage with more work than
    others makes nobody slow, nor does one slow peer of two.
    """
    reference_s = lower_median(times_s)
    rates: Floats = np.divide(
        times_s, reference_s, out=np.ones_like(times_s), where=reference_s > 0
    )
    return rates


def stage_times_s(times_s: Floats) -> tuple[float, ...]:
    """What a micro-batch usually takes on each stage, from `microbatch_times_s`."""
    return tuple(float(value) for value in np.median(lower_median(times_s), axis=(1, 2)))


def lower_median(values: Floats) -> Floats:
    """Along the last axis, which stays with length 1; of two values the lower."""
    middle = (values.shape[-1] - 1) // 2
    chosen: Floats = np.sort(values, axis=-1)[..., middle : middle + 1]
    return chosen


def noise(trace: Trace, times_s: Floats) -> float:
    """How far one step's time of a worker is usually off, as a share of it.

    From the differences of a worker's steps, and from those of micro-batches within a step,
    whichever says more: both are large where sequence lengths are unequal.

    Args:
        trace: Has the single operations.
        times_s: From `microbatch_times_s`.
    """
    steps = np.diff(np.log(np.maximum(times_s, np.finfo(np.float64).tiny)), axis=1)
    between = float(np.median(np.abs(steps))) / math.sqrt(2) if steps.size else 0.0
    single_s = np.array(
        [
            sum(trace.duration_s[trace.of(stage, kind)] for kind in COMPUTE)
            for stage in range(trace.num_stages)
        ]
    )
    middle_s = np.maximum(times_s[:, None], np.finfo(np.float64).tiny)
    within = float(np.quantile(np.abs(single_s / middle_s - 1), WIDE))
    of_median = MEDIAN_ERROR * within / WIDE_DEVIATION / math.sqrt(single_s.shape[1])
    return max(between / MEDIAN_DEVIATION, of_median)


def stragglers(trace: Trace, rates: Floats, noise_share: float) -> tuple[Straggler, ...]:
    """Workers above the threshold, over enough steps in a row not to be noise; the slowest first.

    Args:
        trace: Names the steps.
        rates: From `step_rates`.
        noise_share: From `noise`.
    """
    num_steps = len(trace.steps)
    enough = min(num_steps, max(SHORTEST_RUN, math.ceil(SHORTEST_SHARE * num_steps)))
    found = []
    for stage, dp_rank in np.ndindex(rates.shape[0], rates.shape[2]):
        own = rates[stage, :, dp_rank]
        start, end = _longest_run(own > THRESHOLD)
        if end - start < enough:
            continue
        rate = float(np.median(own[start:end]))
        if math.log(rate) > SURE * noise_share / math.sqrt(end - start):
            found.append(
                Straggler(
                    dp_rank=dp_rank,
                    stage=stage,
                    rate=rate,
                    first_step=trace.steps[start],
                    last_step=trace.steps[end - 1],
                )
            )
    return tuple(sorted(found, key=lambda straggler: -straggler.rate))


def steady_rates(rates: Floats, noise_share: float) -> Floats:
    """Each worker's median rate over all steps, 1 where it may be noise, [stage, dp]."""
    middle = np.median(rates, axis=1)
    sure = np.log(middle) > SURE * noise_share / math.sqrt(rates.shape[1])
    return np.where(sure, middle, 1.0)


def _longest_run(flags: Flags) -> tuple[int, int]:
    """Half-open bounds of the longest run that is set; the first of equally long ones."""
    edges = np.flatnonzero(np.diff([False, *flags, False]))
    runs = [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
    return max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
