"""A Megatron whose sources open the seams: made with patches/, recognized and checked here."""

import importlib
import importlib.util
from collections.abc import Sequence

from malleus_megatron.errors import UnsupportedMegatronError
from malleus_megatron.runtime.patching import Replacement, is_open

PATCH_SET = 1
"""Version of patches/ that goes with the table of seams: another table, another version."""

_HOOKS = "megatron.core.malleus_hooks"
_TOOL = "patches/patch_megatron.py"


def is_patched_for(rows: Sequence[Replacement]) -> bool:
    """Whether the sources of this Megatron open all seams; False: they know nothing of us.

    Raises:
        UnsupportedMegatronError: patched by another version of the patches, or in part.
    """
    if importlib.util.find_spec(_HOOKS) is None:
        return False
    found = getattr(importlib.import_module(_HOOKS), "PATCH_SET", "unknown")
    if found != PATCH_SET:
        raise UnsupportedMegatronError(
            f"Megatron's sources have patch set {found}; this plugin goes with patch set "
            f"{PATCH_SET}. Revert with the {_TOOL} that applied it, then apply this version's."
        )
    closed = [row.target for row in rows if not is_open(row.target)]
    if closed:
        raise UnsupportedMegatronError(
            f"Megatron's sources have patch set {found} in part: {len(closed)} of {len(rows)} "
            f"seams are not open: {', '.join(closed)}. See {_TOOL} verify."
        )
    return True
