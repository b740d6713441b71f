"""Events that wait to be sent: as many as fit, the latest."""

import json
from collections import deque
from typing import Any


class Outbox:
    """Keeps events in their order. Where they become too many the oldest are left out."""

    def __init__(self, most_bytes: int) -> None:
        """Nothing waits yet."""
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def add(self, event: dict[str, Any]) -> None:
        """Take an event of plain JSON values; one that is too large alone is left out."""
        size = len(json.dumps(event))
        if size > self._most_bytes:
            return
        self._waiting.append((size, event))
        self._bytes += size
        while self._bytes > self._most_bytes:
            self._bytes -= self._waiting.popleft()[0]

    def take(self) -> list[dict[str, Any]]:
        """All that wait; nothing waits then."""
        events = [event for _, event in self._waiting]
        self._waiting.clear()
        self._bytes = 0
        return events
