"""Carrying out transfers between ranks: rounds of bounded size, few messages a pair.

Bytes travel as they are: no element is converted, and nothing is pickled. What is large goes as a
message of its own, from where it lies to where it belongs if it is contiguous there; the rest of
a pair goes in one packed message. Both ends of a pair cut it into messages by the same rule.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_megatron.migration.rounds import Round
from malleus_megatron.migration.transfers import Transfer

DIRECT_BYTES = 64 * 2**10
"""From this size on a box is a message of its own."""
BUFFERS_A_ROUND = 4
"""Times a round's bytes that message buffers take at most: sent and received, in this round and in
the next one, which is packed meanwhile."""
_ALIGNED = 64
"""Bytes between the starts of messages in a buffer, so that any element may lie at one."""


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

    received_bytes: int = 0
    sent_bytes: int = 0
    peak_buffer_bytes: int = 0
    """Most bytes that were in message buffers at one time."""

    def __add__(self, other: "Carried") -> "Carried":
        """Both, one after the other."""
        return Carried(
            received_bytes=self.received_bytes + other.received_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            peak_buffer_bytes=max(self.peak_buffer_bytes, other.peak_buffer_bytes),
        )


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
    carried = Carried()
    packed = _packed_round(rounds, 0, gpu, old, new, guard) if rounds else None
    for number in range(len(rounds)):
        assert packed is not None
        in_flight, following = packed, None
        works = in_flight.start()
        try:
            if number + 1 < len(rounds):
                following = _packed_round(rounds, number + 1, gpu, old, new, guard)
        finally:
            # Also where the next round failed: all ranks have started this one.
            for work in works:
                work.wait()
        guard(f"unpacking round {number + 1} of {len(rounds)}", in_flight.unpack)
        buffered = in_flight.buffer_bytes + (following.buffer_bytes if following else 0)
        carried += in_flight.carried(buffered)
        packed = following
    return carried


def _packed_round(
    rounds: Sequence[Round],
    number: int,
    gpu: int,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    guard: Guard,
) -> "_Exchange":
    return guard(
        f"packing round {number + 1} of {len(rounds)}",
        functools.partial(_exchange, rounds[number], gpu, old, new),
    )


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One rank's part in a round: all messages, ready to go."""

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)
    """Peer and bytes; messages between two ranks are in the same order at both."""
    unpacked: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parts of receive buffers, and where they belong."""
    buffer_bytes: int = 0

    def start(self) -> list[dist.Work]:
        """Let all messages go."""
        operations = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in self.sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in self.receives]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def unpack(self) -> None:
        """Take what has come out of the buffers."""
        for part, target in self.unpacked:
            target.copy_(part.view(target.dtype).view(target.shape))

    def carried(self, buffered: int) -> Carried:
        """What passed, once it has."""
        return Carried(
            received_bytes=sum(tensor.numel() for _, tensor in self.receives),
            sent_bytes=sum(tensor.numel() for _, tensor in self.sends),
            peak_buffer_bytes=buffered,
        )


def _exchange(
    a_round: Round, gpu: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> _Exchange:
    made = _Exchange()
    sends = _messages(a_round.sends(gpu), "destination_gpu")
    outgoing = _Side([(peer, m, [_source(move, old) for move in m]) for peer, m in sends])
    made.sends = outgoing.messages
    for part, source in outgoing.buffered:
        part.view(source.dtype).view(source.shape).copy_(source)
    receives = _messages(a_round.receives(gpu), "source_gpu")
    incoming = _Side([(peer, m, [_target(move, new) for move in m]) for peer, m in receives])
    made.receives = incoming.messages
    made.unpacked = incoming.buffered
    made.buffer_bytes = outgoing.buffer_bytes + incoming.buffer_bytes
    return made


def _messages(moves: Sequence[Transfer], side: str) -> list[tuple[int, list[Transfer]]]:
    """A round's transfers, cut into messages: the same list at both ends of each pair.

    In a packed message the largest elements come first, so that each lies aligned without padding.
    """
    messages: list[tuple[int, list[Transfer]]] = []
    small: dict[int, list[Transfer]] = defaultdict(list)
    for move in moves:
        peer = getattr(move, side)
        if move.num_bytes >= DIRECT_BYTES:
            messages.append((peer, [move]))
        else:
            small[peer].append(move)
    for peer, packed in small.items():
        packed.sort(key=lambda move: -move.destination.element_bytes)
        messages.append((peer, packed))
    return messages


class _Side:
    """Tensors for the messages of one direction: in place where that can be, else in a buffer."""

    def __init__(self, messages: Sequence[tuple[int, Sequence[Transfer], list[Tensor]]]) -> None:
        self.messages: list[tuple[int, Tensor]] = []
        self.buffered: list[tuple[Tensor, Tensor]] = []
        """Parts of the buffer, and the tensors that go there or come from there."""
        sizes = [
            0 if self._is_direct(tensors) else sum(move.num_bytes for move in moves)
            for _, moves, tensors in messages
        ]
        self.buffer_bytes = sum(map(_aligned, sizes))
        device = messages[0][2][0].device if messages else None
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        start = 0
        for (peer, moves, tensors), size in zip(messages, sizes, strict=True):
            if not size:
                self.messages.append((peer, tensors[0].view(-1).view(torch.uint8)))
                continue
            self.messages.append((peer, buffer[start : start + size]))
            low = start
            for move, tensor in zip(moves, tensors, strict=True):
                self.buffered.append((buffer[low : low + move.num_bytes], tensor))
                low += move.num_bytes
            start += _aligned(size)

    @staticmethod
    def _is_direct(tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == 1 and tensors[0].is_contiguous()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _source(move: Transfer, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[move.source.name].detach().view(move.source.box.shape)
    return tensor[move.source_slices]


def _target(move: Transfer, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[move.destination.name].detach().view(move.destination.box.shape)
    return tensor[move.destination_slices]
