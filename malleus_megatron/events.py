"""events.jsonl: one JSON object a line, in the order in which things happened."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from malleus_megatron.errors import BadInputError


class EventLog:
    """Appends events to a file; without a folder it keeps nothing. Each line is flushed.

    A disk that fills up must not end a training job: after the first failed write nothing more is
    written, and `failure` says why.
    """

    def __init__(self, folder: Path | None) -> None:
        """Open `folder`/events.jsonl for appending, making the folder.

        Raises:
            BadInputError: the folder cannot be made or written to.
        """
        self.failure: str | None = None
        self.follower: Callable[[dict[str, Any]], None] | None = None
        """Hears every event as it is written, without a folder too."""
        self._folder = folder
        self._file: TextIO | None = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / "events.jsonl").open("a", encoding="utf-8")
            except OSError as error:
                raise BadInputError(f"Cannot write events to {folder}: {error}.") from error

    def write(self, event: str, iteration: int, **values: Any) -> None:
        """Write one event. Numbers that JSON has no word for (NaN, inf) become text."""
        line = _plain({"event": event, "iteration": iteration} | values)
        if self.follower is not None:
            self.follower(line)
        if self._file is None:
            return
        text = json_line(line)
        with self._until_it_fails():
            self._file.write(text)
            self._file.flush()

    def keep(self, name: str, text: str) -> None:
        """Write a file of its own beside the events; `name` may have a folder in it."""
        if self._file is None or self._folder is None:
            return
        path = self._folder / name
        with self._until_it_fails():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            with self._until_it_fails():
                self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = f"Events are no longer written to {self._folder}: {error}."
            self._file = None


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
