"""Why a step takes as long as it does under a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, isinf

from malleus_megatron.cost.bounds import node_throughput
from malleus_megatron.cost.pipeline import pipeline_time_s
from malleus_megatron.cost.prediction import PlanCosts, plan_costs
from malleus_megatron.cost.validity import memory_shortages, plan_faults
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import HEALTHY, Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerCost:
    """What one slow GPU costs."""

    gpu: int
    rate: float
    standby: bool
    in_plan_s: float
    """The step would be so much shorter under this very plan if the GPU were healthy."""
    lost_share: float
    """Of the cluster's throughput, so much is missing because of it: no plan gets it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What bounds the step, and what other plans would take."""

    costs: PlanCosts
    pipeline: int
    stage: int
    gpu: int
    """The slowest GPU of the slowest stage of the slowest pipeline."""
    stragglers: tuple[StragglerCost, ...]
    nominal_step_time_s: float
    """The uniform plan at these rates; inf if it cannot run."""
    nominal_healthy_step_time_s: float
    nominal_shortages: tuple[str, ...] | None
    """What does not fit of the uniform plan; None if there is no such plan."""
    faults: tuple[str, ...]


def explain(problem: Problem, plan: Plan) -> Explanation:
    """Find what bounds the step and what each straggler costs.

    Raises:
        BadInputError: the plan names GPUs or TP sizes that the problem does not have.
    """
    costs = plan_costs(problem, plan)
    times = [
        pipeline_time_s(stages, count)
        for stages, count in zip(costs.stage_times_s, plan.microbatch_counts, strict=True)
    ]
    pipeline = times.index(max(times))
    stages = costs.stage_times_s[pipeline]
    stage = stages.index(max(stages))
    rates = problem.counted_rates()
    members = plan.pipelines[pipeline].stages[stage].gpus
    nominal = uniform_plan(problem, len(plan.pipelines))
    healthy = replace(problem, rates=Rates())
    return Explanation(
        costs=costs,
        pipeline=pipeline,
        stage=stage,
        gpu=max(members, key=lambda gpu: (rates[gpu], -gpu)),
        stragglers=_stragglers(problem, plan, costs),
        nominal_step_time_s=_step_time_s(problem, nominal),
        nominal_healthy_step_time_s=_step_time_s(healthy, nominal),
        nominal_shortages=None if nominal is None else tuple(memory_shortages(problem, nominal)),
        faults=(*plan_faults(problem, plan), *_left_out(problem, plan)),
    )


def _left_out(problem: Problem, plan: Plan) -> list[str]:
    """GPUs of the problem that the plan does not know: most likely it is another problem's."""
    there = problem.cluster.num_gpus
    missing = sorted(set(range(there)) - set(plan.all_gpus()))
    if not missing:
        return []
    return [
        f"The plan names {there - len(missing)} GPUs; the problem has {there}. The first that is "
        f"missing is GPU {missing[0]}: a GPU without layers belongs into `standby`."
    ]


def uniform_plan(problem: Problem, num_pipelines: int) -> Plan | None:
    """Largest TP groups in order, as many stages in every pipeline, everything as even as may be.

    None if there are too few groups, layers or micro-batches for it.
    """
    size = max(problem.tensor_parallel_sizes)
    groups = [
        tuple(gpus[start : start + size])
        for gpus in problem.cluster.nodes()
        for start in range(0, len(gpus) - size + 1, size)
    ]
    num_stages = min(len(groups) // num_pipelines, problem.model.num_layers)
    if num_stages < 1 or problem.num_microbatches < num_pipelines:
        return None
    layers = _even(problem.model.num_layers, num_stages)
    ends = [0, *accumulate(layers)]
    pipelines = tuple(
        Pipeline(
            num_microbatches=count,
            stages=tuple(
                Stage(
                    gpus=groups[number + num_pipelines * stage],
                    layers=(ends[stage], ends[stage + 1]),
                )
                for stage in range(num_stages)
            ),
        )
        for number, count in enumerate(_even(problem.num_microbatches, num_pipelines))
    )
    used = {gpu for pipeline in pipelines for gpu in pipeline.gpus}
    return Plan(
        num_layers=problem.model.num_layers,
        num_microbatches=problem.num_microbatches,
        pipelines=pipelines,
        standby=tuple(gpu for gpu in range(problem.cluster.num_gpus) if gpu not in used),
    )


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _step_time_s(problem: Problem, plan: Plan | None) -> float:
    return inf if plan is None else plan_costs(problem, plan).step_time_s


def _stragglers(problem: Problem, plan: Plan, costs: PlanCosts) -> tuple[StragglerCost, ...]:
    rates = problem.counted_rates()
    nodes = problem.cluster.nodes()
    node_of = problem.cluster.node_by_gpu()
    now = [_throughput(problem, [rates[gpu] for gpu in gpus]) for gpus in nodes]
    found = []
    for gpu, rate in enumerate(rates):
        if rate <= HEALTHY:
            continue
        cured = {other: r for other, r in problem.rates if other != gpu}
        node = node_of[gpu]
        better = [HEALTHY if other == gpu else rates[other] for other in nodes[node]]
        gain = _throughput(problem, better) - now[node]
        without = plan_costs(replace(problem, rates=Rates.of(cured)), plan).step_time_s
        found.append(
            StragglerCost(
                gpu=gpu,
                rate=rate,
                standby=gpu in plan.standby,
                in_plan_s=0.0 if isinf(costs.step_time_s) else costs.step_time_s - without,
                lost_share=gain / (sum(now) + gain),
            )
        )
    return tuple(found)


def _throughput(problem: Problem, rates: Sequence[float]) -> float:
    times = dict(problem.model.layer_time_s)
    return node_throughput(rates, problem.tensor_parallel_sizes, times)
