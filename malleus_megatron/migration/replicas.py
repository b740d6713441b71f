"""Copies of one slice on several GPUs: which of them differ, and how they are made equal again.

Every GPU has a hash of each of its slices. First the owners compare one digest for all slices that
they share; only where digests differ are the hashes of single slices looked at.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.owners import Slice, owner_slices
from malleus_megatron.migration.transfers import Transfer

type Owners = tuple[int, ...]
"""GPUs that hold the same slices, ascending."""

_ANY_LAYER = re.compile(r"\blayers\.(?!\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A slice whose owners do not all hold the same bits."""

    slice: Slice
    gpus: Owners
    """Those whose copies differ from the good one."""
    good_gpu: int
    """Whose copy counts."""
    is_certain: bool
    """Whether more than half of the owners agree with it. Of two unlike copies none can be told to
    be right."""

    @property
    def state(self) -> str:
        """What of the parameter it is: the parameter itself, its fp32 copy or a moment."""
        return self.slice.key.partition(".")[0]

    @property
    def parameter(self) -> str:
        """Name of the parameter, with its layer."""
        name = self.slice.key.partition(".")[2]
        # Megatron stacks equal layers to one tensor with the layers on its first axis.
        return _ANY_LAYER.sub(lambda _: f"layers.{self.slice.box.offset[0]}.", name)


def in_words(found: Sequence[Difference]) -> str:
    """The first difference, and how many more there are."""
    first = found[0]
    part = first.slice
    gpus = ", ".join(map(str, first.gpus))
    who = f"GPU {gpus} differs" if len(first.gpus) == 1 else f"GPUs {gpus} differ"
    what = "" if first.state == "parameter" else f"{first.state} of "
    sure = "which most owners agree with"
    if not first.is_certain:
        sure = "which may be the wrong one: there is no majority"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{who} from GPU {first.good_gpu}, {sure}, in {what}{first.parameter}, elements at "
        f"{list(part.box.offset)} with shape {list(part.box.shape)}{more}"
    )


def shared_slices(holdings: Holdings) -> tuple[Slice, ...]:
    """The slices that have more than one owner, in one order for all GPUs.

    Raises:
        MigrationError: see `owner_slices`.
    """
    return tuple(part for part in owner_slices(holdings) if len(part.owners) > 1)


def owner_sets(slices: Sequence[Slice]) -> tuple[Owners, ...]:
    """The different sets of owners, ascending."""
    return tuple(sorted({part.owners for part in slices}))


def digests(slices: Sequence[Slice], hashes: Sequence[int]) -> list[int]:
    """One 64-bit digest for each set of owners, over the hashes of the slices that it owns.

    Args:
        slices: All that one GPU shares with others.
        hashes: Of its own copies.
    """
    found = {owners: hashlib.blake2b(digest_size=8) for owners in owner_sets(slices)}
    for part, value in zip(slices, hashes, strict=True):
        found[part.owners].update(value.to_bytes(8, "little"))
    return [int.from_bytes(digest.digest(), "little") for digest in found.values()]


def disputed_sets(sets: Sequence[Owners], rows: Sequence[Sequence[int]]) -> frozenset[Owners]:
    """The sets of owners whose digests are not all equal.

    Args:
        sets: Of the whole job.
        rows: By GPU, the digests of the sets that it is in.
    """
    values = _by_owner(sets, rows)
    return frozenset(
        owners for owners, found in zip(sets, values, strict=True) if len({*found}) > 1
    )


def differences(
    slices: Sequence[Slice], rows: Sequence[Sequence[int]], pipeline_of: Mapping[int, int]
) -> tuple[Difference, ...]:
    """The slices whose copies differ.

    The copy that most owners have is the good one; among equals that of the lowest pipeline, and
    in it of the lowest GPU.

    Args:
        slices: Whose hashes are known.
        rows: By GPU, the hashes of those slices that it owns.
        pipeline_of: Of every GPU that owns something.
    """
    found = []
    for part, values in zip(slices, _by_owner([part.owners for part in slices], rows), strict=True):
        counts = Counter(values)
        if len(counts) > 1:
            copies = dict(zip(part.owners, values, strict=True))
            good = min(copies, key=lambda gpu: (-counts[copies[gpu]], pipeline_of[gpu], gpu))
            found.append(
                Difference(
                    slice=part,
                    gpus=tuple(gpu for gpu in part.owners if copies[gpu] != copies[good]),
                    good_gpu=good,
                    is_certain=2 * counts[copies[good]] > len(part.owners),
                )
            )
    return tuple(found)


def repairs(found: Collection[Difference]) -> tuple[Transfer, ...]:
    """Transfers that give each differing GPU the good copy."""
    return tuple(
        Transfer(
            box=difference.slice.box,
            source_gpu=difference.good_gpu,
            source=difference.slice.holding_of(difference.good_gpu),
            destination_gpu=gpu,
            destination=difference.slice.holding_of(gpu),
        )
        for difference in found
        for gpu in difference.gpus
    )


def _by_owner(sets: Sequence[Owners], rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The values of each item in the order of its owners.

    Args:
        sets: The owners of each item.
        rows: By GPU, its values of the items that it owns, in their order.
    """
    left = [iter(row) for row in rows]
    return [tuple([next(left[gpu]) for gpu in owners]) for owners in sets]
