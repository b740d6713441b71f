"""The traces of a job of ours: a folder for each generation, a file for each traced iteration.

A file is whole or it is not there, so a job may be killed at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import canonical_json, plan_to_json
from malleus_megatron.plan.plan import Plan
from malleus_megatron.whatif.joining import Joined

PLAN, JOB, OBSERVATION = "plan", "job", "observation"
"""Documents in a file's metadata: the plan in force, the job, and what its GPUs measured."""
_KEY = "malleus."
_GENERATION, _ITERATION = "generation-", "iteration-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """All that is known of one iteration."""

    iteration: int
    generation: int
    plan: Plan
    operations: Sequence[Joined]
    documents: Mapping[str, bytes]
    """Beside the plan: JSON by its name."""


def write_step(folder: Path, step: StepFile) -> Path:
    """Write an iteration's file.

    Raises:
        OSError: the file cannot be written; there is none then.
    """
    target = folder / f"{_GENERATION}{step.generation}"
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{_ITERATION}{step.iteration:08d}.parquet"
    unfinished = path.with_suffix(".unfinished")
    try:
        parquet.write_table(_table(step), unfinished, write_page_checksum=True)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _table(step: StepFile) -> pyarrow.Table:
    rows = step.operations
    columns: dict[str, Any] = {
        "dp_rank": pyarrow.array([row.dp_rank for row in rows], pyarrow.int32()),
        "stage": pyarrow.array([row.stage for row in rows], pyarrow.int32()),
        "step": pyarrow.array([step.iteration] * len(rows), pyarrow.int64()),
        "optype": pyarrow.array([row.kind for row in rows], pyarrow.string()),
        "seq_id": pyarrow.array([row.number for row in rows], pyarrow.int32()),
        "start_ts": pyarrow.array([row.start_s for row in rows], pyarrow.float64()),
        "duration": pyarrow.array([row.end_s - row.start_s for row in rows], pyarrow.float64()),
        "generation": pyarrow.array([step.generation] * len(rows), pyarrow.int32()),
    }
    documents = {PLAN: canonical_json(plan_to_json(step.plan)).encode(), **step.documents}
    named = {f"{_KEY}{name}": text for name, text in documents.items()}
    return pyarrow.table(columns).replace_schema_metadata(named)


def read_documents(file: Path) -> dict[str, bytes]:
    """What a trace file of ours says beside its operations; nothing in a foreign one.

    Raises:
        BadInputError: the file cannot be read.
    """
    try:
        metadata = parquet.read_schema(file).metadata or {}
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{file} is no parquet file, or damaged: {error}.") from error
    return {
        key.decode().removeprefix(_KEY): bytes(text)
        for key, text in metadata.items()
        if key.startswith(_KEY.encode())
    }


def trace_files(path: Path) -> tuple[Path, ...]:
    """The files of a trace: one, or those of the generation of a folder that has the most.

    A step of another plan runs other operations, so each generation is looked at by itself.

    Args:
        path: A file, the folder of a generation, or the folder of all of them.

    Raises:
        BadInputError: a folder without traces, or one that may not be read.
    """
    if not path.is_dir():
        return (path,)
    below = sorted(_inside(path, f"{_GENERATION}*"), key=_generation)
    found = [sorted(_inside(folder, "*.parquet")) for folder in (path, *below)]
    most = max(reversed(found), key=len)
    if not most:
        raise BadInputError(
            f"{path} holds no trace: no *.parquet in it or in a folder {_GENERATION}N."
        )
    return tuple(most)


def other_generations(path: Path, chosen: Sequence[Path]) -> list[str]:
    """Names of the folders beside the chosen one that hold traces, too."""
    if not path.is_dir() or chosen[0].parent == path:
        return []
    there = {file.parent.name for file in path.glob(f"{_GENERATION}*/*.parquet")}
    return sorted(there - {chosen[0].parent.name}, key=lambda name: _generation(Path(name)))


def _inside(folder: Path, pattern: str) -> list[Path]:
    """What matches in a folder: `Path.glob` finds nothing in one that it may not read.

    Raises:
        BadInputError: the folder may not be read.
    """
    try:
        return [path for path in folder.iterdir() if path.match(pattern)]
    except NotADirectoryError:
        return []
    except OSError as error:
        raise BadInputError(f"{folder}: {error.strerror or error}.") from error


def _generation(folder: Path) -> int:
    number = folder.name.removeprefix(_GENERATION)
    return int(number) if number.isdecimal() else -1
