"""An independent checker of plans: from the two JSON documents, with nothing of the planner."""

import math
from typing import Any

TOLERANCE = 1e-9


def faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a plan.json for a problem.json; empty if it is valid."""
    found = [*_gpu_faults(problem, plan), *_layer_faults(problem, plan)]
    found += [*_count_faults(problem, plan)]
    if problem["cluster"].get("memory_mib") is not None:
        found += _memory_faults(problem, plan)
    return found or _figure_faults(problem, plan)


def step_time_s(problem: dict[str, Any], plan: dict[str, Any]) -> float:
    """max over pipelines of sum_j t_j + (m - 1) * max_j t_j."""
    longest = 0.0
    for pipeline in plan["pipelines"]:
        times = [
            (_layers(stage) + _extra(problem, pipeline, index)) * _y(problem, stage)
            for index, stage in enumerate(pipeline["stages"])
        ]
        longest = max(longest, sum(times) + (pipeline["num_microbatches"] - 1) * max(times))
    return longest


def bottleneck(problem: dict[str, Any], plan: dict[str, Any]) -> float:
    """max over pipelines of m * max_j l_j * y_j, in layers of the largest degree."""
    unit = _times(problem)[max(_times(problem))]
    return max(
        int(pipeline["num_microbatches"])
        * max(_layers(stage) * _y(problem, stage) for stage in pipeline["stages"])
        / unit
        for pipeline in plan["pipelines"]
    )


def rate(problem: dict[str, Any], gpu: int) -> float:
    """The rate that counts."""
    value: Any = problem.get("rates", {}).get(str(gpu), 1.0)
    value = math.inf if value in (None, "inf") else value
    floor = float(problem.get("rate_floor", 1.0))
    return 1.0 if value < floor else float(value)


def _gpu_faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    node_of = [n for n, size in enumerate(problem["cluster"]["gpus_per_node"]) for _ in range(size)]
    stages = [stage for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    used = [gpu for stage in stages for gpu in stage["gpus"]]
    found = []
    if sorted(used + plan["standby"]) != list(range(len(node_of))):
        found.append(f"GPUs {sorted(used)} and standby {plan['standby']} are not each GPU once")
    for stage in stages:
        if len({node_of[gpu] for gpu in stage["gpus"]}) != 1:
            found.append(f"the TP group {stage['gpus']} spans nodes")
        if len(stage["gpus"]) not in problem["parallel"]["tensor_parallel_sizes"]:
            found.append(f"the TP group {stage['gpus']} has a size that is not allowed")
        if any(math.isinf(rate(problem, gpu)) for gpu in stage["gpus"]):
            found.append(f"the TP group {stage['gpus']} has a failed GPU")
    return found


def _layer_faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    wanted = list(range(problem["model"]["num_layers"]))
    found = []
    for index, pipeline in enumerate(plan["pipelines"]):
        layers = [layer for stage in pipeline["stages"] for layer in range(*stage["layers"])]
        if layers != wanted:
            found.append(f"pipeline {index} does not hold each layer once, in order: {layers}")
        if any(_layers(stage) < 1 for stage in pipeline["stages"]):
            found.append(f"pipeline {index} has a stage without layers")
    return found


def _count_faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    counts = [pipeline["num_microbatches"] for pipeline in plan["pipelines"]]
    found = []
    if sum(counts) != problem["batch"]["num_microbatches"] or min(counts) < 1:
        found.append(f"micro-batches {counts} do not sum up")
    wanted = problem["parallel"]["num_pipelines"]
    if wanted is not None and len(counts) != wanted:
        found.append(f"{len(counts)} pipelines instead of {wanted}")
    return found


def _memory_faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    memory = problem["model"]["memory"]
    limit = problem["cluster"]["memory_mib"] - memory.get("reserve_mib", 0.0)
    found = []
    for number, pipeline in enumerate(plan["pipelines"]):
        num_stages = len(pipeline["stages"])
        for j, stage in enumerate(pipeline["stages"]):
            inflight = min(num_stages - j, pipeline["num_microbatches"])
            need = _layers(stage) * (
                _layer_or_update_mib(memory, inflight, len(plan["pipelines"]))
                + memory.get("layer_shared_mib", 0.0) / len(plan["pipelines"])
            )
            need += _end_mib(memory, "embedding", plan) if j == 0 else 0.0
            need += _end_mib(memory, "head", plan) if j == num_stages - 1 else 0.0
            need += memory.get("working_mib", 0.0)
            need = need * memory["reference_tp"] / len(stage["gpus"])
            need += _layers(stage) * inflight * memory.get("replicated_mib", 0.0)
            need += memory.get("fixed_mib", 0.0)
            if need > limit * (1 + TOLERANCE):
                found.append(f"pipeline {number}, stage {j} needs {need} MiB of {limit}")
            shown = plan.get("predicted", {}).get("memory_mib")
            if shown is not None and not math.isclose(shown[number][j], need, rel_tol=1e-6):
                found.append(f"memory_mib[{number}][{j}] says {shown[number][j]}, is {need}")
    return found


def _figure_faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    predicted = plan.get("predicted")
    if predicted is None:
        return []
    found = []
    exact = {"step_time_s": step_time_s(problem, plan), "bottleneck": bottleneck(problem, plan)}
    for name, value in exact.items():
        if not math.isclose(predicted[name], value, rel_tol=1e-9):
            found.append(f"predicted.{name} says {predicted[name]}, is {value}")
    objective = "step_time_s" if plan["objective"] == "step-time" else "bottleneck"
    if predicted["lower_bound"] > exact[objective] * (1 + TOLERANCE):
        found.append(f"lower_bound {predicted['lower_bound']} is above {exact[objective]}")
    return found


def _layers(stage: dict[str, Any]) -> int:
    start, end = stage["layers"]
    return int(end - start)


def _times(problem: dict[str, Any]) -> dict[int, float]:
    return {int(size): time for size, time in problem["model"]["layer_time_s"].items()}


def _y(problem: dict[str, Any], stage: dict[str, Any]) -> float:
    slowest = max(rate(problem, gpu) for gpu in stage["gpus"])
    return _times(problem)[len(stage["gpus"])] * slowest


def _extra(problem: dict[str, Any], pipeline: dict[str, Any], index: int) -> float:
    """Embedding and head, in layers."""
    model = problem["model"]
    extra_s = model.get("embedding_time_s", 0.0) if index == 0 else 0.0
    extra_s += model.get("head_time_s", 0.0) if index == len(pipeline["stages"]) - 1 else 0.0
    return float(extra_s / _times(problem)[max(_times(problem))])


def _end_mib(memory: dict[str, Any], end: str, plan: dict[str, Any]) -> float:
    shared = memory.get(f"{end}_shared_mib", 0.0) / len(plan["pipelines"])
    return float(memory.get(f"{end}_mib", 0.0) + shared)


def _layer_or_update_mib(memory: dict[str, Any], inflight: int, num_pipelines: int) -> float:
    sizes = memory["layer_mib_by_inflight"]
    at_rest = 2 * _layer_mib(sizes, 1) - _layer_mib(sizes, 2)
    update = memory.get("layer_update_mib", 0.0) / num_pipelines
    return float(max(_layer_mib(sizes, inflight), at_rest + update))


def _layer_mib(sizes: list[float], inflight: int) -> float:
    if inflight <= len(sizes):
        return sizes[inflight - 1]
    step = sizes[-1] - sizes[-2] if len(sizes) > 1 else 0.0
    return sizes[-1] + step * (inflight - len(sizes))
