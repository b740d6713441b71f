"""What a re-plan would give a job that was traced: with the controller's own detector and planner.

the job, what its GPUs measured -> healthy times and rates -> the planner's problem -> its plan
a foreign trace: stage times and rates of workers          -> other micro-batches, and a bound
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from malleus_megatron.control.knowledge import Knowledge
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.rebalance import planned_stage_times
from malleus_megatron.control.replanning import Replanner
from malleus_megatron.control.reshape import Terms, reshape_problem, reshaped
from malleus_megatron.control.values import JobDescription, Observation
from malleus_megatron.cost.bounds import fluid_bottleneck_s
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.batches import balance_microbatches

type StageTimes = Sequence[Sequence[float]]
"""Forward plus backward of one micro-batch in seconds, per pipeline and stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Step times by the planner's costs: compute alone, without gradient sums and the optimizer."""

    scope: str
    """What may change."""
    rates: Rates
    """Of the stragglers; of workers there are none."""
    present_s: float
    """Under the present plan."""
    replanned_s: float
    """Under the best plan found; the present one's if nothing is better."""
    lower_bound_s: float | None
    """No plan within the scope is faster; None: not known."""
    counts: tuple[int, ...]
    """Micro-batches of the best plan."""
    plan: Plan | None = None
    """The best plan; None where only micro-batches are known."""
    note: str = ""
    """Why there is no more."""


def outlook(job: JobDescription, observations: Sequence[Observation]) -> Outlook:
    """What the controller would plan, did the job go on as in these iterations.

    Args:
        job: With the layout of all observations.
        observations: In their order, at least one.

    Raises:
        BadInputError: no layer was ever timed, or a figure that no planner takes.
    """
    policy = Policy()
    known = learned(job, observations, policy)
    counts, rates = observations[-1].microbatch_counts, known.planned_rates
    if not job.may_reshape:
        return _rebalanced(job.layout, known, rates, counts)
    problem = reshape_problem(job, known, rates, counts)
    present = job.layout.with_counts(counts)
    present_s = plan_costs(problem, present).step_time_s
    asked = Replanner(clock=lambda: 0.0).plan(problem)
    terms = Terms.of(job, policy)
    move = reshaped(job, problem, counts, asked.plan, terms=terms, sure=known.sure_rates)
    best = present if move is None else move.plan
    found = None if asked.plan is None else asked.plan.predicted
    alike = asked.plan is not None and len(asked.plan.pipelines) == len(best.pipelines)
    return Outlook(
        scope=f"stages, layers, TP groups and micro-batches of {len(best.pipelines)} pipelines",
        rates=rates,
        present_s=present_s,
        replanned_s=plan_costs(problem, best).step_time_s,
        lower_bound_s=found.lower_bound if found is not None and alike else None,
        counts=best.microbatch_counts,
        plan=best,
        note=asked.why,
    )


def learned(job: JobDescription, observations: Sequence[Observation], policy: Policy) -> Knowledge:
    """What the job's detector would know, had it seen these iterations again and again.

    A trace has one iteration in many, and the detector wants several to be sure of a rate.
    """
    known = Knowledge(policy, () if job.freedom is None else job.freedom.layer_time_s)
    repeats = math.ceil(policy.long_window / len(observations))
    for number, observation in enumerate([*observations] * repeats, start=1):
        known.learn(replace(observation, iteration=number), job.layout, policy)
    return known


def outlook_of_workers(
    stage_times_s: StageTimes, healthy_s: Sequence[float], num_microbatches: int
) -> Outlook:
    """What is known of a job by its workers alone: their layers and GPUs are not.

    The bound holds for any way of dividing the same work among the same workers: each does at most
    as much of it in a second as it does now.

    Args:
        stage_times_s: Of each worker.
        healthy_s: Of each stage, on a healthy worker.
        num_microbatches: Of each pipeline now.
    """
    counts = (num_microbatches,) * len(stage_times_s)
    split = balance_microbatches(stage_times_s, sum(counts), counts)
    per_second = sum(
        usual_s / own_s
        for pipeline in stage_times_s
        for usual_s, own_s in zip(healthy_s, pipeline, strict=True)
    )
    return Outlook(
        scope="micro-batches; the trace does not say what layers a stage has",
        rates=Rates(),
        present_s=step_time_s(stage_times_s, counts),
        replanned_s=split.step_time_s,
        lower_bound_s=fluid_bottleneck_s(1, sum(counts), per_second / sum(healthy_s)),
        counts=split.counts,
    )


def _rebalanced(layout: Plan, known: Knowledge, rates: Rates, counts: tuple[int, ...]) -> Outlook:
    stages = planned_stage_times(layout, known, rates)
    split = balance_microbatches(stages, sum(counts), counts)
    return Outlook(
        scope="micro-batches",
        rates=rates,
        present_s=step_time_s(stages, counts),
        replanned_s=split.step_time_s,
        lower_bound_s=split.lower_bound_s,
        counts=split.counts,
        plan=layout.with_counts(split.counts),
    )
