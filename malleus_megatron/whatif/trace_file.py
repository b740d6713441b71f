"""Trace files: parquet, one row an operation."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow.parquet import ParquetFile

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.rows import Floats, Ints, Rows
from malleus_megatron.whatif.trace_folder import trace_files

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
CHUNK = "mc"
"""Optional: a trace without it has one model chunk a stage."""


def read_trace(path: Path) -> Rows:
    """Read the columns that the analysis needs; others are let through.

    Args:
        path: A file, or a folder as `trace_files` reads it.

    Raises:
        BadInputError: the file cannot be read, is no parquet file, is damaged, lacks a column or
            has one of another type, or holds no trace of a non-interleaved pipeline.
    """
    tables = [_table(file) for file in trace_files(path)]
    try:
        table = pyarrow.concat_tables(tables, promote_options="permissive")
        kinds, names = _names(table.column("optype"))
        columns = {name: _whole(table, name) for name in ("dp_rank", "stage", "step", "seq_id")}
        return Rows(
            dp_rank=columns["dp_rank"],
            stage=columns["stage"],
            step=columns["step"],
            kind=kinds,
            kinds=names,
            number=columns["seq_id"],
            chunk=_chunks(table, columns["step"]),
            start_s=_seconds(table, "start_ts"),
            duration_s=_seconds(table, "duration"),
        )
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error
    except pyarrow.ArrowException as error:  # a type that no trace has
        raise BadInputError(f"{path} is not a trace: {_first_line(error)}.") from error


def _table(path: Path) -> pyarrow.Table:
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise BadInputError(f"{path} {what}.")
    if path.stat().st_size == 0:
        raise BadInputError(f"{path} is empty.")
    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            there = file.schema_arrow.names
            missing = [name for name in COLUMNS if name not in there]
            if missing:
                raise BadInputError(
                    f"{path} is not a trace: no column {', '.join(missing)}. It has "
                    f"{', '.join(there[:12]) or 'none'}."
                )
            twice = [name for name in (*COLUMNS, CHUNK) if there.count(name) > 1]
            if twice:
                raise BadInputError(
                    f"{path} is not a trace: it has column {', '.join(twice)} twice."
                )
            wanted = [*COLUMNS, *([CHUNK] if CHUNK in there else [])]
            return file.read(columns=wanted)
    except PermissionError as error:
        raise BadInputError(f"{path} may not be read: {error.strerror}.") from error
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} is no parquet file, or damaged: {_first_line(error)}."
        raise BadInputError(what) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def _whole(table: pyarrow.Table, name: str) -> Ints:
    column = table.column(name)
    if column.null_count:
        raise BadInputError(f"column {name} has {column.null_count} empty values.")
    values = column.to_numpy()
    if not np.issubdtype(values.dtype, np.integer):
        raise BadInputError(f"column {name} must hold whole numbers, not {values.dtype}.")
    whole: Ints = values.astype(np.int64)
    return whole


def _seconds(table: pyarrow.Table, name: str) -> Floats:
    """Seconds; an empty value is NaN, and its step is left out later."""
    values = table.column(name).to_numpy()
    if not np.issubdtype(values.dtype, np.floating) and not np.issubdtype(values.dtype, np.integer):
        raise BadInputError(f"column {name} must hold seconds, not {values.dtype}.")
    with np.errstate(invalid="ignore"):  # a damaged NaN stays one
        seconds: Floats = values.astype(np.float64)
    return seconds


def _chunks(table: pyarrow.Table, like: Ints) -> Ints:
    if CHUNK not in table.column_names:
        return np.full(len(like), -1)
    return _whole(table, CHUNK)


def _names(column: Any) -> tuple[Ints, tuple[str, ...]]:
    """Each row's index into the distinct names, and the names."""
    if column.null_count:
        raise BadInputError(f"column optype has {column.null_count} empty values.")
    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise BadInputError(f"column optype must hold text, not {kind}.")
    encoded = column.unify_dictionaries().combine_chunks()
    if not hasattr(encoded, "indices"):
        encoded = encoded.dictionary_encode()
    names = tuple(encoded.dictionary.to_pylist())
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), names
