"""Transfers in rounds of bounded size, the same on every GPU."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from malleus_megatron.cost.migration import RoundLoad
from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.transfers import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Transfers that are in flight together, in one order for all GPUs."""

    transfers: tuple[Transfer, ...]

    def sends(self, gpu: int) -> tuple[Transfer, ...]:
        """What this GPU sends. Both ends list what passes between them in the same order."""
        return tuple(move for move in self.transfers if move.source_gpu == gpu)

    def receives(self, gpu: int) -> tuple[Transfer, ...]:
        """What this GPU receives."""
        return tuple(move for move in self.transfers if move.destination_gpu == gpu)

    @property
    def load(self) -> RoundLoad:
        """What decides how long it takes."""
        most = {True: 0, False: 0}
        passed: Counter[tuple[bool, str, int]] = Counter()
        for move in self.transfers:
            for end, gpu in (("sends", move.source_gpu), ("receives", move.destination_gpu)):
                place = move.between_nodes, end, gpu
                passed[place] += move.num_bytes
                most[move.between_nodes] = max(most[move.between_nodes], passed[place])
        return RoundLoad(inside_bytes=most[False], between_bytes=most[True])


def cut_into_rounds(transfers: Iterable[Transfer], max_bytes: int) -> tuple[Round, ...]:
    """Place every transfer, cut where it is too large, into the first round that has room.

    Largest first, and among equals in the order of a ring (GPU g to g + 1, then to g + 2, ...), so
    that all GPUs are busy together. No more than 1 + 2 (sent + received) / max_bytes rounds for
    the busiest pair of GPUs.

    Args:
        transfers: All transfers of all GPUs.
        max_bytes: No GPU sends more in a round, and none receives more.

    Raises:
        MigrationError: a single element is larger than `max_bytes`.
    """
    parts = [part for move in transfers for part in _split(move, max_bytes)]
    num_gpus = 1 + max((max(part.source_gpu, part.destination_gpu) for part in parts), default=0)
    parts.sort(key=lambda part: _turn(part, num_gpus))
    smallest = min((part.num_bytes for part in parts), default=0)
    room = _Room(max_bytes=max_bytes, full_bytes=max_bytes - smallest + 1)
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    for part in parts:
        rounds[room.take(part.source_gpu, part.destination_gpu, part.num_bytes)].append(part)
    return tuple(Round(transfers=tuple(rounds[number])) for number in sorted(rounds))


def _split(move: Transfer, max_bytes: int) -> Iterator[Transfer]:
    if move.num_bytes <= max_bytes:
        yield move
        return
    max_elements = max_bytes // move.destination.element_bytes
    if not max_elements:
        raise MigrationError(
            f"An element of {move.key} has {move.destination.element_bytes} bytes; "
            f"a round may have {max_bytes}."
        )
    for box in move.box.split(max_elements):
        yield replace(move, box=box)


def _turn(move: Transfer, num_gpus: int) -> tuple[object, ...]:
    # Pairs the same way apart share no sender and no receiver: they fill a round together.
    distance = (move.destination_gpu - move.source_gpu) % num_gpus
    return (-move.num_bytes, distance, move.source_gpu, move.key, move.box.offset)


class _Room:
    """Bytes that each GPU can still send and receive in each round."""

    def __init__(self, *, max_bytes: int, full_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._full_bytes = full_bytes
        self._sent: dict[int, list[int]] = defaultdict(list)
        self._received: dict[int, list[int]] = defaultdict(list)
        self._first: dict[tuple[str, int], int] = defaultdict(int)

    def take(self, source: int, destination: int, num_bytes: int) -> int:
        """The first round with room at both ends; the room is taken."""
        sent, received = self._sent[source], self._received[destination]
        limit = self._max_bytes - num_bytes
        number = max(
            self._first_open(("sends", source), sent),
            self._first_open(("receives", destination), received),
        )
        last = max(len(sent), len(received), number)
        _lengthen(sent, last + 1)
        _lengthen(received, last + 1)
        while sent[number] > limit or received[number] > limit:
            number += 1
        sent[number] += num_bytes
        received[number] += num_bytes
        return number

    def _first_open(self, side: tuple[str, int], loads: Sequence[int]) -> int:
        """Rounds that are full for good are not looked at again."""
        while self._first[side] < len(loads) and loads[self._first[side]] >= self._full_bytes:
            self._first[side] += 1
        return self._first[side]


def _lengthen(loads: list[int], length: int) -> None:
    loads.extend([0] * (length - len(loads)))
