"""What no plan can be faster than at given rates."""

from dataclasses import replace

from malleus_megatron.cost.bounds import fluid_bottleneck_s, node_throughput
from malleus_megatron.errors import MalleusError
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan
from malleus_megatron.simulator.clock import at_rates


def proved_step_s(problem: Problem, rates: Rates, *, thorough: bool = True) -> float:
    """No valid plan with the problem's number of pipelines takes less under 1F1B.

    The slowest stage of a pipeline works m times, and one micro-batch passes all layers. The
    planner's bound for the objective `step-time` is none here: 1F1B may hide a part of the fill
    that the closed form counts.

    Args:
        problem: Its own rates play no part.
        rates: Of the GPUs.
        thorough: Ask the planner for its proof of how little the slowest stage can do; else the
            closed form of it, which is a few per cent lower, and quick.
    """
    asked = replace(at_rates(problem, rates), current_plan=None)
    steady_s = fluid_bottleneck_s(
        problem.model.num_layers, problem.num_microbatches, _layers_per_second(asked)
    )
    planned_s = _planned_s(asked) if thorough else 0.0
    return max(_passage_s(asked), steady_s, planned_s)


def _planned_s(problem: Problem) -> float:
    try:
        predicted = make_plan(problem, "bottleneck").predicted
    except MalleusError:  # no plan was found: the job may run one that the search does not know
        return 0.0
    if predicted is None or predicted.lower_bound is None:
        return 0.0
    return predicted.lower_bound * problem.model.largest_degree_time_s


def lost_throughput(problem: Problem, rates: Rates) -> float:
    """Healthy GPUs' layers per second over those at these rates: 1 if nothing is lost."""
    return _layers_per_second(at_rates(problem, Rates())) / _layers_per_second(
        at_rates(problem, rates)
    )


def _layers_per_second(problem: Problem) -> float:
    times = dict(problem.model.layer_time_s)
    rates = problem.counted_rates()
    return sum(
        node_throughput([rates[gpu] for gpu in gpus], problem.tensor_parallel_sizes, times)
        for gpus in problem.cluster.nodes()
    )


def _passage_s(problem: Problem) -> float:
    """One micro-batch through all layers, embedding and head, on the fastest possible group."""
    model = problem.model
    times, rates = dict(model.layer_time_s), problem.counted_rates()
    fastest_s = min(
        times[size] * sorted(rates[gpu] for gpu in gpus)[size - 1]
        for gpus in problem.cluster.nodes()
        for size in problem.tensor_parallel_sizes
        if size <= len(gpus)
    )
    ends_s = model.embedding_time_s + model.head_time_s
    return fastest_s * (model.num_layers + ends_s / model.largest_degree_time_s)
