"""Carrying out a transfer plan between ranks: rounds of bounded size, one message a pair.

Bytes travel as they are: no element is converted, and nothing is pickled. Both ends of a pair pack
and unpack what passes between them in the order of the round.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_megatron.migration.rounds import Round
from malleus_megatron.migration.transfers import Transfer


class Guard(Protocol):
    """Takes a step of one rank, named for messages; it may hear first how the others fare."""

    def __call__[T](self, what: str, step: Callable[[], T], /) -> T:
        """Take the step and give back its result."""
        ...


def unguarded[T](_what: str, step: Callable[[], T]) -> T:
    """Just take the step."""
    return step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What one rank moved."""

    received_bytes: int
    sent_bytes: int
    peak_buffer_bytes: int
    """Most bytes that were in message buffers at one time."""


def copy_own(
    copies: Sequence[Transfer], old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> None:
    """Take what this rank holds itself from its old tensors to its new ones."""
    for copy in copies:
        _target(copy, new).copy_(_source(copy, old))


def carry_out(
    rounds: Sequence[Round],
    gpu: int,
    *,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    guard: Guard = unguarded,
) -> Carried:
    """Send and receive round after round; all ranks call it with the same rounds.

    Args:
        rounds: Of the whole job.
        gpu: This rank's.
        old: This rank's tensors by the names in its holdings; only read.
        new: The tensors to fill.
        guard: Around what a rank does alone, before and after the messages of a round. With one
            that lets no rank go on where another has failed, nobody waits for a message that is
            never sent.

    Returns:
        Bytes that passed, which equal the plan's.
    """
    received = sent = peak = 0
    for number, a_round in enumerate(rounds):
        sends = _by_peer(a_round.sends(gpu), "destination_gpu")
        receives = _by_peer(a_round.receives(gpu), "source_gpu")
        outgoing, incoming = guard(
            f"packing round {number + 1} of {len(rounds)}",
            functools.partial(_pack, sends, receives, old, new),
        )
        _swap(outgoing, incoming)
        guard(
            f"unpacking round {number + 1} of {len(rounds)}",
            functools.partial(_unpack_all, receives, incoming, new),
        )
        sent += sum(buffer.numel() for buffer in outgoing.values())
        received += sum(buffer.numel() for buffer in incoming.values())
        peak = max(peak, sum(b.numel() for b in (*outgoing.values(), *incoming.values())))
    return Carried(received_bytes=received, sent_bytes=sent, peak_buffer_bytes=peak)


def _pack(
    sends: Mapping[int, Sequence[Transfer]],
    receives: Mapping[int, Sequence[Transfer]],
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Messages that are full, and messages with room for what comes."""
    outgoing = {peer: _packed(moves, old) for peer, moves in sends.items()}
    incoming = {
        peer: torch.empty(
            sum(move.num_bytes for move in moves),
            dtype=torch.uint8,
            device=_target(moves[0], new).device,
        )
        for peer, moves in receives.items()
    }
    return outgoing, incoming


def _unpack_all(
    receives: Mapping[int, Sequence[Transfer]],
    incoming: Mapping[int, Tensor],
    new: Mapping[str, Tensor],
) -> None:
    for peer, moves in receives.items():
        _unpack(moves, incoming[peer], new)


def _by_peer(moves: Sequence[Transfer], side: str) -> dict[int, list[Transfer]]:
    """A round's transfers by the other GPU, ascending."""
    found: dict[int, list[Transfer]] = defaultdict(list)
    for move in moves:
        found[getattr(move, side)].append(move)
    return dict(sorted(found.items()))


def _swap(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
    operations = [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in outgoing.items()]
    operations += [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in incoming.items()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _packed(moves: Sequence[Transfer], tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of all boxes, one after the other."""
    return torch.cat([_bytes_of(_source(move, tensors)) for move in moves])


def _unpack(moves: Sequence[Transfer], buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
    start = 0
    for move in moves:
        target = _target(move, tensors)
        part = buffer[start : start + move.num_bytes]
        # A view with larger elements needs an aligned start, which a clone has.
        target.copy_(part.clone().view(target.dtype).view(target.shape))
        start += move.num_bytes


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _source(move: Transfer, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[move.source.name].detach().view(move.source.box.shape)
    return tensor[move.source_slices]


def _target(move: Transfer, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[move.destination.name].detach().view(move.destination.box.shape)
    return tensor[move.destination_slices]
