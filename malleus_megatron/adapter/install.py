"""Switching the plugin on: explicit, once, and removable."""

from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.seams import MEGATRON_VERSIONS, seam_rows
from malleus_megatron.config import MalleusConfig
from malleus_megatron.errors import UnsupportedMegatronError
from malleus_megatron.runtime.patching import Installed

_installed: Installed | None = None


def install(config: MalleusConfig) -> Installed:
    """Put the seams in place; a second call gives the first one's handle.

    Raises:
        UnsupportedMegatronError: another Megatron than the seams were made for; both signatures
            are shown and nothing has been replaced.
    """
    global _installed
    if _installed is None:
        check_version()
        _installed = Installed(seam_rows(Plugin(config)))
    return _installed


def uninstall() -> None:
    """Put every original back."""
    global _installed
    if _installed is not None:
        _installed.uninstall()
        _installed = None


def check_version() -> None:
    """Refuse a megatron-core whose minor version the table does not know."""
    from megatron.core.package_info import __version__

    if not any(__version__ == known or __version__.startswith(f"{known}.") for known in MEGATRON_VERSIONS):
        raise UnsupportedMegatronError(
            f"megatron-core {__version__} is installed; the seams are made for "
            f"{', '.join(f'{known}.x' for known in MEGATRON_VERSIONS)}."
        )
