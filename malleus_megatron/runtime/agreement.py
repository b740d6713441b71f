"""What all ranks agree on, over a channel beside the training, with a time limit on each call.

Every method is a collective over the world: all ranks call it, in the same order. It carries rows
of numbers and short texts, never tensors of the model.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor

from malleus_megatron.errors import MalleusError, MigrationError
from malleus_megatron.runtime.channel import Channel

_log = logging.getLogger(__name__)
_MAX_TEXT_BYTES = 2048


class Agreement:
    """The world's control channel. Its tensors live on the CPU, so no GPU is ever waited for."""

    def __init__(self, timeout: timedelta) -> None:
        """Open the channel; a collective.

        Args:
            timeout: How long a rank waits for the others in any one call.
        """
        self._channel = Channel(timeout)
        self.rank = self._channel.rank
        self.world_size = self._channel.world_size

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Give every rank the rows of all ranks, by rank. Rows have the same length everywhere."""
        return _numbers(self._channel.all_gather(torch.tensor(row, dtype=torch.float64)))

    def consult(
        self, row: Sequence[float], conclude: Callable[[list[list[float]]], Sequence[float]]
    ) -> list[float]:
        """Give rank 0 the rows of all ranks, and all ranks what rank 0 makes of them.

        Args:
            row: This rank's; rows have the same length everywhere.
            conclude: Called on rank 0 with all rows, by rank; must give as many numbers and not
                fail.
        """
        rows = self._channel.gather(torch.tensor(row, dtype=torch.float64))
        said = torch.tensor(row if rows is None else conclude(_numbers(rows)), dtype=torch.float64)
        self._channel.broadcast(said)
        return [float(number) for number in said.tolist()]

    def broadcast(self, payload: bytes, num_bytes: int) -> bytes:
        """Give every rank the bytes of rank 0, whose length all ranks know already."""
        text = torch.zeros(num_bytes, dtype=torch.uint8)
        if self.rank == 0:
            text.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._channel.broadcast(text)
        return text.numpy().tobytes()

    def gather(self, payload: bytes) -> list[bytes]:
        """Give every rank the bytes of all ranks, by rank; they may differ in length."""
        sizes = [int(row[0]) for row in self.exchange([len(payload)])]
        longest = max(1, *sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self._channel.all_gather(mine).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def together[T](self, what: str, step: Callable[[], T]) -> T:
        """Take a step on every rank; if it fails on any, it has failed on all.

        Args:
            what: Names the step in the error, as in "building the stage".
            step: This rank's part. A collective inside of it must not be able to fail alone.

        Raises:
            MigrationError: on every rank, with the first failing rank's reason.
        """
        failure = None
        result: T | None = None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            _log.debug("failed: %s", what, exc_info=True)
            failure = error
        reason = self.first_text(
            None if failure is None else f"{what} failed on rank {self.rank}: {_short(failure)}"
        )
        if reason is not None:
            failed = MigrationError(reason)
            failed.on_all_ranks = True
            raise failed from failure
        return cast("T", result)

    def first_text(self, text: str | None) -> str | None:
        """Give every rank the text of the lowest rank that has one; None if no rank has.

        As long as none has, one number is all that passes.
        """
        source = self._channel.least(self.rank if text else self.world_size)
        if source == self.world_size:
            return None
        encoded = _bytes(text or "")[:_MAX_TEXT_BYTES].ljust(_MAX_TEXT_BYTES, b"\0")
        found = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self._channel.broadcast(found, source)
        return found.numpy().tobytes().rstrip(b"\0").decode(errors="replace")

    def first_difference(self, text: str) -> str | None:
        """On every rank: how a rank's text differs from rank 0's, or None if all are equal."""
        unlike = self.unlike_ranks(text)
        return f"rank {unlike[0]} holds another plan than rank 0" if unlike else None

    def unlike_ranks(self, text: str) -> list[int]:
        """On every rank: those whose text is not rank 0's. Texts are compared by their hash."""
        digest = hashlib.sha256(_bytes(text)).digest()
        rows = self.exchange([float(byte) for byte in digest[:16]])
        return [rank for rank, row in enumerate(rows) if row != rows[0]]

    def raise_together(self, error: MalleusError | None) -> None:
        """Raise on every rank if any rank has an error, so that no rank waits for one that left.

        Raises:
            MalleusError: with the message and exit code of the lowest rank that has an error.
        """
        whose = "" if self.rank == 0 else f"rank {self.rank}: "
        found = self.first_text(None if error is None else f"{error.exit_code}|{whose}{error}")
        if found is not None:
            code, message = found.split("|", 1)
            raised = MalleusError(message)
            raised.exit_code = int(code)
            raised.on_all_ranks = True
            raise raised from error


def _numbers(rows: Tensor) -> list[list[float]]:
    numbers: list[list[float]] = rows.tolist()
    return numbers


def _bytes(text: str) -> bytes:
    """Of any text: a file's name may have bytes that are no characters."""
    return text.encode(errors="backslashreplace")


def _short(error: Exception) -> str:
    """The first line of an error; torch appends pages of native frames."""
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, MalleusError) else f"{type(error).__name__}: {text}"[:400]
