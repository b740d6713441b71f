"""events.jsonl: one JSON object a line, in the order in which things happened."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """Appends events to a file; without a folder it keeps nothing. Each line is flushed."""

    def __init__(self, folder: Path | None) -> None:
        """Open `folder`/events.jsonl for appending, making the folder."""
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "events.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, iteration: int, **values: Any) -> None:
        """Write one event. Numbers that JSON has no word for (NaN, inf) become text."""
        if self._file is None:
            return
        line = {"event": event, "iteration": iteration} | values
        text = json.dumps(_plain(line), sort_keys=True, allow_nan=False)
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
