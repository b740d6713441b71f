"""Another layout, if stragglers make it worth moving the model's state. All of it is pure.

Every plan is priced by the same model: what healthy GPUs take for a layer, as measured in the job,
times the stragglers' rates. GPUs that are no stragglers count as healthy, so noise moves nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from malleus_megatron.control.knowledge import Knowledge
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import JobDescription
from malleus_megatron.cost.memory import memory_faults
from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.cost.validity import memory_limit_mib
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.microbatches import scaled_counts
from malleus_megatron.plan.plan import Plan, Prediction
from malleus_megatron.plan.problem import Model, Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.batches import balance_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The plan that the job should change to, and what that saves."""

    plan: Plan
    gain: float
    """Part of the present step's time; below 0 where a job returns to a recipe that is slower."""
    moves_state: bool = False
    """True if it is another layout, not only other micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a change must bring."""

    min_gain: float
    """Part of the present step's time."""
    charge_s: float
    """What each step under another layout is charged with: the switch over the horizon."""
    least_s: float = 0.0
    """What another layout must save in each step: the switch over a layout's life; 0 where that is
    no shorter than the horizon."""

    @classmethod
    def of(cls, job: JobDescription, policy: Policy, life: float = math.inf) -> "Terms":
        """Terms of a job whose layouts live so many iterations."""
        switch_s = policy.switch_s if job.switch_s is None else job.switch_s
        return cls(
            min_gain=policy.min_gain,
            charge_s=switch_s / policy.horizon,
            least_s=switch_s / life if life < policy.horizon else 0.0,
        )


def reshape_problem(
    job: JobDescription, known: Knowledge, rates: Rates, counts: tuple[int, ...]
) -> Problem:
    """What the planner is asked.

    The number of pipelines stays the recipe's. Costs have no time for gradient sums: a planner that
    is free to choose makes many small replicas, each GPU with a larger part of the model, and that
    looks better than it is. For the same reason degrees whose time nobody
    knows are left out.

    Args:
        job: With its freedom.
        known: Healthy times.
        rates: Of the stragglers that count.
        counts: Micro-batches of each pipeline of the present layout; their sum is the step's.

    Raises:
        BadInputError: no degree is left, or a figure that no planner takes.
    """
    freedom = job.freedom
    if freedom is None:
        raise BadInputError("The job's description has no freedom: its layout cannot change.")
    largest = max(freedom.cluster.gpus_per_node)
    sizes = tuple(
        size
        for size in freedom.tensor_parallel_sizes
        if size <= largest and known.is_within_reach(size)
    )
    degrees = {*sizes, *_degrees(job.layout), *_degrees(job.nominal)}
    layer_s = tuple((degree, known.healthy_s(degree)) for degree in sorted(degrees))
    problem = Problem(
        cluster=freedom.cluster,
        model=Model(
            num_layers=job.nominal.num_layers,
            layer_time_s=layer_s,
            embedding_time_s=known.ends.embedding_layers * layer_s[-1][1],
            head_time_s=known.ends.head_layers * layer_s[-1][1],
            memory=freedom.memory,
        ),
        num_microbatches=sum(counts),
        tensor_parallel_sizes=sizes,
        num_pipelines=len(job.nominal.pipelines),
        rates=rates,
    )
    return replace(problem, current_plan=_split(problem, job.layout, counts))


def reshaped(
    job: JobDescription,
    problem: Problem,
    counts: tuple[int, ...],
    planned: Plan | None,
    *,
    terms: Terms,
    sure: Rates,
) -> Move | None:
    """The best change, or None if the job should stay as it is.

    Of plans within `min_gain` of the fastest the first is taken: the nominal layout, then other
    micro-batches in the present one, which moves no state, then the planner's plan. A plan of
    another layout is charged in each step with the switch's share over the horizon, T / H: only
    that must not outweigh what it saves. Where layouts live shorter it is also left out unless it
    earns the switch within such a life. Without stragglers the nominal plan is the only one,
    whatever another promises: a healthy job runs its recipe. It waits with that only where layouts
    live so shortly that the switch outweighs what the recipe saves, and `min_gain` too.

    Args:
        job: With the layout in force.
        problem: From `reshape_problem`.
        counts: Micro-batches of each pipeline now.
        planned: The planner's plan, if it has one and the job may be asked for it.
        terms: What a change must save, and what it is charged.
        sure: All rates that are known for sure, those of no stragglers too: they are no reason for
            a change, but a plan that promises a step's time must have them.
    """
    now = job.layout.with_counts(counts)
    now_s = plan_costs(problem, now).step_time_s
    if not problem.rates.by_gpu:
        recipe = job.nominal.with_counts(
            scaled_counts(job.nominal.microbatch_counts, problem.num_microbatches)
        )
        if recipe.same_layout(now):
            return None
        if terms.least_s <= terms.min_gain * now_s or _earns(problem, recipe, terms.least_s):
            return _move(job, problem, recipe, now_s, sure)
    found = _target(job, problem, planned, terms)
    if found is None or not _gain(now_s, found[0]) > terms.min_gain:
        return None
    return _move(job, problem, found[1], now_s, sure)


def best_layout(
    job: JobDescription,
    problem: Problem,
    planned: Plan | None,
    *,
    terms: Terms,
    before: Plan | None,
) -> Plan:
    """The layout that these rates call for: the one before while it is as good as any.

    Args:
        job: With the layout in force.
        problem: From `reshape_problem`.
        planned: The planner's plan, if it has one, refused or not.
        terms: Of a job whose layouts live long.
        before: What this function returned the last time.
    """
    if not problem.rates.by_gpu:
        return job.nominal
    found = _target(job, problem, planned, terms)
    if found is None:
        return job.layout
    old = None if before is None else _split(problem, before, before.microbatch_counts)
    if old is not None and _gain(_charged_s(job, problem, old, terms), found[0]) <= terms.min_gain:
        return old
    return found[1]


def _target(
    job: JobDescription, problem: Problem, planned: Plan | None, terms: Terms
) -> tuple[float, Plan] | None:
    """The first plan within `min_gain` of the fastest, with its step's seconds and charge."""
    options = [
        (_charged_s(job, problem, plan, terms), plan)
        for plan in _options(job, problem, planned, terms.min_gain)
        if plan.same_layout(job.layout) or _earns(problem, plan, terms.least_s)
    ]
    fastest_s = min((time_s for time_s, _ in options), default=math.inf)
    return next((each for each in options if _gain(each[0], fastest_s) <= terms.min_gain), None)


def _earns(problem: Problem, plan: Plan, least_s: float) -> bool:
    """True if the plan saves so much in each step, against the best that moves no state.

    Where nothing is asked for, nothing is compared. Away from a failed GPU everything is saved.
    """
    present = problem.current_plan
    if not least_s or present is None:
        return True
    present_s, plan_s = (plan_costs(problem, each).step_time_s for each in (present, plan))
    return present_s - plan_s >= least_s


def _charged_s(job: JobDescription, problem: Problem, plan: Plan, terms: Terms) -> float:
    charge_s = 0.0 if plan.same_layout(job.layout) else terms.charge_s
    return plan_costs(problem, plan).step_time_s + charge_s


def _options(
    job: JobDescription, problem: Problem, planned: Plan | None, min_gain: float
) -> Iterator[Plan]:
    """Plans that the job could run under, the most welcome first.

    The nominal layout fits into memory, whatever a model of it says: the job has run under it.
    """
    nominal = _stock_or_split(problem, job.nominal, min_gain)
    for plan in (nominal, problem.current_plan, planned):
        if plan is not None and (plan.same_layout(job.nominal) or _fits(problem, plan)):
            yield plan


def _fits(problem: Problem, plan: Plan) -> bool:
    limit_mib, memory = memory_limit_mib(problem), problem.model.memory
    return limit_mib is None or memory is None or not memory_faults(memory, plan, limit_mib)


def _stock_or_split(problem: Problem, nominal: Plan, min_gain: float) -> Plan | None:
    """The nominal layout: stock counts unless another split saves more than `min_gain`."""
    try:
        stock = scaled_counts(nominal.microbatch_counts, problem.num_microbatches)
    except BadInputError:  # fewer micro-batches than nominal pipelines
        return None
    best = _split(problem, nominal, stock)
    if best is None:
        return None
    plan = nominal.with_counts(stock)
    stock_s, best_s = (plan_costs(problem, p).step_time_s for p in (plan, best))
    return plan if _gain(stock_s, best_s) <= min_gain else best


def _split(problem: Problem, layout: Plan, counts: tuple[int, ...]) -> Plan | None:
    """The layout with its best micro-batches; None if a stage holds a failed GPU."""
    stages = plan_costs(problem, layout).stage_times_s
    if any(math.isinf(time_s) for pipeline in stages for time_s in pipeline):
        return None
    return layout.with_counts(balance_microbatches(stages, problem.num_microbatches, counts).counts)


def _move(job: JobDescription, problem: Problem, plan: Plan, now_s: float, sure: Rates) -> Move:
    costs = plan_costs(replace(problem, rates=sure), plan)
    healthy = replace(problem, rates=Rates())
    recipe = _stock_or_split(healthy, job.nominal, 0.0)
    predicted = Prediction(
        step_time_s=costs.step_time_s,
        bottleneck=costs.bottleneck,
        healthy_step_time_s=None if recipe is None else plan_costs(healthy, recipe).step_time_s,
        memory_mib=costs.memory_mib,
    )
    return Move(
        plan=replace(plan, predicted=predicted, planning=None),
        gain=_gain(now_s, plan_costs(problem, plan).step_time_s),
        moves_state=not plan.same_layout(job.layout),
    )


def _gain(before_s: float, after_s: float) -> float:
    return 1 - after_s / before_s


def _degrees(plan: Plan) -> set[int]:
    return {len(stage.gpus) for pipeline in plan.pipelines for stage in pipeline.stages}
