"""From what GPUs hold and what they need to who sends what to whom."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box, cells, merged
from malleus_megatron.migration.heap import no_search_for_cycles
from malleus_megatron.migration.holdings import (
    BoxIndex,
    Holding,
    Holdings,
    by_key,
    check_held_once,
    check_same_tensor,
)
from malleus_megatron.migration.senders import Demand, choose_senders


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A box that passes from a tensor of one GPU to a tensor of another, or of its own."""

    box: Box
    source_gpu: int
    source: Holding
    destination_gpu: int
    destination: Holding
    between_nodes: bool = False

    @property
    def key(self) -> str:
        """Name of the global tensor."""
        return self.destination.key

    @property
    def num_bytes(self) -> int:
        """Size of the box."""
        return self.box.num_elements * self.destination.element_bytes

    @property
    def source_slices(self) -> tuple[slice, ...]:
        """Where the box lies in the source, seen with the shape of its holding's box."""
        return self.source.box.slices_of(self.box)

    @property
    def destination_slices(self) -> tuple[slice, ...]:
        """Where the box lies in the destination, seen with the shape of its holding's box."""
        return self.destination.box.slices_of(self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Every needed element once: from the GPU itself where it holds it, else from one owner."""

    transfers: tuple[Transfer, ...]
    copies: tuple[Transfer, ...]
    """Inside a GPU, from a tensor that it holds to one that it needs."""

    def received_bytes(self) -> dict[int, int]:
        """Bytes that each GPU receives: what it needs and does not hold, no byte more."""
        return _sums((move.destination_gpu, move.num_bytes) for move in self.transfers)

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each GPU sends."""
        return _sums((move.source_gpu, move.num_bytes) for move in self.transfers)

    def sent_between_nodes_bytes(self) -> dict[int, int]:
        """Bytes that each GPU sends to other nodes."""
        return _sums(
            (move.source_gpu, move.num_bytes) for move in self.transfers if move.between_nodes
        )

    def balance(self, gpus: Collection[int]) -> float:
        """Mean bytes sent by these GPUs over the busiest one's: 1 if all send the same."""
        sent = self.sent_bytes()
        busiest = max((sent.get(gpu, 0) for gpu in gpus), default=0)
        return sum(sent.get(gpu, 0) for gpu in gpus) / (busiest * len(gpus)) if busiest else 1.0


@no_search_for_cycles()
def plan_transfers(held: Holdings, needed: Holdings, node_of: Mapping[int, int]) -> TransferPlan:
    """Find a source for every needed element; the same result on every machine.

    Args:
        held: What each GPU has now.
        needed: What each GPU must have. On one GPU the boxes of a key do not overlap.
        node_of: The node of every GPU.

    Raises:
        MigrationError: an element that nobody holds, a tensor of unlike shapes, a tensor that is
            needed twice; each names the key, the box and the GPU.
    """
    demands: list[Demand] = []
    copies: list[tuple[Demand, int]] = []
    sources = by_key(held)
    for key, wanted in by_key(needed).items():
        check_same_tensor([*wanted, *sources.get(key, ())])
        check_held_once(wanted)
        for demand in _demands(wanted, _Supply(sources.get(key, ()))):
            if demand.gpu in demand.holders:
                copies.append((demand, demand.gpu))
            else:
                demands.append(demand)
    senders = choose_senders(demands, node_of)
    return TransferPlan(
        transfers=tuple(_moves(zip(demands, senders, strict=True), node_of)),
        copies=tuple(_moves(copies, node_of)),
    )


class _Supply:
    """Cuts of the boxes of one key; GPUs that need the same box share the work."""

    def __init__(self, sources: Iterable[tuple[int, Holding]]) -> None:
        self._index = BoxIndex(sources)
        self._known: dict[Box, list[tuple[Box, dict[int, Holding]]]] = {}

    def parts(self, box: Box) -> list[tuple[Box, dict[int, Holding]]]:
        """The boxes that make up this one, each with everyone who holds all of it."""
        if box not in self._known:
            self._known[box] = list(self._cut(box))
        return self._known[box]

    def _cut(self, box: Box) -> Iterator[tuple[Box, dict[int, Holding]]]:
        others = self._index.overlapping(box)
        for cell, covering in cells(box, others):
            holders: dict[int, Holding] = {}
            for number in covering:
                holders = {**self._index.holders(others[number]), **holders}
            yield cell, dict(sorted(holders.items()))


def _demands(wanted: Iterable[tuple[int, Holding]], supply: _Supply) -> Iterator[Demand]:
    for gpu, holding in wanted:
        for box, holders in supply.parts(holding.box):
            if not holders:
                raise MigrationError(
                    f"No GPU holds {holding.key} at offset {box.offset} with shape {box.shape}, "
                    f"which GPU {gpu} needs. The state can come from a checkpoint only."
                )
            yield Demand(box=box, gpu=gpu, holding=holding, holders=holders)


def _moves(choices: Iterable[tuple[Demand, int]], node_of: Mapping[int, int]) -> Iterator[Transfer]:
    """Join what passes between the same two tensors to few boxes."""
    pairs: dict[tuple[int, int, int, int], list[tuple[Demand, int]]] = defaultdict(list)
    for demand, sender in choices:
        pair = (demand.gpu, id(demand.holding), sender, id(demand.holders[sender]))
        pairs[pair].append((demand, sender))
    for alike in pairs.values():
        demand, sender = alike[0]
        for box in merged(other.box for other, _ in alike):
            yield Transfer(
                box=box,
                source_gpu=sender,
                source=demand.holders[sender],
                destination_gpu=demand.gpu,
                destination=demand.holding,
                between_nodes=node_of[sender] != node_of[demand.gpu],
            )


def _sums(items: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: Counter[int] = Counter()
    for gpu, num_bytes in items:
        sums[gpu] += num_bytes
    return dict(sorted(sums.items()))
