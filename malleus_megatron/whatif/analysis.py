"""The whole analysis of a trace as one value."""

import math
from dataclasses import dataclass

import numpy as np

from malleus_megatron.whatif.causes import Causes, causes
from malleus_megatron.whatif.diagnosis import Evidence, diagnose
from malleus_megatron.whatif.operations import FAMILIES
from malleus_megatron.whatif.rows import Floats, Rows
from malleus_megatron.whatif.steps import complete_steps
from malleus_megatron.whatif.what_if import WhatIf
from malleus_megatron.whatif.workers import (
    Straggler,
    microbatch_times_s,
    noise,
    stage_times_s,
    steady_rates,
    step_rates,
    stragglers,
)

NOTICEABLE = 1.03
"""A smaller slowdown is not taken apart."""
WORST_SHARE = 0.03
"""Workers that M_W repairs."""
MOST_REPLAYED = 256
"""Workers; of more, a worker's slowdown is the lower of its pipeline's and its stage's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Answers to all questions, and the trace that gave them."""

    what_if: WhatIf
    by_operation: dict[str, float]
    """Slowdown, were only this family of operations as it is."""
    by_stage: tuple[float, ...]
    by_dp_rank: tuple[float, ...]
    by_worker: Floats
    """[stage, dp]."""
    m_w: float
    """Share of the lost time that the worst 3 % of workers explain; 0: nothing to explain."""
    m_s: float
    """Share of the lost time that the last stage explains; 0: nothing to explain."""
    rates: Floats
    """[stage, step, dp]."""
    stage_times_s: tuple[float, ...]
    """Forward and backward of one micro-batch on each stage."""
    stragglers: tuple[Straggler, ...]
    causes: Causes
    diagnosis: str


def analyse(rows: Rows) -> Analysis:
    """Replay the trace under every question.

    Raises:
        BadInputError: no step is complete, or the trace shows no pipeline schedule.
    """
    what_if = WhatIf.of(complete_steps(rows))
    trace = what_if.trace
    stages, dp_ranks = range(trace.num_stages), range(trace.num_pipelines)
    by_operation = _by_operation(what_if)
    by_stage = tuple(what_if.slowdown_by(what_if.stage(stage)) for stage in stages)
    by_dp_rank = tuple(what_if.slowdown_by(np.s_[:, :, dp_rank]) for dp_rank in dp_ranks)
    by_worker = _by_worker(what_if, by_stage, by_dp_rank)
    times_s = microbatch_times_s(trace)
    rates = step_rates(times_s)
    noise_share = noise(trace, times_s)
    steady = steady_rates(rates, noise_share)
    slow = stragglers(trace, rates, noise_share)
    found = causes(what_if, rates, steady, slow)
    noticeable = what_if.slowdown >= NOTICEABLE
    evidence = Evidence(
        slowdown=what_if.slowdown,
        causes=found,
        stragglers=slow,
        steps=trace.steps,
        num_pipelines=trace.num_pipelines,
        highest_rate=float(steady.max()),
        stage_times_s=stage_times_s(times_s),
        by_operation=by_operation,
        noticeable=NOTICEABLE,
    )
    return Analysis(
        what_if=what_if,
        by_operation=by_operation,
        by_stage=by_stage,
        by_dp_rank=by_dp_rank,
        by_worker=by_worker,
        m_w=_share_of_the_worst(what_if, by_worker) if noticeable else 0.0,
        m_s=what_if.share_of([what_if.stage(trace.num_stages - 1)]) if noticeable else 0.0,
        rates=rates,
        stage_times_s=evidence.stage_times_s,
        stragglers=slow,
        causes=found,
        diagnosis=diagnose(evidence),
    )


def _by_operation(what_if: WhatIf) -> dict[str, float]:
    families: dict[str, set[str]] = {}
    for operation in what_if.trace.operations:
        families.setdefault(FAMILIES.get(operation.kind, operation.kind), set()).add(operation.kind)
    return {
        name: what_if.slowdown_by(what_if.trace.where_kind(kinds))
        for name, kinds in sorted(families.items())
    }


def _by_worker(
    what_if: WhatIf, by_stage: tuple[float, ...], by_dp_rank: tuple[float, ...]
) -> Floats:
    if len(by_stage) * len(by_dp_rank) > MOST_REPLAYED:
        lower: Floats = np.minimum.outer(np.array(by_stage), np.array(by_dp_rank))
        return lower
    return np.array(
        [
            [
                what_if.slowdown_by(what_if.worker(dp_rank, stage))
                for dp_rank in range(len(by_dp_rank))
            ]
            for stage in range(len(by_stage))
        ]
    )


def _share_of_the_worst(what_if: WhatIf, by_worker: Floats) -> float:
    worst = np.argsort(-by_worker, axis=None, kind="stable")
    count = math.ceil(WORST_SHARE * by_worker.size)
    chosen = [divmod(int(place), by_worker.shape[1]) for place in worst[:count]]
    return what_if.share_of([what_if.worker(dp_rank, stage) for stage, dp_rank in chosen])
