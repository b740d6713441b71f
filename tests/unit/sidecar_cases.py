"""A job of two pipelines with two stages each, and what its GPUs measure."""

import time
from collections.abc import Callable, Mapping

from malleus_megatron.config import Level
from malleus_megatron.control.values import JobDescription, Observation
from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan

PLAN = nominal_plan(
    num_layers=8,
    num_microbatches=16,
    tensor_parallel_size=1,
    pipeline_parallel_size=2,
    data_parallel_size=2,
)
JOB = JobDescription(nominal=PLAN, level=Level.rebalance)
SLOW = {PLAN.pipelines[1].stages[0].gpus[0]: 3.0}
"""With these rates the fastest split is 12 and 4."""


def observation(
    iteration: int, rates: Mapping[int, float] | None = None, plan: Plan = PLAN
) -> Observation:
    """What an iteration under the plan measures; NaN for a GPU whose rate is NaN."""
    samples = []
    for gpu in sorted(plan.all_gpus()):
        rate = (rates or {}).get(gpu, 1.0)
        samples.append(
            Sample(
                gpu=gpu,
                iteration=iteration,
                layer_forward_s=0.01 * rate,
                layer_backward_s=0.02 * rate,
                stage_forward_s=0.04 * rate,
                stage_backward_s=0.08 * rate,
                num_layers=4,
                num_microbatches=8,
            )
        )
    return Observation(
        iteration=iteration,
        generation=0,
        plan_id=plan_id(plan),
        microbatch_counts=plan.microbatch_counts,
        samples=tuple(samples),
    )


def wait_for[T](ask: Callable[[], T], *, within_s: float = 10.0) -> T:
    """Ask until the answer is true; the last answer if it never is."""
    deadline = time.monotonic() + within_s
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer
