"""Plans without a planner: what a recipe, or a restart on fewer nodes, can express."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.cost.validity import plan_faults
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.batches import balance_microbatches
from malleus_megatron.planner.explanation import uniform_plan
from malleus_megatron.planner.search import make_plan


def nominal_plan(problem: Problem) -> Plan:
    """The plan that a job starts under.

    `current_plan` if the problem has one; else the uniform plan, of the fastest number of pipelines
    where none is given. Where memory has no room for equal layers in every stage: the planner's
    plan for healthy GPUs with the largest TP degree in all stages.

    Raises:
        BadInputError: the current plan does not fit the problem.
        InfeasiblePlanError: no such plan fits.
    """
    healthy = replace(problem, rates=Rates())
    if problem.current_plan is not None:
        faults = plan_faults(healthy, problem.current_plan)
        if faults:
            raise BadInputError(f"current_plan cannot run: {faults[0]}")
        return _with_all_gpus(problem.current_plan, problem.cluster.num_gpus)
    uniform = fastest_uniform(healthy)
    if uniform is not None:
        return uniform
    largest = max(problem.tensor_parallel_sizes)
    return make_plan(replace(healthy, tensor_parallel_sizes=(largest,)))


def fastest_uniform(problem: Problem) -> Plan | None:
    """The fastest valid plan of equal pipelines, stages and micro-batches; None if none fits."""
    wanted = problem.num_pipelines
    most = min(problem.cluster.num_gpus, problem.num_microbatches)
    numbers = range(1, most + 1) if wanted is None else [wanted]
    plans = (
        uniform_plan(problem, number)
        for number in numbers
        if wanted is not None or problem.num_microbatches % number == 0
    )
    return _fastest(problem, plans)


def uniform_on(problem: Problem, nodes: Sequence[int]) -> Plan | None:
    """The fastest uniform plan that uses these nodes alone, with any number of pipelines."""
    return _on(replace(problem, num_pipelines=None), nodes, fastest_uniform)


def templates_on(problem: Problem, nodes: Sequence[int], num_pipelines: int) -> Plan | None:
    """Whole nodes to pipelines of nearly equal length, each a template with equal stages.

    In the manner of Oobleck: a pipeline of n nodes looks the same wherever it stands, pipelines
    may differ in n, and micro-batches follow their speed. With fewer pipelines than asked where
    that is faster, or where so many do not fit.
    """
    return _on(
        problem,
        nodes,
        lambda kept: _fastest(
            replace(kept, num_pipelines=None),
            (_of_templates(kept, number) for number in range(1, num_pipelines + 1)),
        ),
    )


def _of_templates(problem: Problem, num_pipelines: int) -> Plan | None:
    nodes = problem.cluster.nodes()
    if num_pipelines > min(len(nodes), problem.num_microbatches):
        return None
    bounds = [0, *accumulate(even(len(nodes), num_pipelines))]
    members = [nodes[start:end] for start, end in pairwise(bounds)]
    stages = [_template(problem, part) for part in members]
    if not all(stages):
        return None
    plan = _plan(problem, stages, even(problem.num_microbatches, num_pipelines))
    times_s = plan_costs(problem, plan).stage_times_s
    counts = balance_microbatches(times_s, problem.num_microbatches).counts
    return plan.with_counts(counts)


def _template(problem: Problem, nodes: Sequence[range]) -> tuple[Stage, ...]:
    size = max(problem.tensor_parallel_sizes)
    groups = [
        tuple(gpus[start : start + size])
        for gpus in nodes
        for start in range(0, len(gpus) - size + 1, size)
    ][: problem.model.num_layers]
    if not groups:
        return ()
    ends = [0, *accumulate(even(problem.model.num_layers, len(groups)))]
    return tuple(
        Stage(gpus=group, layers=layers)
        for group, layers in zip(groups, pairwise(ends), strict=True)
    )


def _plan(problem: Problem, stages: Sequence[tuple[Stage, ...]], counts: Sequence[int]) -> Plan:
    pipelines = tuple(
        Pipeline(num_microbatches=count, stages=own)
        for count, own in zip(counts, stages, strict=True)
    )
    plan = Plan(
        num_layers=problem.model.num_layers,
        num_microbatches=problem.num_microbatches,
        pipelines=pipelines,
    )
    return _with_all_gpus(plan, problem.cluster.num_gpus)


def even(total: int, parts: int) -> list[int]:
    """Whole numbers that differ by 1 at most, the larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def _fastest(problem: Problem, plans: Iterable[Plan | None]) -> Plan | None:
    valid = [plan for plan in plans if plan is not None and not plan_faults(problem, plan)]
    return min(valid, key=lambda plan: plan_costs(problem, plan).step_time_s, default=None)


def _on(
    problem: Problem, nodes: Sequence[int], make: Callable[[Problem], Plan | None]
) -> Plan | None:
    """Make a plan for a cluster of these nodes alone; all other GPUs are on standby."""
    if not nodes:
        return None
    cluster = problem.cluster
    gpus = [gpu for node in nodes for gpu in cluster.nodes()[node]]
    sizes = tuple(cluster.gpus_per_node[node] for node in nodes)
    degrees = tuple(size for size in problem.tensor_parallel_sizes if size <= max(sizes))
    if not degrees:
        return None
    rates = dict(problem.rates)
    kept = replace(
        problem,
        cluster=Cluster(gpus_per_node=sizes, memory_mib=cluster.memory_mib),
        tensor_parallel_sizes=degrees,
        rates=Rates.of({new: rates[old] for new, old in enumerate(gpus) if old in rates}),
        current_plan=None,
    )
    plan = make(kept)
    return None if plan is None else _with_all_gpus(_renumbered(plan, gpus), cluster.num_gpus)


def _renumbered(plan: Plan, gpus: Sequence[int]) -> Plan:
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, gpus=tuple(gpus[gpu] for gpu in stage.gpus))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines, standby=())


def _with_all_gpus(plan: Plan, num_gpus: int) -> Plan:
    """The same plan with every GPU that holds nothing on standby."""
    used = {gpu for pipeline in plan.pipelines for gpu in pipeline.gpus}
    return replace(plan, standby=tuple(gpu for gpu in range(num_gpus) if gpu not in used))
