"""What all ranks agree on: a small gloo group beside the training, with a time limit on each call.

Every method is a collective over the world: all ranks call it, in the same order. It carries rows
of numbers and short texts, never tensors of the model.
"""

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from malleus_megatron.errors import MalleusError

_MAX_TEXT_BYTES = 2048


class Agreement:
    """The world's control channel. Its tensors live on the CPU, so no GPU is ever waited for."""

    def __init__(self, timeout: timedelta) -> None:
        """Make the group; a collective.

        Args:
            timeout: How long a rank waits for the others in any one call.
        """
        self._timeout = timeout
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "the world holds every rank"
        self._group = group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Give every rank the rows of all ranks, by rank. Rows have the same length everywhere."""
        mine = torch.tensor(row, dtype=torch.float64)
        rows = torch.empty(self.world_size * len(row), dtype=torch.float64)
        self._wait(dist.all_gather_into_tensor(rows, mine, group=self._group, async_op=True))
        return rows.view(self.world_size, len(row)).tolist()

    def broadcast(self, payload: bytes, num_bytes: int) -> bytes:
        """Give every rank the bytes of rank 0, whose length all ranks know already."""
        text = torch.zeros(num_bytes, dtype=torch.uint8)
        if self.rank == 0:
            text.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._wait(dist.broadcast(text, src=0, group=self._group, async_op=True))
        return bytes(text.tolist())

    def first_text(self, text: str | None) -> str | None:
        """Give every rank the text of the lowest rank that has one; None if no rank has."""
        encoded = b"" if text is None else text.encode()[:_MAX_TEXT_BYTES]
        mine = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8)
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[
            : len(encoded)
        ]
        texts = torch.empty(self.world_size * _MAX_TEXT_BYTES, dtype=torch.uint8)
        self._wait(dist.all_gather_into_tensor(texts, mine, group=self._group, async_op=True))
        for line in texts.view(self.world_size, _MAX_TEXT_BYTES).tolist():
            found = bytes(line).rstrip(b"\0").decode(errors="replace")
            if found:
                return found
        return None

    def first_difference(self, text: str) -> str | None:
        """On every rank: how a rank's text differs from rank 0's, or None if all are equal.

        Texts are compared by their hash.
        """
        digest = hashlib.sha256(text.encode()).digest()
        rows = self.exchange([float(byte) for byte in digest[:16]])
        for rank, row in enumerate(rows):
            if row != rows[0]:
                return f"rank {rank} holds another plan than rank 0"
        return None

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

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self._timeout)
