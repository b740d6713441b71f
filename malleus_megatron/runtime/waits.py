"""The time that a rank spends in collectives is taken out of its compute time.

The members of a TP group leave each collective together, so with it a fast member would seem as
slow as the slowest. On CPU a collective is waited for where it is called; whatever torch does
there, synchronous or by handle, ends in `Work.wait`. On a GPU the current stream waits: for the
collective itself if that runs on the stream, which begins in a method of the process group, or for
another stream, from `Work.wait` on.
"""

import functools
from collections.abc import Callable

from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.patching import Replacement

_WAIT = "torch.distributed.distributed_c10d.Work.wait"
_ON_THE_STREAM = tuple(
    f"torch.distributed.distributed_c10d.ProcessGroup.{name}"
    for name in (
        "allreduce",
        "broadcast",
        "allgather",
        "all_gather_single",
        "_allgather_base",
        "reduce_scatter",
        "reduce_scatter_single",
        "_reduce_scatter_base",
        "all_to_all_single",
        "alltoall_base",
    )
)
"""Of a stage of Megatron or a layer of Transformer Engine, under the names of several torches."""


def timed[**P, R](clock: LayerClock, original: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose time the clock counts as waiting and not as compute."""

    @functools.wraps(original)
    def wait(*args: P.args, **kwargs: P.kwargs) -> R:
        with clock.pause():
            return original(*args, **kwargs)

    return wait


def wait_rows(clock: LayerClock) -> tuple[Replacement, ...]:
    """The attributes to replace so that waiting is no compute."""
    make = functools.partial(timed, clock)
    if clock.device.type == "cpu":
        reason = "CPU mode: waiting for other ranks is not compute time of this one."
        return (Replacement(target=_WAIT, make=make, reason=reason),)
    reason = "What a stream waits for other ranks is not compute time of this one."
    return tuple(
        # A name that another version of torch lacks is one that nothing calls there.
        Replacement(target=target, make=make, reason=reason, optional=target != _WAIT)
        for target in (_WAIT, *_ON_THE_STREAM)
    )
