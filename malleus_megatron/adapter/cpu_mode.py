"""CPU mode, switched on: the environment, the rows, and the one line that says so.

What it replaces stands in runtime.cpu_device (torch), adapter.cpu_rows and adapter.torch_adam
(Megatron); how it reads a GPU recipe, in adapter.gpu_flags.
"""

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence

import torch

from malleus_megatron.adapter import cpu_rows as megatron_rows
from malleus_megatron.adapter import torch_adam
from malleus_megatron.adapter.gpu_flags import for_cpu
from malleus_megatron.runtime import cpu_device
from malleus_megatron.runtime.patching import Installed, Replacement

HIDDEN_PACKAGES = ("transformer_engine", "apex", "flash_attn", "grouped_gemm", "deep_ep")
"""In CPU mode an import of these fails as if they were not installed."""


def cpu_rows() -> tuple[Replacement, ...]:
    """Every attribute that CPU mode replaces, torch's before Megatron's."""
    return cpu_device.ROWS + megatron_rows.ROWS + torch_adam.ROWS


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
    Installed(megatron_rows.ROWS + torch_adam.ROWS)
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
