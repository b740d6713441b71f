"""CPU mode: what Megatron does only for GPUs, replaced; see also runtime.cpu_device."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from malleus_megatron.adapter.gpu_flags import for_cpu
from malleus_megatron.runtime import cpu_device
from malleus_megatron.runtime.patching import Installed, Replacement

_TRAINING = "megatron.training"
_RANDOM = "megatron.core.tensor_parallel.random"


def _initialize_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **options | {"allow_no_cuda": True})

    return initialize


def _set_rng_state(_: Any) -> Callable[..., None]:
    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_state


def _fork(_: Any) -> Callable[..., Any]:
    """The tracker's fork, without its check that the CPU's stream stays untouched."""

    @contextlib.contextmanager
    def fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"The random state {name!r} was never added.")
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        if outer_name != "default-rng":
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(self.states_.get(outer_name, outer_state))
            self._current_state_name = outer_name

    return fork


def _torch_norm(original: Any) -> Callable[..., torch.nn.Module]:
    """torch's norm; under sequence parallelism its parameters are marked for the SP all-reduce."""

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config=config, hidden_size=hidden_size, eps=eps)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = parallel
        return norm

    return new


ROWS: tuple[Replacement, ...] = (
    *(
        Replacement(
            target=f"{module}.initialize_megatron",
            make=_initialize_megatron,
            reason="it refuses to start without CUDA",
        )
        for module in (_TRAINING, f"{_TRAINING}.initialize", f"{_TRAINING}.training")
    ),
    *(
        Replacement(
            target=f"{module}.set_jit_fusion_options",
            make=lambda _: lambda tp_size=None: None,
            reason="there is nothing to warm up, and the warm-up draws random numbers before the "
            "weights, as many as the TP degree makes it",
            signature="(tp_size=)",
        )
        for module in (f"{_TRAINING}.initialize", f"{_TRAINING}.training")
    ),
    Replacement(
        target="megatron.core.datasets.utils.compile_helpers",
        make=lambda _: lambda: None,
        reason="the wheel ships the helpers compiled; make would write into site-packages",
        signature="()",
    ),
    Replacement(
        target=f"{_RANDOM}._set_cuda_rng_state",
        make=_set_rng_state,
        reason="the CUDA random stream is the CPU's",
        signature="(new_state, device=, graph_safe=)",
    ),
    Replacement(
        target=f"{_RANDOM}.CudaRNGStatesTracker.fork",
        make=_fork,
        reason="the stock fork warns when the CPU's random stream moves, which here it must",
        signature="(self, name=)",
    ),
    Replacement(
        target="megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",
        make=_torch_norm,
        reason="torch's norm lacks the mark that sequence parallelism needs",
    ),
)


def cpu_rows() -> tuple[Replacement, ...]:
    """Every attribute that CPU mode replaces, torch's before Megatron's."""
    return cpu_device.ROWS + ROWS


def enter(arguments: Sequence[str]) -> list[str]:
    """Turn CPU mode on and say so in one line.

    Args:
        arguments: The recipe's command line, without our flags.

    Returns:
        The command line for Megatron's parser.

    Raises:
        BadInputError: flags that a CPU cannot serve; nothing has been replaced then.
    """
    command_line = for_cpu(arguments)
    _set_defaults()
    Installed(cpu_device.ROWS)
    Installed(ROWS)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            "CPU mode: no GPU found; gloo, one process a GPU; replaced: "
            f"{', '.join(command_line.replaced)}\n"
        )
    return list(command_line.arguments)


def _set_defaults() -> None:
    """Environment that the launcher left open; threads beyond the cores only fight for them."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "OMP_NUM_THREADS" not in os.environ:
        processes = cpu_device.local_world_size()
        if processes > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // processes)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)
