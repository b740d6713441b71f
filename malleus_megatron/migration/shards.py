"""Who keeps the optimizer's state of which elements: ZeRO-1 over the owners of slices.

The slices that the same GPUs own lie behind each other in one flat buffer. Each owner keeps an
equal share of it, whatever rows and tensors that cuts: it gets their summed gradient, updates
them, and gives all owners the new values.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from malleus_megatron.migration.boxes import Box, Span
from malleus_megatron.migration.heap import no_search_for_cycles
from malleus_megatron.migration.holdings import Holding, Holdings, tensor_name
from malleus_megatron.migration.owners import OwnerGroup, Slice
from malleus_megatron.migration.spans import boxes_of_span


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one slice in one GPU's share."""

    slice: Slice
    box: Box
    span: Span
    """Where they lie in the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """An owner group whose flat buffer is shared out."""

    group: OwnerGroup

    @property
    def owners(self) -> tuple[int, ...]:
        """Ascending; the order of their shares."""
        return self.group.owners

    def block(self, kind: str) -> str:
        """Names one kind of state of the group's share: no other group has the same slice."""
        first = self.group.slices[0]
        return f"{kind} of {tensor_name(first.key, first.box)}"

    @property
    def is_replicated(self) -> bool:
        """Whether some owner holds what another GPU of its TP group holds too.

        Such gradients may have to be summed inside the TP group first.
        """
        return any(part.contributors != part.owners for part in self.group.slices)

    @property
    def share_size(self) -> int:
        """Elements of a share in a collective, where all are equal."""
        return -(-self.group.num_elements // len(self.owners))

    @property
    def padded_size(self) -> int:
        """Elements of the buffer in a collective."""
        return self.share_size * len(self.owners)

    def share(self, gpu: int) -> Span:
        """An owner's elements of the buffer, without padding: empty for the last of a tiny one."""
        start = self.owners.index(gpu) * self.share_size
        whole = self.group.num_elements
        return min(start, whole), min(start + self.share_size, whole)

    def pieces(self, gpu: int) -> Iterator[Piece]:
        """What an owner's share is made of, in order."""
        low, high = self.share(gpu)
        end = 0
        for part in self.group.slices:
            start, end = end, end + part.box.num_elements
            for box, (first, last) in boxes_of_span(part.box, (low - start, high - start)):
                span = (start + first - low, start + last - low)
                yield Piece(slice=part, box=box, span=span)


@no_search_for_cycles()
def shard_holdings(
    groups: Sequence[ShardGroup], kinds: Sequence[str], element_bytes: int, strip: str
) -> Holdings:
    """The holdings of all GPUs that keep these kinds of state for their shares.

    Args:
        groups: Of the whole job.
        kinds: What is kept for each element; in front of the key, with a dot.
        element_bytes: Of each kind.
        strip: What the slices' own keys begin with.
    """
    found: dict[int, list[Holding]] = {}
    for group in groups:
        for gpu in group.owners:
            for piece in group.pieces(gpu):
                for kind in kinds:
                    holding = piece_holding(group, piece, kind, element_bytes, strip)
                    found.setdefault(gpu, []).append(holding)
    return found


def piece_holding(
    group: ShardGroup, piece: Piece, kind: str, element_bytes: int, strip: str
) -> Holding:
    """One piece of a share as a holding of one kind of state."""
    first = piece.slice.holdings[0]
    # Of a large job there are hundreds of thousands: those of a tensor share the words.
    key = sys.intern(f"{kind}.{first.key.removeprefix(strip)}")
    return Holding(
        key=key,
        global_shape=first.global_shape,
        box=piece.box,
        element_bytes=element_bytes,
        name=tensor_name(key, piece.box),
        depth=piece.slice.depth,
        block=sys.intern(group.block(kind)),
    )
