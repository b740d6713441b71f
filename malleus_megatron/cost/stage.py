"""Time and memory of one stage: closed forms."""

from collections.abc import Sequence
from math import floor

from malleus_megatron.plan.problem import Model, ModelMemory


def layer_time_s(model: Model, tp_degree: int, rate: float) -> float:
    """One layer and micro-batch on a TP group: y = layer_time_s[T] * max(rate of its GPUs)."""
    return dict(model.layer_time_s)[tp_degree] * rate


def extra_layers(model: Model, *, first: bool, last: bool) -> float:
    """Embedding and head in layers: their time over a layer's, both at the largest degree.

    They scale with degree and rate as a layer does, so a stage takes (layers + extra) * y.
    """
    extra_s = model.embedding_time_s * first + model.head_time_s * last
    return extra_s / model.largest_degree_time_s


def num_inflight(*, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches whose activations a 1F1B stage holds at most: min(p - j, m), j from 0."""
    return min(num_stages - stage, num_microbatches)


def stage_memory_mib(
    memory: ModelMemory, tp_degree: int, *, num_layers: int, inflight: int, ends_mib: float
) -> float:
    """What each GPU of a stage needs, the reserve not counted.

    (layers * layer_mib[inflight] + embedding, head, working) * reference_tp / T
    + layers * inflight * replicated + fixed.

    Args:
        memory: The model's sizes in one pipeline (`ModelMemory.among`).
        tp_degree: T.
        num_layers: Of the stage.
        inflight: Micro-batches in flight.
        ends_mib: Of the stage, from `ends_mib`.
    """
    shared = num_layers * memory.layer_mib(inflight) + ends_mib
    whole = num_layers * inflight * memory.replicated_mib + memory.fixed_mib
    return shared * memory.reference_tp / tp_degree + whole


def max_layers(
    memory: ModelMemory, limit_mib: float, tp_degree: int, *, inflight: int, ends_mib: float
) -> int:
    """Most layers with which `stage_memory_mib` keeps to a limit; below 0 if none fits."""
    scale = tp_degree / memory.reference_tp
    room = (limit_mib - memory.fixed_mib) * scale - ends_mib
    return floor(room / (memory.layer_mib(inflight) + inflight * memory.replicated_mib * scale))


def ends_mib(memory: ModelMemory, *, first: bool, last: bool) -> float:
    """What a stage takes beside its layers, at the reference degree.

    Embedding of a first stage, head of a last one, and what any stage computes with.
    """
    return memory.embedding_mib * first + memory.head_mib * last + memory.working_mib


def layers_by_microbatches(pipelines: Sequence[tuple[Sequence[float], int]]) -> float:
    """The objective `bottleneck` in seconds: max over pipelines of m * max_j l_j * y_j.

    Args:
        pipelines: Pairs (layer time of each stage, embedding and head not counted; m).
    """
    return max(count * max(times) for times, count in pipelines)
