"""The JSON document of an analysis."""

from dataclasses import asdict
from typing import Any

import numpy as np

from malleus_megatron.whatif.analysis import Analysis

SCHEMA_VERSION = 1


def to_json(analysis: Analysis) -> dict[str, Any]:
    """All numbers as JSON values: times in seconds, the worst worker first."""
    what_if = analysis.what_if
    trace = what_if.trace
    return {
        "schema_version": SCHEMA_VERSION,
        "slowdown": what_if.slowdown,
        "step_time_s": what_if.step_time_s,
        "ideal_step_time_s": what_if.ideal_step_time_s,
        "measured_step_time_s": float(trace.measured_step_s().mean()),
        "m_w": analysis.m_w,
        "m_s": analysis.m_s,
        "by_operation": analysis.by_operation,
        "by_stage": list(analysis.by_stage),
        "by_dp_rank": list(analysis.by_dp_rank),
        "by_worker": [
            {"dp_rank": dp_rank, "stage": stage, "slowdown": slowdown}
            for dp_rank, stage, slowdown in workers(analysis)
        ],
        "stragglers": [asdict(straggler) for straggler in analysis.stragglers],
        "stage_times_s": list(analysis.stage_times_s),
        "causes": asdict(analysis.causes),
        "diagnosis": analysis.diagnosis,
        "num_steps": len(trace.steps),
        "skipped_steps": [{"step": skip.step, "reason": skip.reason} for skip in trace.skipped],
    }


def workers(analysis: Analysis) -> list[tuple[int, int, float]]:
    """(dp rank, stage, slowdown) of every worker, the worst first."""
    listed = [
        (int(dp_rank), int(stage), float(slowdown))
        for (stage, dp_rank), slowdown in np.ndenumerate(analysis.by_worker)
    ]
    return sorted(listed, key=lambda worker: (-worker[2], worker[0], worker[1]))
