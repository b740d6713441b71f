"""The analysis of a job under an uneven plan, as JSON and as text."""

from typing import Any

from malleus_megatron.plan.render import gpu_ranges, in_short
from malleus_megatron.whatif.document import SCHEMA_VERSION
from malleus_megatron.whatif.report import MOST_LISTED
from malleus_megatron.whatif.uneven import UnevenAnalysis, Worker

NOTICEABLE = 1.03
"""As for even plans: a smaller slowdown is not worth a word."""


def uneven_to_json(found: UnevenAnalysis) -> dict[str, Any]:
    """The keys of every analysis, as far as an uneven plan has them, and its own."""
    return {
        "schema_version": SCHEMA_VERSION,
        "uneven": True,
        "slowdown": found.slowdown,
        "step_time_s": found.step_time_s,
        "ideal_step_time_s": found.ideal_step_time_s,
        "measured_step_time_s": found.measured_step_time_s,
        "m_w": found.m_w,
        "m_s": found.m_s,
        "by_operation": found.by_operation,
        "by_worker": [
            {"dp_rank": dp_rank, "stage": stage, "slowdown": slowdown}
            for (dp_rank, stage), slowdown in _by_slowdown(found)
        ],
        "stragglers": [
            {"dp_rank": dp_rank, "stage": stage, "rate": rate}
            for (dp_rank, stage), rate in found.stragglers
        ],
        "stage_times_s": [list(stages) for stages in found.stage_times_s],
        "pipeline_times_s": list(found.pipeline_times_s),
        "diagnosis": uneven_diagnosis(found),
        "num_steps": len(found.steps),
        "skipped_steps": [{"step": skip.step, "reason": skip.reason} for skip in found.skipped],
    }


def uneven_diagnosis(found: UnevenAnalysis) -> str:
    """One sentence: the worker that costs most under this plan, or the pipeline that ends last."""
    worker, slowdown = _by_slowdown(found)[0]
    if found.slowdown >= NOTICEABLE and found.rates[worker] > 1 and slowdown >= NOTICEABLE:
        return (
            f"Under this uneven plan a slow GPU: worker {_named(found, worker)} takes "
            f"{found.rates[worker]:.2f} times as long as healthy GPUs would with its layers; "
            f"alone, that is a slowdown of {slowdown:.2f} of {found.slowdown:.2f}."
        )
    last = max(range(len(found.pipeline_times_s)), key=lambda one: found.pipeline_times_s[one])
    first_s = min(found.pipeline_times_s)
    early = 1 - first_s / found.pipeline_times_s[last]
    return (
        f"Under this uneven plan no slow GPU holds the job up (slowdown {found.slowdown:.3f}); "
        f"pipeline {last} ends last, the first one {early:.0%} of the step before it."
    )


def uneven_to_text(found: UnevenAnalysis) -> str:
    """Diagnosis first, then the numbers behind it."""
    lines = [
        uneven_diagnosis(found),
        "",
        f"plan {in_short(found.plan)}",
        f"{len(found.steps)} steps"
        + (f", {len(found.skipped)} steps left out" if found.skipped else ""),
        f"step {found.step_time_s:.4g} s (measured {found.measured_step_time_s:.4g} s), all GPUs "
        f"healthy {found.ideal_step_time_s:.4g} s: slowdown {found.slowdown:.3f}",
        "",
        *_pipelines(found),
        "",
        *_workers(found),
    ]
    if found.skipped:
        lines += ["", "left out"]
        lines += [f"  step {skip.step}: {skip.reason}" for skip in found.skipped[:MOST_LISTED]]
    return "\n".join(lines) + "\n"


def _pipelines(found: UnevenAnalysis) -> list[str]:
    return [
        "pipeline  micro-batches  by itself  a micro-batch on each stage",
        *(
            f"{number:8}  {pipeline.num_microbatches:13}  {time_s:7.4g} s  "
            + ", ".join(f"{stage_s:.4g} s" for stage_s in stages_s)
            for number, (pipeline, time_s, stages_s) in enumerate(
                zip(found.plan.pipelines, found.pipeline_times_s, found.stage_times_s, strict=True)
            )
        ),
    ]


def _workers(found: UnevenAnalysis) -> list[str]:
    listed = _by_slowdown(found)
    lines = ["worker               slowdown   rate"]
    lines += [
        f"{f'dp {dp_rank}, stage {stage}':19}  {slowdown:8.3f}  {found.rates[dp_rank, stage]:5.2f}"
        for (dp_rank, stage), slowdown in listed[:MOST_LISTED]
    ]
    more = len(listed) - MOST_LISTED
    return lines + ([f"  and {more} more"] if more > 0 else [])


def _by_slowdown(found: UnevenAnalysis) -> list[tuple[Worker, float]]:
    return sorted(found.by_worker.items(), key=lambda item: (-item[1], item[0]))


def _named(found: UnevenAnalysis, worker: Worker) -> str:
    dp_rank, stage = worker
    gpus = found.plan.pipelines[dp_rank].stages[stage].gpus
    return f"(dp {dp_rank}, stage {stage}; GPU {gpu_ranges(gpus)})"
