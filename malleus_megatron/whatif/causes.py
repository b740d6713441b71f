"""Possible causes of a slowdown, each by itself: what would the step be with this one alone?"""

from dataclasses import dataclass

import numpy as np

from malleus_megatron.whatif.operations import (
    BACKWARD,
    COLLECTION,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
)
from malleus_megatron.whatif.rows import Flags, Floats
from malleus_megatron.whatif.what_if import WhatIf
from malleus_megatron.whatif.workers import Straggler, lower_median

PAUSE = 2.0
"""A compute operation that takes longer than this many times its worker's median holds a pause,"""
MOST_PAUSES = 0.05
"""where no larger share of all does; else long operations are usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The slowdown that each cause alone would leave; 1 is none."""

    gpus: float
    """Workers that compute slower than their stage does in other pipelines."""
    stages: float
    """Stages that have more work than others."""
    microbatches: float
    """Micro-batches that take longer than others on the same worker."""
    pauses: float
    """Rare compute operations that take a multiple of what they usually do, and garbage
    collection."""
    communication: float
    """Transfers and collectives that differ from their median."""
    gaps: float
    """Time between operations that no dependency explains: measured / replayed step."""
    correlation: float
    """Pearson's, of the forward and backward time of a micro-batch on one worker. With unequal
    sequence lengths it is near 1."""


def causes(what_if: WhatIf, rates: Floats, steady: Floats, slow: tuple[Straggler, ...]) -> Causes:
    """Take the compute times apart into stage x worker x rest and replay each factor alone.

    Args:
        what_if: The trace to ask.
        rates: Of each worker and step, [stage, step, dp].
        steady: Of each worker, [stage, dp].
        slow: Stragglers; in the steps in which they are slow, the rates of the steps count.
    """
    worker = _worker_factors(what_if, rates, steady, slow)
    stage_s, rest, paused = _split(what_if, worker)
    compute = {kind: _positions(what_if, kind) for kind in COMPUTE}
    calm = np.where(paused, 1.0, rest)
    measured_s = float(what_if.trace.measured_step_s().mean())
    return Causes(
        gpus=_alone(what_if, compute, worker),
        stages=_alone(what_if, compute, stage_s),
        microbatches=_alone(what_if, compute, calm),
        pauses=what_if.slowdown_by(paused),
        communication=what_if.slowdown_by(what_if.trace.where_kind(COMMUNICATION)),
        gaps=measured_s / what_if.step_time_s,
        correlation=_correlation(what_if, calm, compute),
    )


def _positions(what_if: WhatIf, kind: str) -> list[int]:
    trace = what_if.trace
    return [index for stage in range(trace.num_stages) for index in trace.of(stage, kind)]


def _worker_factors(
    what_if: WhatIf, rates: Floats, steady: Floats, slow: tuple[Straggler, ...]
) -> Floats:
    """What each operation's worker makes it slower, [operation, step, dp]; 1 for other kinds."""
    by_step = np.broadcast_to(steady[:, None], rates.shape).copy()
    steps = np.array(what_if.trace.steps)
    for straggler in slow:
        during = (steps >= straggler.first_step) & (steps <= straggler.last_step)
        own = rates[straggler.stage, :, straggler.dp_rank]
        outside = np.median(own[~during]) if not during.all() else 1.0
        by_step[straggler.stage, :, straggler.dp_rank] = np.where(during, own, outside)
    factors = np.ones_like(what_if.work_s)
    for stage in range(what_if.trace.num_stages):
        factors[what_if.trace.of(stage, *COMPUTE)] = by_step[stage]
    return factors


def _split(what_if: WhatIf, worker: Floats) -> tuple[Floats, Floats, Flags]:
    """Each operation's usual time on its stage, what then is left as a factor, and pauses."""
    trace = what_if.trace
    stage_s, rest = np.ones_like(worker), np.ones_like(worker)
    paused = np.zeros(worker.shape, dtype=np.bool_)
    for stage in range(trace.num_stages):
        for kind in COMPUTE:
            chosen = trace.of(stage, kind)
            healthy_s = what_if.work_s[chosen] / worker[chosen]
            usual_s = lower_median(np.mean(healthy_s, axis=(0, 1))[None, :]).item()
            stage_s[chosen] = usual_s
            np.divide(healthy_s, usual_s, out=healthy_s, where=usual_s > 0)
            rest[chosen] = healthy_s
            paused[chosen] = healthy_s > PAUSE * np.median(healthy_s, axis=(0, 1))
    if paused[trace.where_kind(COMPUTE)].mean() > MOST_PAUSES:
        paused[:] = False
    paused[trace.where_kind({COLLECTION})] = True
    return stage_s, rest, paused


def _alone(what_if: WhatIf, compute: dict[str, list[int]], factors: Floats) -> float:
    """The slowdown with typical times spread by these factors, their mean unchanged."""
    times_s = what_if.typical_s.copy()
    for chosen in compute.values():
        mean = factors[chosen].mean()
        if mean > 0:
            times_s[chosen] *= factors[chosen] / mean
    return what_if.slowdown_with(times_s)


def _correlation(what_if: WhatIf, calm: Floats, compute: dict[str, list[int]]) -> float:
    """Over all workers but those of the last stage, whose loss layer is unlike the others."""
    last = what_if.trace.num_stages - 1
    shown = [
        [
            calm[index].ravel()
            for index in compute[kind]
            if what_if.trace.operations[index].stage < max(last, 1)
        ]
        for kind in (FORWARD, BACKWARD)
    ]
    forward, backward = (np.concatenate(values) for values in shown)
    spread = float(forward.std() * backward.std())
    if spread == 0:
        return 0.0
    return float(np.mean((forward - forward.mean()) * (backward - backward.mean())) / spread)
