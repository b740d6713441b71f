"""What the traces of our own jobs say beside their operations: plan, job, what GPUs measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from malleus_megatron.control.outlook import Outlook, learned, outlook, outlook_of_workers
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import JobDescription, Observation
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_from_json, plan_to_json, rates_to_json
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.render import in_short
from malleus_megatron.sidecar.protocol import decode, job_from_json, observation_from_json
from malleus_megatron.whatif.analysis import Analysis
from malleus_megatron.whatif.operations import FORWARD
from malleus_megatron.whatif.trace_folder import JOB, OBSERVATION, PLAN, read_documents
from malleus_megatron.whatif.uneven import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTrace:
    """Of the files of one generation."""

    plan: Plan
    job: JobDescription | None
    """With the plan as its present layout."""
    observations: tuple[Observation, ...]

    def worker_rates(self) -> dict[Worker, float]:
        """Of each worker, that of its slowest GPU; GPUs within the noise are healthy."""
        if self.job is None or not self.observations:
            return {}
        rates = dict(learned(self.job, self.observations, Policy()).sure_rates)
        return {
            (dp_rank, stage): max(rates.get(gpu, 1.0) for gpu in group.gpus)
            for dp_rank, pipeline in enumerate(self.plan.pipelines)
            for stage, group in enumerate(pipeline.stages)
        }


def read_own(files: Sequence[Path]) -> OwnTrace | None:
    """Read what stands beside the operations; None for the trace of another tool.

    Raises:
        BadInputError: what stands there is no plan, job or observation.
    """
    documents = [read_documents(file) for file in files]
    if PLAN not in documents[-1]:
        return None
    where = str(files[-1])
    plan = plan_from_json(_parsed(documents[-1][PLAN], where), where)
    job = None
    if JOB in documents[-1]:
        described, _ = job_from_json(decode(documents[-1][JOB], where))
        present = None if plan.same_layout(described.nominal) else plan
        job = replace(described, present=present)
    observed = [
        observation_from_json(decode(one[OBSERVATION], str(file)))
        for file, one in zip(files, documents, strict=True)
        if OBSERVATION in one
    ]
    kept = tuple(one for one in observed if len(one.microbatch_counts) == len(plan.pipelines))
    return OwnTrace(plan=plan, job=job, observations=kept)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInputError(f"{where}: its plan is no JSON: {error}.") from error


def outlook_of(own: OwnTrace | None, analysis: Analysis | None) -> Outlook | None:
    """What a re-plan would give; None if there is nothing to ask it of.

    Args:
        own: If the trace is one of ours.
        analysis: If it was analysed by the published method.
    """
    if own is not None and own.job is not None and own.observations:
        return outlook(own.job, own.observations)
    if analysis is None:
        return None
    trace = analysis.what_if.trace
    times_s = np.tile(np.array(analysis.stage_times_s), (trace.num_pipelines, 1))
    for slow in analysis.stragglers:
        times_s[slow.dp_rank, slow.stage] *= slow.rate
    count = len(trace.of(0, FORWARD))
    return outlook_of_workers(times_s.tolist(), analysis.stage_times_s, count)


def outlook_to_json(found: Outlook, measured_s: float) -> dict[str, Any]:
    """Times in seconds; what the planner's costs leave out is in the measured step alone."""
    return {
        "scope": found.scope,
        "rates": rates_to_json(found.rates),
        "measured_step_time_s": measured_s,
        "present_step_time_s": found.present_s,
        "replanned_step_time_s": found.replanned_s,
        "lower_bound_s": found.lower_bound_s,
        "micro_batches": list(found.counts),
        "plan": None if found.plan is None else plan_to_json(found.plan),
        "note": found.note,
    }


def outlook_to_text(found: Outlook, measured_s: float) -> str:
    """A few lines behind the analysis."""
    rates = ", ".join(f"GPU {gpu} {rate:.2f}" for gpu, rate in found.rates)
    plan = ", ".join(map(str, found.counts)) if found.plan is None else in_short(found.plan)
    gain = 1 - found.replanned_s / found.present_s
    best = f"{found.replanned_s:.4g} s, {gain:.0%} less" if gain > 0 else "nothing better"
    lines = [
        "",
        f"a re-plan ({found.scope})" + (f" at rates {rates}" if rates else ""),
        f"  step now {measured_s:.4g} s, by the planner's costs, which are compute alone, "
        f"{found.present_s:.4g} s",
        f"  re-planned {best}: {plan}",
    ]
    if found.lower_bound_s is not None:
        no_other = (
            "division of the same work among these workers" if found.plan is None else "such plan"
        )
        lines.append(f"  no {no_other} is below {found.lower_bound_s:.4g} s")
    if found.note:
        lines.append(f"  {found.note}")
    return "\n".join(lines) + "\n"
