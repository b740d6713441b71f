"""Closed lower bounds: no plan is faster, whatever it does."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf


def node_throughput(
    rates: Sequence[float], sizes: Sequence[int], time_by_degree: Mapping[int, float]
) -> float:
    """Most layers per second that a node can do, over all partitions of its GPUs into TP groups.

    A group of layer time y does 1 / y. Groups of consecutive GPUs, fastest first, are enough
    (`planner.grouping` has the argument), so the best partition is a shortest-path sum.

    Args:
        rates: Of the node's GPUs; inf: failed.
        sizes: Allowed TP sizes.
        time_by_degree: A healthy layer's time in seconds.
    """
    ordered = sorted(rate for rate in rates if rate < inf)
    best = [0.0] * (len(ordered) + 1)
    for end in range(1, len(best)):
        best[end] = best[end - 1]
        for size in sizes:
            if size <= end:
                y_s = time_by_degree[size] * ordered[end - 1]
                best[end] = max(best[end], best[end - size] + 1 / y_s)
    return list(accumulate(best, max))[-1]


def fluid_bottleneck_s(num_layers: int, num_microbatches: int, layers_per_second: float) -> float:
    """m_i max_j l_ij y_ij >= Z implies Z >= L M / C, C the cluster's throughput.

    In pipeline i some stage takes at least L / C_i, C_i = sum_j 1 / y_ij, since l_ij <= b_i / y_ij
    adds up to L. So m_i L <= Z C_i, and the C_i add up to C at most. It holds for the step time
    too, in which the slowest stage is busy m_i times.
    """
    return num_layers * num_microbatches / layers_per_second


def fluid_step_time_s(
    num_layers: int,
    num_microbatches: int,
    layers_per_second: float,
    *,
    num_pipelines: int,
    fastest_layer_s: float,
    extra_layers: float = 0.0,
) -> float:
    """Z >= (L + e) y + (M - D) L / C: the fill is no less than all layers on the fastest group.

    From Z >= sum_j t_j + (m_i - 1) b_i with sum_j t_j >= (L + e) y and b_i >= L / C_i, summed over
    the D pipelines.

    Args:
        num_layers: L.
        num_microbatches: M, of the step.
        layers_per_second: C.
        num_pipelines: D.
        fastest_layer_s: y of the fastest group that the cluster can form.
        extra_layers: e, embedding and head in layers.
    """
    fill_s = (num_layers + extra_layers) * fastest_layer_s
    rest = max(0, num_microbatches - num_pipelines)
    return fill_s + rest * num_layers / layers_per_second
