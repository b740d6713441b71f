"""Transfers in batches: new blocks come, what goes into them moves, old blocks leave.

Parameters are one block on each GPU, which is there before anything moves. The optimizer's blocks
follow from the last layer to the first, as shares of old and new plans are cut; so what a batch
has read is seldom read again, and its memory serves the next one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from malleus_megatron.cost.migration import LinkSpeeds, transfer_time_s
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.rounds import Round, cut_into_rounds
from malleus_megatron.migration.transfers import Transfer, TransferPlan

Blocks = Mapping[int, Mapping[str, int]]
"""Bytes by GPU and block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What happens between one look at memory and the next; the same on every GPU."""

    comes: Mapping[int, tuple[str, ...]]
    """New blocks by GPU; not those that are there from the beginning."""
    copies: tuple[Transfer, ...]
    rounds: tuple[Round, ...]
    leaves: Mapping[int, tuple[str, ...]]
    """Old blocks by GPU that nobody reads any more."""

    @property
    def copied_bytes(self) -> int:
        """Of the GPU that copies most inside itself."""
        copied: Counter[int] = Counter()
        for copy in self.copies:
            copied[copy.destination_gpu] += copy.num_bytes
        return max(copied.values(), default=0)


def predicted_seconds(batches: Iterable[Batch], speeds: LinkSpeeds) -> float:
    """From the first copy to the last message."""
    batches = tuple(batches)
    loads = [a_round.load for batch in batches for a_round in batch.rounds]
    return transfer_time_s(speeds, loads, [batch.copied_bytes for batch in batches])


def one_batch(moves: TransferPlan, round_bytes: int) -> tuple[Batch, ...]:
    """Everything at once, and nothing leaves: the old state stays whole."""
    rounds = cut_into_rounds(moves.transfers, round_bytes)
    return (Batch(comes={}, copies=moves.copies, rounds=rounds, leaves={}),)


def bytes_by_block(holdings: Holdings, twice: str | None = None) -> dict[int, dict[str, int]]:
    """What each GPU's blocks take.

    Args:
        holdings: Of all GPUs.
        twice: What begins the names of blocks that bring as much along that is not moved.
    """
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for gpu, held in holdings.items():
        for holding in held:
            times = 2 if twice is not None and holding.block.startswith(twice) else 1
            found[gpu][holding.block] += times * holding.num_bytes
    return {gpu: dict(sizes) for gpu, sizes in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which new block comes when, what goes into it, and what is read for it."""

    old: Blocks
    new: Blocks
    first: str
    """The block that is there from the beginning."""
    order: tuple[tuple[int, str], ...]
    """GPU and block, the first one left out."""
    moves_into: Mapping[tuple[int, str], Sequence[Transfer]]

    def present_bytes(self, gpu: int) -> int:
        """Of the old blocks and the first new one."""
        return sum(self.old.get(gpu, {}).values()) + self.new.get(gpu, {}).get(self.first, 0)


def in_sequence(
    moves: TransferPlan, needed: Holdings, *, old: Blocks, new: Blocks, first: str
) -> Sequences:
    """Put the new blocks in order: deepest first; the same on every machine."""
    depth: dict[tuple[int, str], int] = {}
    for gpu, held in needed.items():
        for holding in held:
            place = gpu, holding.block
            depth[place] = max(depth.get(place, 0), holding.depth)
    moves_into: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for move in (*moves.copies, *moves.transfers):
        moves_into[move.destination_gpu, move.destination.block].append(move)
    order = sorted(
        (place for place in depth if place[1] != first),
        # GPUs take turns: so all of them are busy in a batch.
        key=lambda place: (-depth[place], place[1], place[0]),
    )
    return Sequences(old=old, new=new, first=first, order=tuple(order), moves_into=moves_into)


def cut_into_batches(
    sequences: Sequences, limits: Mapping[int, int], round_bytes: int
) -> tuple[Batch, ...]:
    """As few batches as memory allows.

    Args:
        sequences: What comes when.
        limits: Bytes of state by GPU. One that is too small is overstepped by as little as can be:
            see `least_peaks`.
        round_bytes: That a GPU sends, and receives, before all ranks meet again.
    """
    return tuple(
        Batch(
            comes=_by_gpu(draft.comes),
            copies=tuple(move for move in draft.moves if _stays(move)),
            rounds=cut_into_rounds((move for move in draft.moves if not _stays(move)), round_bytes),
            leaves=_by_gpu(draft.leaves),
        )
        for draft in _drafts(sequences, limits, defaultdict(int))
    )


def least_peaks(sequences: Sequences) -> dict[int, int]:
    """Bytes of state that each GPU has at most if memory is given back as early as can be."""
    peaks: dict[int, int] = defaultdict(int)
    for _ in _drafts(sequences, {}, peaks):
        pass
    return dict(peaks)


@dataclass(slots=True, kw_only=True)
class _Draft:
    comes: list[tuple[int, str]] = field(default_factory=list)
    moves: list[Transfer] = field(default_factory=list)
    leaves: list[tuple[int, str]] = field(default_factory=list)


def _drafts(
    sequences: Sequences, limits: Mapping[int, int], peaks: dict[int, int]
) -> Iterator[_Draft]:
    """Batches one after the other; notes the most that each GPU has had."""
    memory = _Memory(sequences)
    gpus = sequences.old.keys() | sequences.new.keys()
    draft = _Draft()
    for gpu in sorted(gpus):
        draft.moves += sequences.moves_into.get((gpu, sequences.first), ())
        peaks[gpu] = memory.present[gpu]
    for gpu, block in sequences.order:
        size = sequences.new[gpu][block]
        if memory.present[gpu] + size > limits.get(gpu, 0):
            draft.leaves = memory.after(draft.moves)
            yield draft
            draft = _Draft()
        draft.comes.append((gpu, block))
        draft.moves += sequences.moves_into.get((gpu, block), ())
        memory.present[gpu] += size
        peaks[gpu] = max(peaks[gpu], memory.present[gpu])
    draft.leaves = memory.after(draft.moves)
    yield draft


class _Memory:
    """What each GPU has, and how often each old block will still be read."""

    def __init__(self, sequences: Sequences) -> None:
        gpus = sequences.old.keys() | sequences.new.keys()
        self.present = {gpu: sequences.present_bytes(gpu) for gpu in gpus}
        self._old = sequences.old
        self._readers = Counter(
            (move.source_gpu, move.source.block)
            for moves in sequences.moves_into.values()
            for move in moves
        )
        self._unread = [
            (gpu, block)
            for gpu, sizes in sequences.old.items()
            for block in sizes
            if not self._readers[gpu, block]
        ]

    def after(self, moves: Iterable[Transfer]) -> list[tuple[int, str]]:
        """Old blocks that can leave once these moves are done."""
        leaves, self._unread = self._unread, []
        for move in moves:
            place = move.source_gpu, move.source.block
            self._readers[place] -= 1
            if not self._readers[place]:
                leaves.append(place)
        for gpu, block in leaves:
            self.present[gpu] -= self._old[gpu][block]
        return sorted(leaves)


def _stays(move: Transfer) -> bool:
    return move.source_gpu == move.destination_gpu


def _by_gpu(places: Iterable[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = defaultdict(list)
    for gpu, block in places:
        found[gpu].append(block)
    return {gpu: tuple(blocks) for gpu, blocks in found.items()}
