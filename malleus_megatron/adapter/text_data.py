"""Text files of a folder as a Megatron dataset: one document a file, one token a byte.

Megatron's NullTokenizer names a vocabulary without any file behind it: token ids are the byte
values, and the last id of the vocabulary ends a document. Megatron and torch are imported only
when the input has been found good, for that import takes seconds.
"""

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from malleus_megatron.errors import BadInputError

END_OF_DOCUMENT = 256
VOCAB_SIZE = END_OF_DOCUMENT + 1

_TOKEN_DTYPE = np.uint16  # what Megatron expects for a vocabulary of this size
_PROBE_BYTES = 8192
_LONGEST_BYTES = np.iinfo(np.int32).max - 1  # lengths are int32 in Megatron's index
_SPLITS = ("90,5,5", "100,0,0")
_SHARES = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFile:
    """A file or folder that should have been in the dataset and is not."""

    path: str
    """Below the folder, with forward slashes."""
    reason: str
    """empty, binary, too long, not a regular file, or unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What was written to `<prefix>.bin` and `<prefix>.idx`."""

    prefix: Path
    num_files: int
    num_bytes: int
    num_tokens: int
    vocab_size: int
    end_of_document: int
    dtype: str
    skipped: tuple[SkippedFile, ...]
    num_beyond_limit: int
    """Files that were left out because the limit on bytes was reached."""

    def __str__(self) -> str:
        """One line for a person."""
        line = (
            f"{self.num_files} files, {self.num_bytes} bytes: {self.num_tokens} tokens "
            f"of a vocabulary of {self.vocab_size}; skipped: {_counts(self.skipped) or 'none'}"
        )
        beyond = f"; beyond the limit: {self.num_beyond_limit}" if self.num_beyond_limit else ""
        return line + beyond

    def megatron_flags(self, split: str | None = None) -> tuple[str, ...]:
        """The flags that train on this dataset.

        Args:
            split: shares of training, validation and test, as Megatron's `--split`;
                None: 90,5,5 if every part then gets a document, else all for training.

        Raises:
            BadInputError: not three shares, or a part that is wanted gets no document.
        """
        fitting = next(shares for shares in _SPLITS if not _empty_parts(shares, self.num_files))
        if split is not None and (empty := _empty_parts(split, self.num_files)):
            raise BadInputError(
                f"--split {split} of {self.num_files} documents leaves none for "
                f"{' and '.join(empty)}, where Megatron would wait forever; the dataset "
                f"{self.prefix} itself is good: train with other shares, such as {fitting}."
            )
        return (
            *("--data-path", str(self.prefix)),
            *("--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", str(self.vocab_size)),
            *("--split", split or fitting),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"prefix": str(self.prefix)}


def prepare_text_data(
    folder: Path,
    out: Path,
    *,
    patterns: Sequence[str] = ("*",),
    limit_bytes: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> DataSummary:
    """Write the text files of a folder, at any depth, to `<out>.bin` and `<out>.idx`.

    Files come in the order of their paths, so equal folders give equal bytes. Bytes are taken as
    they are, in whatever encoding; a file with a NUL byte is binary and skipped. As in a shell,
    names that start with a dot are not looked at, and links to folders are not followed.

    Args:
        folder: where the text is.
        out: the path without `.bin` and `.idx`; its folder is made if need be.
        patterns: shell patterns, one of which must match the end of a path below the folder.
        limit_bytes: stop before the file that would take the text beyond this size.
        overwrite: replace an older dataset, and what Megatron has cached about it in `<out>/cache`.
        progress: show a bar on stderr.

    Raises:
        BadInputError: nothing to write, `out` exists or cannot be written.
    """
    try:
        _check_out(out, overwrite=overwrite)
        documents = _Documents(folder, patterns, limit_bytes)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
            written = Path(temporary, out.name)
            lengths = _write(documents.read(progress=progress), written)
            if not lengths:
                raise BadInputError(documents.why_nothing())
            _publish(written, out)
    except OSError as error:
        raise BadInputError(
            f"{out} cannot be written: {error.filename or out}: {error.strerror or error}."
        ) from error
    return DataSummary(
        prefix=out,
        num_files=len(lengths),
        num_bytes=sum(lengths) - len(lengths),
        num_tokens=sum(lengths),
        vocab_size=VOCAB_SIZE,
        end_of_document=END_OF_DOCUMENT,
        dtype=np.dtype(_TOKEN_DTYPE).name,
        skipped=tuple(documents.skipped),
        num_beyond_limit=documents.num_beyond_limit,
    )


class _SkipError(Exception):
    """This file is not text that a dataset can hold; the message is the reason."""


class _Documents:
    """The contents of the matching files, in order; once read, also what was left out."""

    def __init__(self, folder: Path, patterns: Sequence[str], limit_bytes: int | None) -> None:
        if not folder.is_dir():
            raise BadInputError(f"{folder} is not a folder.")
        if not patterns or not all(patterns):
            raise BadInputError("A pattern is empty; give one such as '*.py'.")
        if limit_bytes is not None and limit_bytes < 1:
            raise BadInputError(f"The limit is {limit_bytes} bytes; it must be at least 1.")
        self.skipped: list[SkippedFile] = []
        self.num_beyond_limit = 0
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._paths = self._find(patterns)
        if not self._paths:
            why = f" (skipped: {_counts(self.skipped)})" if self.skipped else ""
            raise BadInputError(f"{folder}: no file matches {' or '.join(patterns)}{why}.")

    def read(self, *, progress: bool) -> Iterator[bytes]:
        """Yield the content of each file that is text, up to the limit."""
        left_bytes = self._limit_bytes
        total = len(self._paths) if left_bytes is None else None
        with tqdm(total=total, unit="file", disable=not progress) as bar:
            for index, path in enumerate(self._paths):
                bar.update()
                try:
                    content = _read_text(path)
                except (OSError, _SkipError) as reason:
                    self._skip(path, reason)
                    continue
                if left_bytes is not None:
                    left_bytes -= len(content)
                    if left_bytes < 0:
                        self.num_beyond_limit = len(self._paths) - index
                        return
                yield content

    def why_nothing(self) -> str:
        """One sentence on why `read` gave nothing."""
        if self.num_beyond_limit:
            return (
                f"The first file of {self._folder} is larger than the limit of "
                f"{self._limit_bytes} bytes; raise the limit."
            )
        return f"{self._folder}: no file to take; skipped: {_counts(self.skipped)}."

    def _find(self, patterns: Sequence[str]) -> list[Path]:
        found: list[Path] = []
        for where, folders, names in self._folder.walk(on_error=self._skip_folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below = where.relative_to(self._folder)
            found.extend(
                where / name
                for name in names
                if not name.startswith(".") and any(map((below / name).match, patterns))
            )
        return sorted(found, key=Path.as_posix)

    def _skip_folder(self, error: OSError) -> None:
        self._skip(Path(error.filename), error)

    def _skip(self, path: Path, reason: Exception) -> None:
        words = "unreadable" if isinstance(reason, OSError) else str(reason)
        below = path.relative_to(self._folder).as_posix()
        self.skipped.append(SkippedFile(path=below, reason=words))


def _read_text(path: Path) -> bytes:
    if not path.is_file():  # opening a pipe would wait for its writer
        raise _SkipError("not a regular file")
    with path.open("rb") as file:
        head = file.read(_PROBE_BYTES)
        if b"\0" in head:
            raise _SkipError("binary")
        if os.fstat(file.fileno()).st_size > _LONGEST_BYTES:
            raise _SkipError("too long")
        content = head + file.read()
    if not content:
        raise _SkipError("empty")
    if b"\0" in content:
        raise _SkipError("binary")
    return content


def _write(documents: Iterable[bytes], prefix: Path) -> list[int]:
    """Write the two files, and return each document's number of tokens."""
    import torch
    from megatron.core.datasets import indexed_dataset

    builder = indexed_dataset.IndexedDatasetBuilder(
        indexed_dataset.get_bin_path(str(prefix)), dtype=_TOKEN_DTYPE
    )
    for content in documents:
        tokens = np.empty(len(content) + 1, dtype=_TOKEN_DTYPE)
        tokens[:-1] = np.frombuffer(content, dtype=np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(indexed_dataset.get_idx_path(str(prefix)))
    return list(builder.sequence_lengths)


def _publish(written: Path, out: Path) -> None:
    """Move the two files to their place so that a half-replaced dataset never looks whole.

    Megatron finds its cached sample order by the prefix, whatever the files hold: an older
    dataset's order would be used for the new one.
    """
    _with_suffix(out, ".idx").unlink(missing_ok=True)
    for cached in (out / "cache").glob("*_indices"):
        shutil.rmtree(cached)
    for suffix in (".bin", ".idx"):
        _with_suffix(written, suffix).replace(_with_suffix(out, suffix))


def _check_out(out: Path, *, overwrite: bool) -> None:
    if not out.name or out.suffix in {".bin", ".idx"}:
        raise BadInputError(f"{out}: give the path of the two files without .bin and .idx.")
    for file in (_with_suffix(out, ".bin"), _with_suffix(out, ".idx")):
        if file.exists() and not overwrite:
            raise BadInputError(f"{file} exists; choose another name or allow to overwrite it.")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def check_split(split: str) -> None:
    """Refuse shares that are not three numbers, one of them above 0."""
    if not _SHARES.fullmatch(split) or not any(map(float, split.split(","))):
        raise BadInputError(f"--split {split}: give three shares, not all 0, such as 90,5,5.")


def _empty_parts(split: str, num_documents: int) -> list[str]:
    """Names of the parts that `split` wants and that get no document, by Megatron's rounding."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    check_split(split)
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return [
        part
        for part, pair in zip(("training", "validation", "test"), bounds, strict=True)
        if pair is not None and round(pair[0] * num_documents) == round(pair[1] * num_documents)
    ]


def _counts(skipped: Iterable[SkippedFile]) -> str:
    counts = Counter(file.reason for file in skipped)
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
