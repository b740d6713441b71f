"""Switching the plugin on: explicit, once, and removable."""

import os
import sys

from malleus_megatron.adapter.patched_tree import PATCH_SET, is_patched_for
from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.seams import MEGATRON_VERSIONS, seam_rows
from malleus_megatron.config import MalleusConfig
from malleus_megatron.errors import UnsupportedMegatronError
from malleus_megatron.runtime.patching import Installed, place

_HANDLE = "__malleus_installed__"
"""Where the handle of the seams in place is kept: on what replaces train_step."""


def install(config: MalleusConfig) -> Installed:
    """Put the seams in place; a second call gives the first one's handle.

    Raises:
        UnsupportedMegatronError: another Megatron than the seams were made for (both signatures
            are shown), or sources with other patches; nothing has been replaced.
    """
    check_version()
    handle = getattr(_train_step(), _HANDLE, None)
    if not isinstance(handle, Installed):
        rows = seam_rows(Plugin(config))
        patched = is_patched_for(rows)
        handle = Installed(rows)
        setattr(_train_step(), _HANDLE, handle)
        if patched and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                f"malleus: Megatron's sources have patch set {PATCH_SET}: all {len(rows)} seams "
                "are theirs, none is replaced at run time.\n"
            )
    return handle


def _train_step() -> object:
    """What runs as Megatron's train_step."""
    owner, name = place("megatron.training.training.train_step")
    return getattr(owner, name)


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
