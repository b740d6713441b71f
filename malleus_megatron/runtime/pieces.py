"""Moving rows of a tensor between ranks: all sends and receives of one step posted together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from malleus_megatron.plan.seats import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A tensor and which of its rows go to whom."""

    tensor: Tensor
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """An empty tensor and which of its rows come from whom."""

    tensor: Tensor
    pieces: Sequence[Piece]


def exchange(outgoing: Outgoing | None, incoming: Incoming | None) -> None:
    """Send and receive; back when all of it is done, so that the sent tensor may be freed.

    Posted in one batch: a send that waited for its receive before this rank posted its own
    receive could wait forever.
    """
    operations: list[dist.P2POp] = []
    if outgoing is not None:
        for piece in outgoing.pieces:
            rows = outgoing.tensor.detach()[piece.start : piece.end].contiguous()
            operations.append(dist.P2POp(dist.isend, rows, piece.peer))
    if incoming is not None:
        for piece in incoming.pieces:
            # Rows of a contiguous tensor are contiguous: they arrive in place.
            rows = incoming.tensor[piece.start : piece.end]
            operations.append(dist.P2POp(dist.irecv, rows, piece.peer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
