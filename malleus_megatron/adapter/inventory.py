"""All rows that this package may put in place, and whether they fit the installed Megatron."""

import torch

from malleus_megatron.adapter.cpu_mode import cpu_rows
from malleus_megatron.adapter.install import check_version
from malleus_megatron.adapter.patched_tree import PATCH_SET, is_patched_for
from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.seams import seam_rows
from malleus_megatron.config import MalleusConfig
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.patching import Replacement, mismatch
from malleus_megatron.runtime.waits import wait_rows


def inventory() -> list[tuple[str, Replacement, str | None]]:
    """Rows with their kind ("seam", "cpu") and what keeps them from fitting, if anything.

    Raises:
        UnsupportedMegatronError: a megatron-core whose version the table does not know.
    """
    check_version()
    rows = [("seam", row) for row in seam_rows(Plugin(MalleusConfig(trace=1)))]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows += [("seam", row) for row in wait_rows(LayerClock(gpu=0, device=device))]
    if device.type == "cpu":
        rows += [("cpu", row) for row in cpu_rows()]
    return [(kind, row, mismatch(row)) for kind, row in rows]


def source_patches() -> str:
    """What the doctor says of the sources of this Megatron.

    Raises:
        UnsupportedMegatronError: patched by another version of the patches, or in part.
    """
    if is_patched_for(seam_rows(Plugin(MalleusConfig()))):
        return f"patch set {PATCH_SET}: the seams below are theirs"
    return "as released: the seams below are replaced at run time"
