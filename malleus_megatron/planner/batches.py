"""Micro-batches to pipelines: the split of a step that ends soonest, exactly."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from malleus_megatron.cost.pipeline import pipeline_time_s, step_time_s
from malleus_megatron.errors import BadInputError, InfeasiblePlanError

type TimeOf = Callable[[int], float]
"""A pipeline's time for a number of micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """Micro-batches of each pipeline, and what the step takes with them."""

    counts: tuple[int, ...]
    step_time_s: float
    lower_bound_s: float
    """No split is faster, not even one with fractions of micro-batches."""


def balance_microbatches(
    stage_times_s: Sequence[Sequence[float]],
    num_microbatches: int,
    current: Sequence[int] | None = None,
) -> BatchSplit:
    """Give every pipeline at least one micro-batch so that the step takes the least time.

    The time is `cost.pipeline.step_time_s`, fill and drain included. Each micro-batch goes to
    the pipeline that would end soonest with it. Why that is exact: a pipeline's time f_i(m) does
    not fall with m (nor do its rounded values). Let T be the step's time, set when pipeline j got
    a micro-batch while the counts were m. If it was j's first, every split takes T. Else j was the
    best choice, so f_i(m_i + 1) >= T for every i, and a split faster than T has no more than m_i
    micro-batches at each i: too few in sum.

    Args:
        stage_times_s: Forward plus backward of one micro-batch, per pipeline and stage.
        num_microbatches: Of the whole step.
        current: Counts in use. Among the fastest splits one that changes them least is taken; the
            sum may differ.

    Raises:
        BadInputError: a time or a count that is no such thing.
        InfeasiblePlanError: fewer micro-batches than pipelines, or a pipeline that never ends.
    """
    _check_times(stage_times_s)
    _check_counts(stage_times_s, num_microbatches, current)
    times = [partial(pipeline_time_s, stages) for stages in stage_times_s]
    counts = filled(times, [1] * len(times), num_microbatches)
    best_s = step_time_s(stage_times_s, counts)
    if current is not None:
        counts = _nearest(times, current, num_microbatches, limit_s=best_s)
    return BatchSplit(
        counts=tuple(counts),
        step_time_s=best_s,
        lower_bound_s=min(best_s, _fractional_bound_s(stage_times_s, num_microbatches)),
    )


def filled(times: Sequence[TimeOf], counts: list[int], total: int) -> list[int]:
    """Hand out micro-batches until `total`, each to the pipeline that ends soonest with it."""
    queue = [(times[i](count + 1), i) for i, count in enumerate(counts)]
    heapq.heapify(queue)
    for left in range(total - sum(counts), 0, -1):
        end_s, i = queue[0]
        if end_s == math.inf:  # none can do one more: it does not matter who has the rest
            counts[i] += left
            break
        counts[i] += 1
        heapq.heapreplace(queue, (times[i](counts[i] + 1), i))
    return counts


def _drained(times: Sequence[TimeOf], counts: list[int], total: int) -> list[int]:
    """Take micro-batches away until `total`, each from the pipeline that ends last."""
    queue = [(-times[i](count), i) for i, count in enumerate(counts) if count > 1]
    heapq.heapify(queue)
    for _ in range(sum(counts) - total):
        _, i = heapq.heappop(queue)
        counts[i] -= 1
        if counts[i] > 1:
            heapq.heappush(queue, (-times[i](counts[i]), i))
    return counts


def _nearest(
    times: Sequence[TimeOf], current: Sequence[int], total: int, *, limit_s: float
) -> list[int]:
    """Among the splits within the limit, one with the least sum of changes against `current`.

    Only what the limit forbids is cut; then all further changes go in one direction, so none is
    undone. Filling keeps to the limit: while the sum is short, some pipeline has room below it.
    """
    counts = [
        bisect_right(range(1, count + 1), limit_s, key=time_of)
        for time_of, count in zip(times, current, strict=True)
    ]
    change = filled if sum(counts) < total else _drained
    return change(times, counts, total)


def _fractional_bound_s(stage_times_s: Sequence[Sequence[float]], num_microbatches: int) -> float:
    """The step's time if micro-batches could be divided at will, still one a pipeline at least.

    From sum_i (1 + (T - sum_j t_ij) / max_j t_ij) = num_microbatches, solved for T.
    """
    longest_fill_s = max(sum(stages) for stages in stage_times_s)
    if any(max(stages) == 0 for stages in stage_times_s):
        return longest_fill_s
    speed = sum(1 / max(stages) for stages in stage_times_s)
    fill = sum(sum(stages) / max(stages) for stages in stage_times_s)
    return max(longest_fill_s, (num_microbatches - len(stage_times_s) + fill) / speed)


def _check_times(stage_times_s: Sequence[Sequence[float]]) -> None:
    if not stage_times_s:
        raise BadInputError("There is no pipeline to give micro-batches to.")
    for pipeline, stages in enumerate(stage_times_s):
        if not stages:
            raise BadInputError(f"Pipeline {pipeline} has no stage.")
        for stage, time_s in enumerate(stages):
            where = f"Pipeline {pipeline}, stage {stage}"
            if math.isnan(time_s) or time_s < 0:
                raise BadInputError(f"{where}: {time_s} s a micro-batch; need 0 or more.")
            if math.isinf(time_s):
                raise InfeasiblePlanError(
                    f"{where} has failed (infinite time), but every pipeline needs at least 1 of "
                    "the micro-batches: only a plan with other stages can leave its GPUs out."
                )


def _check_counts(
    pipelines: Sequence[object], num_microbatches: int, current: Sequence[int] | None
) -> None:
    if num_microbatches < len(pipelines):
        raise InfeasiblePlanError(
            f"{num_microbatches} micro-batches for {len(pipelines)} pipelines; "
            "every pipeline needs at least 1."
        )
    if current is None:
        return
    if len(current) != len(pipelines):
        raise BadInputError(f"{len(current)} current counts for {len(pipelines)} pipelines.")
    if min(current) < 1:
        raise BadInputError(
            f"Current micro-batches {list(current)}; every pipeline has at least 1."
        )
