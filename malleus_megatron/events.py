"""events.jsonl: one JSON object a line, in the order in which things happened."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from malleus_megatron.errors import BadInputError

_PAUSE = 100
"""Iterations after which a log that could not be written is tried again."""


@dataclass(slots=True, kw_only=True)
class _Outage:
    """A time in which no line could be written."""

    since: int
    last: int = 0
    """The iteration of the last one that is missing."""
    again_in: int = 0
    """The iteration in which the next line is tried."""
    lines: int = 0
    """Those that are missing."""


class EventLog:
    """Appends events to a file; without a folder it keeps nothing. Each line is there at once.

    A disk that fills up or a server that is away must not end a training job, nor its log: after
    a failed write nothing is written for a while, then the file is opened anew. `failure` says
    why, `news` that it goes on; an event `missing` stands where lines are missing. A file that is
    moved away or removed is noticed after a while, and another one takes its place.
    """

    def __init__(self, folder: Path | None) -> None:
        """Open `folder`/events.jsonl for appending, making the folder.

        Raises:
            BadInputError: the folder cannot be made or written to.
        """
        self.failure: str | None = None
        self.news: str | None = None
        self.follower: Callable[[dict[str, Any]], None] | None = None
        """Hears every event as it is written, without a folder too."""
        self._folder = folder
        self._file: FileIO | None = None
        self._outage: _Outage | None = None
        self._unkept: tuple[str, str] | None = None
        """The last file of its own that came in an outage."""
        self._keeps = True
        self._looked_in = 0
        """The iteration in which the file was seen to be in its place."""
        if folder is not None:
            try:
                self._open(folder)
            except OSError as error:
                raise BadInputError(f"Cannot write events to {folder}: {error}.") from error

    def write(self, event: str, iteration: int, **values: Any) -> None:
        """Write one event. Numbers that JSON has no word for (NaN, inf) become text."""
        line = _plain({"event": event, "iteration": iteration} | values)
        if self.follower is not None:
            self.follower(line)
        if self._folder is None:
            return
        text = json_line(line)
        outage = self._outage
        if outage is not None and iteration < outage.again_in:
            outage.lines, outage.last = outage.lines + 1, iteration
            return
        try:
            if abs(iteration - self._looked_in) >= _PAUSE:
                self._looked_in = iteration
                self._look(self._folder)
            if self._file is None:
                self._open(self._folder)
            self._append(text if outage is None else _missing(outage, iteration) + text)
        except OSError as error:
            self._fail(self._folder, error, iteration)
            return
        if outage is not None:
            self._go_on(self._folder, outage)

    def keep(self, name: str, text: str) -> None:
        """Write a file of its own beside the events; `name` may have a folder in it."""
        if self._folder is None:
            return
        if self._outage is not None:
            self._unkept = (name, text)
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            if self._keeps:
                self.failure = f"Plans are no longer kept in {path.parent}: {error}."
            self._keeps = False
        else:
            self._keeps = True

    def close(self) -> None:
        """Close the file; later events are dropped. What is missing at the end is said there."""
        if self._folder is not None and self._outage is not None:
            with contextlib.suppress(OSError):  # it was told
                self._open(self._folder)
                self._append(_missing(self._outage, self._outage.last))
        self._shut()
        self._folder = None

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "events.jsonl"
        self._file = FileIO(path, "ab")  # without a buffer, whose rest would be written later
        if not _ends_whole(path):
            self._append("\n")

    def _look(self, folder: Path) -> None:
        """Let go of a file that is no longer where the log is looked for."""
        if self._file is None:
            return
        path = folder / "events.jsonl"
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
            self._shut()
            self.news = f"{path} was moved or removed: events go into a new one"

    def _append(self, text: str) -> None:
        assert self._file is not None
        left = memoryview(text.encode())
        while left:
            written = self._file.write(left)
            if not written:
                raise OSError("nothing could be written")
            left = left[written:]

    def _fail(self, folder: Path, error: OSError, iteration: int) -> None:
        self._shut()
        if self._outage is None:
            self._outage = _Outage(since=iteration)
            self.failure = (
                f"Events are no longer written to {folder}: {error}. They are tried again every "
                f"{_PAUSE} iterations."
            )
        self._outage.lines += 1
        self._outage.last = iteration
        self._outage.again_in = iteration + _PAUSE

    def _go_on(self, folder: Path, outage: _Outage) -> None:
        self._outage = None
        self.news = (
            f"events are written to {folder} again; {outage.lines} lines from iteration "
            f"{outage.since} on are missing"
        )
        unkept, self._unkept = self._unkept, None
        if unkept is not None:
            self.keep(*unkept)

    def _shut(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _missing(outage: _Outage, iteration: int) -> str:
    return json_line(
        {
            "event": "missing",
            "iteration": iteration,
            "since": outage.since,
            "lines": outage.lines,
        }
    )


def _ends_whole(path: Path) -> bool:
    """Whether the next line would begin a line: a write may have failed in the middle of one."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # a device has none either
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def json_line(values: Mapping[str, Any]) -> str:
    """One line of JSON with its end; numbers that JSON has no word for (NaN, inf) become text."""
    return json.dumps(_plain(values), sort_keys=True, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
