"""Switching the plugin on: explicit, once, and removable."""

from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.seams import MEGATRON_VERSIONS, seam_rows
from malleus_megatron.config import MalleusConfig
from malleus_megatron.errors import UnsupportedMegatronError
from malleus_megatron.runtime.patching import Installed

_HANDLE = "__malleus_installed__"
"""Where the handle of the seams in place is kept: on Megatron's replaced train_step."""


def install(config: MalleusConfig) -> Installed:
    """Put the seams in place; a second call gives the first one's handle.

    Raises:
        UnsupportedMegatronError: another Megatron than the seams were made for; both signatures
            are shown and nothing has been replaced.
    """
    check_version()
    from megatron.training import training

    handle = getattr(training.train_step, _HANDLE, None)
    if not isinstance(handle, Installed):
        handle = Installed(seam_rows(Plugin(config)))
        setattr(training.train_step, _HANDLE, handle)
    return handle


def check_version() -> None:
    """Refuse a megatron-core whose minor version the table does not know."""
    from megatron.core.package_info import __version__

    if not any(
        __version__ == known or __version__.startswith(f"{known}.") for known in MEGATRON_VERSIONS
    ):
        raise UnsupportedMegatronError(
            f"megatron-core {__version__} is installed; the seams are made for "
            f"{', '.join(f'{known}.x' for known in MEGATRON_VERSIONS)}."
        )
