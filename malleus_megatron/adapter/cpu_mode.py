"""CPU mode: what Megatron does only for GPUs, replaced; see also runtime.cpu_device."""

import contextlib
import functools
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from malleus_megatron.adapter import cpu_norm, torch_adam
from malleus_megatron.adapter.gpu_flags import for_cpu
from malleus_megatron.runtime import cpu_device
from malleus_megatron.runtime.patching import Installed, Replacement

HIDDEN_PACKAGES = ("transformer_engine", "apex", "flash_attn", "grouped_gemm", "deep_ep")
"""In CPU mode an import of these fails as if they were not installed."""

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


def _attention(original: Callable[..., None]) -> Callable[..., None]:
    """The local attention, for values that are wider or narrower than keys."""

    @functools.wraps(original)
    def init(
        self: Any, *arguments: Any, k_channels: Any = None, v_channels: Any = None, **options: Any
    ) -> None:
        original(self, *arguments, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init


def _to_host(_: Any) -> Callable[..., Any]:
    """Tensors are on the host already; only the form that `all_to_all` wants is left to make."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return to_host


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
        make=cpu_norm.make_norm,
        reason="the stock wrapper of torch's norms knows no sequence parallelism and no 1p weights",
        signature="(cls, config, hidden_size, eps=, persist_layer_norm=, zero_centered_gamma=, "
        "normalization=)",
    ),
    Replacement(
        target="megatron.core.transformer.dot_product_attention.DotProductAttention.__init__",
        make=_attention,
        reason="multi-latent attention gives its widths, which only TE's attention takes",
        signature="(self, config, layer_number, attn_mask_type, attention_type, "
        "attention_dropout=, softmax_scale=, cp_comm_type=, pg_collection=)",
    ),
    Replacement(
        target="megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        make=_to_host,
        reason="the all-to-all dispatcher's split sizes get their form only on the way from a GPU",
        signature="(tensor, as_numpy=, record_stream=)",
    ),
)


def cpu_rows() -> tuple[Replacement, ...]:
    """Every attribute that CPU mode replaces, torch's before Megatron's."""
    return cpu_device.ROWS + ROWS + torch_adam.ROWS


def enter(arguments: Sequence[str], *, why: str) -> list[str]:
    """Turn CPU mode on and say so in one line.

    Args:
        arguments: The recipe's command line, without our flags.
        why: What made the choice, for the line.

    Returns:
        The command line for Megatron's parser.

    Raises:
        BadInputError: flags that a CPU cannot serve; nothing has been replaced then.
    """
    command_line = for_cpu(arguments)
    _set_environment()
    _hide_gpu_packages()
    Installed(cpu_device.ROWS)
    Installed(ROWS + torch_adam.ROWS)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"CPU mode: {why}; gloo, one process a GPU; replaced: "
            f"{', '.join(command_line.replaced)}\n"
        )
    return list(command_line.arguments)


def _hide_gpu_packages() -> None:
    """Make Megatron find no kernels for GPUs, where they are installed: it would call them."""
    for name in HIDDEN_PACKAGES:
        if importlib.util.find_spec(name) is not None:
            sys.modules[name] = None  # type: ignore[assignment]


def _set_environment() -> None:
    """Decide what the launcher left open."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    processes = cpu_device.local_world_size()
    if processes == int(os.environ.get("WORLD_SIZE", "1")) and _has_loopback():
        # All ranks are on this machine: gloo need not guess an address from the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ and processes > 1:
        # Threads beyond the cores only fight for them.
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _has_loopback() -> bool:
    return "lo" in {name for _, name in socket.if_nameindex()}
