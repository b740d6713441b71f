"""Whether a plan may run under a problem: what the plan's own sums cannot tell."""

from math import isinf

from malleus_megatron.cost.memory import memory_faults
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem


def plan_faults(problem: Problem, plan: Plan) -> list[str]:
    """Everything that forbids the plan, with the numbers; empty if it may run."""
    return [
        *_total_faults(problem, plan),
        *_group_faults(problem, plan),
        *memory_shortages(problem, plan),
    ]


def memory_shortages(problem: Problem, plan: Plan) -> list[str]:
    """Every stage that needs more memory than its GPUs may use, with the numbers."""
    limit_mib, memory = memory_limit_mib(problem), problem.model.memory
    if limit_mib is None or memory is None:
        return []
    return memory_faults(memory, plan, limit_mib)


def memory_limit_mib(problem: Problem) -> float | None:
    """What a stage may use of a GPU; None: not limited.

    Raises:
        BadInputError: memory is limited, but the model's memory is not given.
    """
    limit, memory = problem.cluster.memory_mib, problem.model.memory
    if limit is None:
        return None
    if memory is None:
        raise BadInputError("model.memory is missing, but cluster.memory_mib is given.")
    return limit - memory.reserve_mib


def _total_faults(problem: Problem, plan: Plan) -> list[str]:
    faults = []
    for name, got, wanted in (
        ("layers", plan.num_layers, problem.model.num_layers),
        ("micro-batches", plan.num_microbatches, problem.num_microbatches),
        ("pipelines", len(plan.pipelines), problem.num_pipelines or len(plan.pipelines)),
    ):
        if got != wanted:
            faults.append(f"The plan has {got} {name}; the problem has {wanted}.")
    beyond = [gpu for gpu in plan.all_gpus() if gpu >= problem.cluster.num_gpus]
    if beyond:
        faults.append(f"GPU {beyond[0]} is not one of 0..{problem.cluster.num_gpus - 1}.")
    return faults


def _group_faults(problem: Problem, plan: Plan) -> list[str]:
    node = problem.cluster.node_by_gpu()
    rates = problem.counted_rates()
    faults = []
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            known = [gpu for gpu in stage.gpus if gpu < len(node)]
            nodes = sorted({node[gpu] for gpu in known})
            if len(nodes) > 1:
                faults.append(f"The TP group {list(stage.gpus)} spans nodes {nodes}.")
            if len(stage.gpus) not in problem.tensor_parallel_sizes:
                faults.append(
                    f"The TP group {list(stage.gpus)} has {len(stage.gpus)} GPUs; allowed sizes "
                    f"are {list(problem.tensor_parallel_sizes)}."
                )
            failed = [gpu for gpu in known if isinf(rates[gpu])]
            if failed:
                faults.append(f"GPU {failed[0]} has failed, but holds layers.")
            if stage.num_layers < 1:
                faults.append(f"The TP group {list(stage.gpus)} has no layer; put it on standby.")
    return faults
