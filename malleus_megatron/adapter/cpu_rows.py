"""What Megatron does only for GPUs, and what stands in its place in CPU mode."""

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import stat
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from malleus_megatron.adapter import cpu_norm
from malleus_megatron.runtime.patching import Replacement

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


def _compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def _async_calls_queue(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, persistent: bool = False) -> None:
        original(self, persistent=False)

    return init


def _write_results_queue(_: Any) -> Callable[..., Any]:
    """The queue by which a checkpoint's writers answer, held by a fork of this process."""

    @functools.cache
    def get_queue(mp_mode: str = "fork") -> Any:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=close_sockets)
        return manager.Queue()

    return get_queue


def close_sockets() -> None:
    """Let go of a parent's connections, so that its peers notice when it dies."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if int(entry.name) > 2 and stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                os.close(int(entry.name))


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
        make=_compile_helpers,
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
    Replacement(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async."
        "get_write_results_queue",
        make=_write_results_queue,
        reason="the stock queue lives in a fresh process, which imports torch for seconds; a fork "
        "has it already, and there is no CUDA context that a fork would break",
        signature="(mp_mode=)",
    ),
    Replacement(
        target=f"{_TRAINING}.initialize.init_persistent_async_worker",
        make=lambda _: lambda rank, mp_mode="spawn": None,
        reason="the fresh process would look for a GPU",
        signature="(rank, mp_mode=)",
    ),
    Replacement(
        target="megatron.core.dist_checkpointing.strategies.async_utils.AsyncCallsQueue.__init__",
        make=_async_calls_queue,
        reason="the lasting worker shares the CPU's tensors, which training goes on to change; a "
        "fork for each save has them as they were",
        signature="(self, persistent=)",
    ),
)
