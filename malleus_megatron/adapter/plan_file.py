"""The plan in force beside a checkpoint: what a restarted job goes on with."""

import os
from pathlib import Path

from malleus_megatron.plan.codec import canonical_json, plan_to_json, read_plan
from malleus_megatron.plan.plan import Plan

FILE_NAME = "malleus_plan.json"
_LAST_SAVED = "latest_checkpointed_iteration.txt"
"""Megatron's file beside its checkpoints."""


def keep_plan(plan: Plan | None, folder: Path) -> str | None:
    """Write the plan into a checkpoint's folder, whole or not at all.

    Args:
        plan: None: the nominal one, which needs no file; one of an earlier save goes.
        folder: Of one iteration.

    Returns:
        Why it could not be written; the checkpoint is good without it.
    """
    path = folder / FILE_NAME
    unfinished = folder / f"{FILE_NAME}.unfinished"
    try:
        if plan is None:
            path.unlink(missing_ok=True)
            return None
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(canonical_json(plan_to_json(plan)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def is_last_save(root: Path, iteration: int) -> bool:
    """Whether Megatron's last checkpoint in this folder is of this iteration."""
    path = root / _LAST_SAVED
    return path.exists() and path.read_text(encoding="utf-8").strip() == str(iteration)


def kept_plan(folder: Path) -> Plan | None:
    """The plan in a checkpoint's folder; None where there is none.

    Raises:
        BadInputError: a file that cannot be read as a plan.
    """
    path = folder / FILE_NAME
    return read_plan(path) if path.exists() else None
