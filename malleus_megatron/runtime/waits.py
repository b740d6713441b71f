"""CPU mode: the time that a rank waits in collectives is taken out of its compute time.

On CPU a collective is waited for where it is called, inside the layer, so a fast member of a TP
group would seem as slow as the slowest. Whatever torch.distributed does on CPU, synchronous or by
handle, ends in `Work.wait`: one attribute is enough.
"""

import functools
from collections.abc import Callable

from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.patching import Replacement


def timed[**P, R](clock: LayerClock, original: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose time the clock counts as waiting and not as compute."""

    @functools.wraps(original)
    def wait(*args: P.args, **kwargs: P.kwargs) -> R:
        with clock.pause():
            return original(*args, **kwargs)

    return wait


def wait_rows(clock: LayerClock) -> tuple[Replacement, ...]:
    """The attributes to replace so that waiting is no compute; none where the device is a GPU."""
    if clock.device.type != "cpu":
        return ()
    return (
        Replacement(
            target="torch.distributed.distributed_c10d.Work.wait",
            make=functools.partial(timed, clock),
            reason="CPU mode: waiting for other ranks is not compute time of this one.",
        ),
    )
