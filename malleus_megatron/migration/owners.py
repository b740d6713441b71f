"""Slices and their owners under one plan, in the order in which all owners sum them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box, cells
from malleus_megatron.migration.heap import no_search_for_cycles
from malleus_megatron.migration.holdings import (
    BoxIndex,
    Holding,
    Holdings,
    by_key,
    check_held_once,
    check_same_tensor,
    held_twice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A box of a global tensor that the same GPUs own, wholly and in one local tensor each."""

    key: str
    box: Box
    owners: tuple[int, ...]
    """Ascending."""
    holdings: tuple[Holding, ...]
    """The local tensor of each owner, in the order of owners."""

    @property
    def contributors(self) -> tuple[int, ...]:
        """Owners whose value counts in a sum: one for each pipeline, and one more for a tied copy.

        The others hold the same value as one of these (a tensor that each GPU of a TP group has
        whole). They add nothing and take the result.
        """
        return tuple(
            gpu
            for gpu, holding in zip(self.owners, self.holdings, strict=True)
            if holding.replica == 0
        )

    @property
    def depth(self) -> int:
        """Of its shallowest copy: only with that is the gradient complete."""
        return min(holding.depth for holding in self.holdings)

    @property
    def element_bytes(self) -> int:
        """Size of an element."""
        return self.holdings[0].element_bytes

    @property
    def optimizer_group(self) -> int:
        """Of the parameter."""
        return self.holdings[0].optimizer_group

    def holding_of(self, gpu: int) -> Holding:
        """The local tensor of one of its owners."""
        return self.holdings[self.owners.index(gpu)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one owner's part of a slice lies in its local tensor and in the group's buffer."""

    start: int
    """In the flat buffer, in elements; the slice fills it in row order up to `end`."""
    end: int
    holding: Holding
    slices: tuple[slice, ...]
    """Of the local tensor, seen with the shape of its holding's box."""
    contributes: bool
    """False: the buffer gets zeros here before the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerGroup:
    """Slices with the same owners, summed together: one flat buffer, one collective."""

    owners: tuple[int, ...]
    element_bytes: int
    optimizer_group: int
    slices: tuple[Slice, ...]

    @property
    def num_elements(self) -> int:
        """Size of the flat buffer."""
        return sum(part.box.num_elements for part in self.slices)

    def placements(self, gpu: int) -> Iterator[Placement]:
        """The layout of the buffer, as one of the owners sees it."""
        end = 0
        for part in self.slices:
            start, end = end, end + part.box.num_elements
            holding = part.holding_of(gpu)
            yield Placement(
                start=start,
                end=end,
                holding=holding,
                slices=holding.box.slices_of(part.box),
                contributes=holding.replica == 0,
            )


type _Alike = tuple[tuple[int, ...], int, int]
"""Owners, element size and optimizer group: what the slices of one buffer have in common."""


@no_search_for_cycles()
def owner_slices(holdings: Holdings) -> tuple[Slice, ...]:
    """Cut every tensor into the slices whose owners are the same throughout.

    Returns:
        Slices in one global order: deepest first, as a backward pass makes them ready; then by
        key, then by offset.

    Raises:
        MigrationError: a GPU holds an element twice, a slice has no contributor, or a tensor has
            unlike shapes.
    """
    slices = [part for key, held in by_key(holdings).items() for part in _slices_of_key(key, held)]
    return tuple(sorted(slices, key=lambda part: (-part.depth, part.key, part.box.offset)))


def reduction_groups(holdings: Holdings, max_bytes: int) -> tuple[OwnerGroup, ...]:
    """Slices by owners and optimizer group, in buffers of at most `max_bytes`.

    One slice may be larger. All GPUs go through the groups in this order, each through those that
    it is an owner of. So any two GPUs meet in the same order and none waits for another for ever.
    A group stands where its last slice stands: on a GPU that owns several, buffers fill in this
    order. Groups with one owner are among them: nothing is to be summed there.
    """
    done: list[tuple[int, list[Slice]]] = []
    filling: dict[_Alike, list[Slice]] = defaultdict(list)
    filled_bytes: dict[_Alike, int] = defaultdict(int)
    last: dict[_Alike, int] = {}
    for number, part in enumerate(owner_slices(holdings)):
        group = part.owners, part.element_bytes, part.optimizer_group
        num_bytes = part.box.num_elements * part.element_bytes
        if filling[group] and filled_bytes[group] + num_bytes > max_bytes:
            done.append((last[group], filling.pop(group)))
            filled_bytes[group] = 0
        filling[group].append(part)
        filled_bytes[group] += num_bytes
        last[group] = number
    done.extend((last[group], parts) for group, parts in filling.items())
    done.sort(key=lambda item: item[0])
    return tuple(_group(parts) for _, parts in done)


def _group(parts: Sequence[Slice]) -> OwnerGroup:
    first = parts[0]
    return OwnerGroup(
        owners=first.owners,
        element_bytes=first.element_bytes,
        optimizer_group=first.optimizer_group,
        slices=tuple(parts),
    )


def _slices_of_key(key: str, held: Sequence[tuple[int, Holding]]) -> Iterator[Slice]:
    check_same_tensor(held)
    check_held_once(held)
    index = BoxIndex(held)
    whole = held[0][1].global_shape
    for cell, covering in cells(Box(offset=(0,) * len(whole), shape=whole), index.boxes):
        owners: dict[int, Holding] = {}
        for number in covering:
            for gpu, holding in index.holders(index.boxes[number]).items():
                if owners.setdefault(gpu, holding) is not holding:
                    raise held_twice(gpu, holding)
        if owners:
            yield _slice(key, cell, owners)


def _slice(key: str, box: Box, owners: dict[int, Holding]) -> Slice:
    gpus = tuple(sorted(owners))
    part = Slice(key=key, box=box, owners=gpus, holdings=tuple(owners[gpu] for gpu in gpus))
    if not part.contributors:
        raise MigrationError(
            f"{key} at offset {box.offset} with shape {box.shape}: GPUs {list(gpus)} hold it, and "
            "none of them as replica 0; a sum over it would be empty."
        )
    return part
