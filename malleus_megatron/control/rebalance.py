"""The same layout with other micro-batch counts, if that saves enough."""

from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.stages import StageTimes
from malleus_megatron.plan.plan import Plan, Prediction
from malleus_megatron.planner.batches import balance_microbatches


def rebalanced(
    plan: Plan, counts: tuple[int, ...], stages: StageTimes, *, min_gain: float
) -> Plan | None:
    """Return the plan that the job should change to, or None if it should stay.

    Equal counts, the stock way, are taken whenever no split saves more than `min_gain` against
    them; so noise never leads away from them, and a job whose GPUs have recovered comes back.

    Args:
        plan: The layout.
        counts: Micro-batches of each pipeline now; their sum is kept.
        stages: Time of every stage.
        min_gain: Part of the step's time that the change must save.
    """
    total = sum(counts)
    best = balance_microbatches(stages, total, counts)
    equal = _equal_counts(total, len(counts))
    keeps_to_equal = _gain(step_time_s(stages, equal), best.step_time_s) <= min_gain
    target = equal if keeps_to_equal else best.counts
    target_s = step_time_s(stages, target)
    if _gain(step_time_s(stages, counts), target_s) <= min_gain:
        return None
    return plan.with_counts(
        target, Prediction(step_time_s=target_s, lower_bound=best.lower_bound_s)
    )


def _gain(before_s: float, after_s: float) -> float:
    return 1 - after_s / before_s


def _equal_counts(total: int, num_pipelines: int) -> tuple[int, ...]:
    each, rest = divmod(total, num_pipelines)
    return tuple(each + (pipeline < rest) for pipeline in range(num_pipelines))
