"""The schedule under a plan: Megatron's own, with the pipeline's own number of micro-batches."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malleus_megatron.adapter.job import Job

_loss_divisor: ContextVar[int | None] = ContextVar("malleus_loss_divisor", default=None)


def under_plan(job: "Job", schedule: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule with Megatron's interface that runs each training step under the present plan."""

    @functools.wraps(schedule)
    def forward_backward(**kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return job.evaluate_step(schedule, kwargs)
        if not job.runs_steps:
            return schedule(**kwargs)
        with _dividing_loss_by(kwargs["num_microbatches"]):
            return job.run_schedule(schedule, kwargs)

    return forward_backward


def with_loss_divisor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `forward_step_calc_loss` divide by another count while a plan's schedule runs.

    Megatron divides each micro-batch's loss by its pipeline's count n and averages gradients over
    the D pipelines: 1 / (n * D). With n the nominal count that is 1 / all micro-batches of the
    step, whatever a pipeline's own count is, and the same operations in the same order as stock.
    In a reshaped job the owners of a slice do the same with its sum (`OwnerShards`): a micro-batch
    overflows in fp16 where it does in stock.
    """

    @functools.wraps(original)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        divisor = _loss_divisor.get()
        if divisor is None:
            return original(*args, **kwargs)
        if "num_microbatches" in kwargs:
            kwargs["num_microbatches"] = divisor
        else:
            args = (*args[:_DIVISOR_POSITION], divisor, *args[_DIVISOR_POSITION + 1 :])
        return original(*args, **kwargs)

    return forward_step_calc_loss


_DIVISOR_POSITION = 6
"""Of `num_microbatches` in forward_step_calc_loss; the seam's signature holds it there."""


@contextlib.contextmanager
def _dividing_loss_by(num_microbatches: int) -> Iterator[None]:
    token = _loss_divisor.set(num_microbatches)
    try:
        yield
    finally:
        _loss_divisor.reset(token)
