"""Which of its owners sends a piece: the nearest, and of those the one that sends least."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A piece of a tensor that a GPU needs, and everyone who could send it."""

    box: Box
    gpu: int
    holding: Holding
    """Where the piece goes."""
    holders: Mapping[int, Holding]
    """GPU -> the tensor that it would send from; GPUs ascending."""

    @property
    def num_bytes(self) -> int:
        """Size of the piece."""
        return self.box.num_elements * self.holding.element_bytes


def choose_senders(demands: Sequence[Demand], node_of: Mapping[int, int]) -> list[int]:
    """One sender a demand: an owner on the same node before any other, then the least loaded.

    Bytes inside nodes and between nodes are counted apart, since they take different wires. The
    pieces with the fewest choices go first, and of those the largest: what can still be balanced
    is balanced last. Of equals the first GPU sends. The same on every machine.
    """
    candidates = [_nearest(demand, node_of) for demand in demands]
    sent_inside: dict[int, int] = defaultdict(int)
    sent_between: dict[int, int] = defaultdict(int)
    chosen = [gpus[0] for gpus in candidates]
    for index in sorted(range(len(demands)), key=lambda i: _turn(demands[i], candidates[i])):
        demand, gpus = demands[index], candidates[index]
        inside = node_of[gpus[0]] == node_of[demand.gpu]
        sent = sent_inside if inside else sent_between
        gpu = min(gpus, key=sent.__getitem__)
        sent[gpu] += demand.num_bytes
        chosen[index] = gpu
    return chosen


def _nearest(demand: Demand, node_of: Mapping[int, int]) -> tuple[int, ...]:
    node = node_of[demand.gpu]
    near = tuple(gpu for gpu in demand.holders if node_of[gpu] == node)
    return near or tuple(demand.holders)


def _turn(demand: Demand, candidates: Sequence[int]) -> tuple[object, ...]:
    return len(candidates), -demand.num_bytes, demand.holding.key, demand.box.offset, demand.gpu
