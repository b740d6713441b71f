"""Why there is no plan: the numbers that do not fit."""

from math import isinf

from malleus_megatron.cost.prediction import STEP_TIME
from malleus_megatron.cost.validity import memory_limit_mib
from malleus_megatron.errors import InfeasiblePlanError
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.render import in_mib
from malleus_megatron.planner.costs import SearchCosts


def check_possible(problem: Problem) -> None:
    """Refuse what counting alone shows to be impossible.

    Raises:
        InfeasiblePlanError: with the numbers.
    """
    rates = problem.counted_rates()
    smallest = min(problem.tensor_parallel_sizes)
    usable = [sum(1 for gpu in gpus if not isinf(rates[gpu])) for gpus in problem.cluster.nodes()]
    groups = sum(number // smallest for number in usable)
    wanted = problem.num_pipelines or 1
    if groups < wanted:
        raise InfeasiblePlanError(
            f"{wanted} pipelines need {wanted} TP groups; the {sum(usable)} GPUs that have not "
            f"failed form at most {groups} groups of {smallest} inside nodes."
        )
    if problem.num_microbatches < wanted:
        raise InfeasiblePlanError(
            f"{problem.num_microbatches} micro-batches for {wanted} pipelines; every pipeline "
            "needs at least 1. Lower parallel.num_pipelines."
        )
    memory, limit_mib, has_mib = (
        problem.memory,
        memory_limit_mib(problem),
        problem.cluster.memory_mib,
    )
    if memory is None or limit_mib is None or has_mib is None:
        return
    largest = max(size for size in problem.tensor_parallel_sizes)
    layer_mib = memory.layer_mib(1) * memory.reference_tp / largest + memory.replicated_mib
    if layer_mib + memory.fixed_mib > limit_mib:
        raise InfeasiblePlanError(
            f"One layer with one micro-batch on a TP group of {largest} needs "
            f"{in_mib(layer_mib)} MiB a GPU plus {in_mib(memory.fixed_mib)} MiB fixed; of "
            f"cluster.memory_mib {in_mib(has_mib)} MiB only "
            f"{in_mib(limit_mib)} MiB may be used ({in_mib(memory.reserve_mib)} MiB are reserved)."
        )


def no_plan(problem: Problem) -> InfeasiblePlanError:
    """The error when the search found nothing: what all groups can hold, and what they should."""
    costs = SearchCosts.of(problem, STEP_TIME)
    rates = problem.counted_rates()
    largest = max(problem.tensor_parallel_sizes)
    usable = sum(1 for rate in rates if not isinf(rate))
    wanted = problem.num_pipelines or 1
    each = costs.max_layers(largest, 1, first=False, last=False)
    return InfeasiblePlanError(
        f"{wanted} pipeline(s) of {problem.model.num_layers} layers do not fit: {usable} usable "
        f"GPUs form {usable // largest} TP groups of {largest}, each with room for {each} layers "
        f"at one micro-batch in flight and for fewer further from the end, within "
        f"cluster.memory_mib {problem.cluster.memory_mib}. Add memory or GPUs, or lower "
        "parallel.num_pipelines."
    )
