"""A Megatron job that notes when each training step begins; stock, but held to a pace, on request.

Environment: STEP_TIMES, the file for rank 0's clock readings; STOCK_PACE, a pace file: then the
layers are paced by a clock of this script, and none of the plugin's seams is there; STOCK_INJECT,
an injection file, which slows them down.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malleus_megatron import pretrain_gpt

PACE = os.environ.get("STOCK_PACE")
INJECTION = os.environ.get("STOCK_INJECT")
begun: list[float] = []


def timed(train_step: Callable[..., Any]) -> Callable[..., Any]:
    clocks: list[Any] = []

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        begun.append(time.perf_counter())
        if PACE is None:
            return train_step(*args, **kwargs)
        if not clocks:
            clocks.append(paced(args[2], Path(PACE)))
        clocks[0].start_iteration(len(begun))
        try:
            return train_step(*args, **kwargs)
        finally:
            clocks[0].finish_iteration()

    return step


def paced(model: list[Any], pace: Path) -> Any:
    """The clock that the plugin would have, on the same layers."""
    import torch
    from megatron.core import mpu

    from malleus_megatron.adapter.layers import layers_of
    from malleus_megatron.plan.injection import read_injection
    from malleus_megatron.plan.pace import read_pace
    from malleus_megatron.runtime.layer_clock import LayerClock
    from malleus_megatron.runtime.patching import Installed
    from malleus_megatron.runtime.waits import wait_rows

    clock = LayerClock(
        gpu=int(os.environ["RANK"]),
        device=torch.device("cpu"),
        pace=read_pace(pace),
        injection=None if INJECTION is None else read_injection(Path(INJECTION)),
    )
    clock.attach(layers_of(model), tp_degree=mpu.get_tensor_model_parallel_world_size())
    Installed(wait_rows(clock))
    return clock


def main() -> None:
    from megatron.training import training

    # Before the plugin: its boundary comes between one beginning and the next.
    training.train_step = timed(training.train_step)
    try:
        pretrain_gpt.main()
    finally:
        if os.environ["RANK"] == "0":
            Path(os.environ["STEP_TIMES"]).write_text(json.dumps(begun), encoding="utf-8")


if __name__ == "__main__":
    main()
