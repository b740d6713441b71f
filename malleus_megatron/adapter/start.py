"""The start of both entry points: our flags, the device, CPU mode, and errors as one message."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from malleus_megatron.adapter.wheel import allow_missing_makefile
from malleus_megatron.config import MalleusConfig, own_flags, split_flags
from malleus_megatron.errors import BadInputError, MalleusError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What was decided before Megatron runs."""

    config: MalleusConfig
    on_cpu: bool


@contextlib.contextmanager
def one_message(*, every_rank: bool = False) -> Iterator[None]:
    """Turn an error that the user can mend into one message and its exit status.

    Args:
        every_rank: Before training all ranks meet the same error and rank 0 speaks; later any
            rank may be the only one that knows.
    """
    try:
        yield
    except MalleusError as error:
        alone = every_rank and not error.on_all_ranks
        if alone or _rank() == 0:
            whose = f"rank {_rank()}: " if alone else ""
            sys.stderr.write(f"malleus: {whose}{error}\n")
            sys.stderr.flush()
        raise SystemExit(error.exit_code) from None


def prepare() -> Start:
    """Read sys.argv, choose the device and put in place what the choice asks for.

    Afterwards sys.argv holds what Megatron's parser is to read: without `--malleus` none of our
    flags, in CPU mode the recipe's flags as a CPU can run them.

    Raises:
        MalleusError: a wrong flag, a device that is not there, a recipe that a CPU cannot run.
    """
    _quiet_other_ranks()
    config, rest = split_flags(sys.argv[1:])
    on_cpu = _choose_cpu(config.device)
    ours = own_flags(config) if config.enabled else []
    if on_cpu:
        from malleus_megatron.adapter import cpu_mode

        why = "no GPU found" if config.device == "auto" else "as asked"
        rest = cpu_mode.enter(rest, why=why)
    sys.argv[1:] = [*rest, *ours]
    allow_missing_makefile(os.environ)
    return Start(config=config, on_cpu=on_cpu)


def install(start: Start) -> None:
    """Put in place what wraps Megatron: the plugin with `--malleus`, the recorder last."""
    from malleus_megatron.runtime.patching import Installed

    if asks_for_help():
        from malleus_megatron.adapter.help_text import HELP_ROW

        Installed([HELP_ROW])
        return
    if start.config.enabled:
        from malleus_megatron.adapter.install import install as install_plugin

        install_plugin(start.config)
    if start.config.record is not None:
        from malleus_megatron.adapter.record import recorder_row

        Installed([recorder_row(start.config.record)])


def asks_for_help() -> bool:
    """True if the program is only to list its flags."""
    return bool({"-h", "--help"} & set(sys.argv[1:]))


def _choose_cpu(device: str) -> bool:
    """Whether to train on the CPU.

    Raises:
        BadInputError: `--malleus-device cuda` where torch sees no GPU.
    """
    if device == "cpu":
        return True
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise BadInputError(
            "--malleus-device cuda, but torch sees no GPU here. Leave the flag out to train on "
            "the CPU, or check the driver with nvidia-smi."
        )
    return not available


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _quiet_other_ranks() -> None:
    """Every rank would print the same warnings; rank 0's are enough."""
    if _rank() != 0:
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
