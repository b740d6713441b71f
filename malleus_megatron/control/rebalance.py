"""The same layout with other micro-batch counts, if that saves enough."""

from malleus_megatron.control.knowledge import Knowledge
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.stages import StageTimes
from malleus_megatron.plan.microbatches import scaled_counts
from malleus_megatron.plan.plan import Plan, Prediction
from malleus_megatron.plan.rates import HEALTHY, Rates
from malleus_megatron.planner.batches import balance_microbatches


def planned_stage_times(layout: Plan, known: Knowledge, rates: Rates) -> StageTimes:
    """What each stage takes: its layers and ends on healthy GPUs, times its slowest GPU's rate.

    Args:
        layout: Who holds which layers.
        known: Healthy layer times, embedding and head.
        rates: Of the GPUs that do not count as healthy.

    Raises:
        BadInputError: no layer was ever timed.
    """
    times, rate = [], dict(rates)
    for pipeline in layout.pipelines:
        layers = [float(stage.num_layers) for stage in pipeline.stages]
        layers[0] += known.ends.embedding_layers
        layers[-1] += known.ends.head_layers
        times.append(
            tuple(
                known.healthy_s(len(stage.gpus))
                * max(rate.get(gpu, HEALTHY) for gpu in stage.gpus)
                * number
                for stage, number in zip(pipeline.stages, layers, strict=True)
            )
        )
    return tuple(times)


def rebalanced(
    nominal: Plan, counts: tuple[int, ...], stages: StageTimes, *, min_gain: float
) -> Plan | None:
    """Return the plan that the job should change to, or None if it should stay.

    The nominal counts are taken whenever no split saves more than `min_gain` against them; so
    noise never leads away from them, and a job whose GPUs have recovered comes back to them.

    Args:
        nominal: The layout, and the stock way to share a step.
        counts: Micro-batches of each pipeline now; their sum is kept.
        stages: Time of every stage.
        min_gain: Part of the step's time that the change must save.
    """
    best = balance_microbatches(stages, sum(counts), counts)
    stock = scaled_counts(nominal.microbatch_counts, sum(counts))
    stock_is_enough = _gain(step_time_s(stages, stock), best.step_time_s) <= min_gain
    target = stock if stock_is_enough else best.counts
    target_s = step_time_s(stages, target)
    if _gain(step_time_s(stages, counts), target_s) <= min_gain:
        return None
    predicted = Prediction(step_time_s=target_s, lower_bound=best.lower_bound_s)
    return nominal.with_counts(target, predicted)


def _gain(before_s: float, after_s: float) -> float:
    return 1 - after_s / before_s
