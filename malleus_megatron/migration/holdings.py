"""Ownership: which GPU holds which slices of which global tensors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.box_tree import BoxTree
from malleus_megatron.migration.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One local tensor of one GPU, as a box of a global tensor.

    Several GPUs may hold the same box (replicas). A GPU may hold several boxes of a key: the two
    halves of a gated MLP's first weight, or the layers of a tensor that has a layer axis.
    """

    key: str
    """Name of the global tensor, the same under every plan."""
    global_shape: tuple[int, ...]
    """With the layer axis in front where the key has one."""
    box: Box
    """The local tensor has this shape, but for axes of size 1 in front."""
    element_bytes: int
    name: str
    """By which the GPU finds its tensor."""
    replica: int = 0
    """TP rank where all GPUs of a TP group hold the same whole tensor; 0 where they share it.
    Only replica 0 adds to a sum over owners."""
    depth: int = 0
    """Order in the forward pass: 0 embedding, i + 1 layer i, and so on. Gradients of the deepest
    are ready first."""
    optimizer_group: int = 0
    """Of a parameter: with which others the optimizer shares learning rate and weight decay."""
    block: str = ""
    """Tensors of a GPU with the same one come into memory and leave it together."""

    @property
    def num_bytes(self) -> int:
        """Size of the local tensor."""
        return self.box.num_elements * self.element_bytes


def tensor_name(key: str, box: Box) -> str:
    """A name that no other local tensor of a GPU has: its boxes of a key do not overlap."""
    return f"{key}@{','.join(map(str, box.offset))}"


Holdings = Mapping[int, Sequence[Holding]]
"""All local tensors of a job, by GPU. A GPU that holds nothing may be left out."""


def by_key(holdings: Holdings) -> dict[str, list[tuple[int, Holding]]]:
    """Holdings with their GPUs, by key; keys and GPUs ascending."""
    found: dict[str, list[tuple[int, Holding]]] = defaultdict(list)
    for gpu in sorted(holdings):
        for holding in holdings[gpu]:
            found[holding.key].append((gpu, holding))
    return {key: found[key] for key in sorted(found)}


def check_same_tensor(holdings: Iterable[tuple[int, Holding]]) -> None:
    """Refuse holdings of one key that disagree on what the key is, or lie outside of it.

    Raises:
        MigrationError: the key, both GPUs, both shapes.
    """
    known: tuple[int, Holding] | None = None
    for gpu, holding in holdings:
        if known is None:
            known = gpu, holding
        ours, theirs = _kind(holding), _kind(known[1])
        if ours != theirs:
            raise MigrationError(
                f"{holding.key} has shape {ours[0]} and {ours[1]} bytes an element on GPU {gpu}, "
                f"shape {theirs[0]} and {theirs[1]} bytes on GPU {known[0]}."
            )
        _check_inside(gpu, holding)


def check_held_once(holdings: Iterable[tuple[int, Holding]]) -> None:
    """Refuse a GPU with two tensors for the same box of one key.

    Raises:
        MigrationError: the GPU, the key and the box.
    """
    seen: set[tuple[int, Box]] = set()
    for gpu, holding in holdings:
        if (gpu, holding.box) in seen:
            raise held_twice(gpu, holding)
        seen.add((gpu, holding.box))


def held_twice(gpu: int, holding: Holding) -> MigrationError:
    """The error for elements that a GPU has in two tensors."""
    return MigrationError(
        f"GPU {gpu} has elements of {holding.key} twice: in {holding.name}, at offset "
        f"{holding.box.offset} with shape {holding.box.shape}, and in another tensor."
    )


def _kind(holding: Holding) -> tuple[tuple[int, ...], int]:
    return holding.global_shape, holding.element_bytes


def _check_inside(gpu: int, holding: Holding) -> None:
    box, shape = holding.box, holding.global_shape
    if len(box.shape) != len(shape) or any(
        start + size > whole
        for start, size, whole in zip(box.offset, box.shape, shape, strict=True)
    ):
        raise MigrationError(
            f"GPU {gpu} has {holding.key} at offset {box.offset} with shape {box.shape}: "
            f"outside of the whole tensor's shape {shape}."
        )


class BoxIndex:
    """The distinct boxes of one key, each with the GPUs that hold it."""

    def __init__(self, holdings: Iterable[tuple[int, Holding]]) -> None:
        """Sort boxes by offset, then by shape."""
        found: dict[Box, dict[int, Holding]] = {}
        for gpu, holding in holdings:
            found.setdefault(holding.box, {}).setdefault(gpu, holding)
        self.boxes = sorted(found, key=lambda box: (box.offset, box.shape))
        self._holders = found
        self._tree = BoxTree(self.boxes)

    def holders(self, box: Box) -> Mapping[int, Holding]:
        """GPU -> its local tensor, of a box of this index; GPUs ascending."""
        return self._holders[box]

    def overlapping(self, box: Box) -> list[Box]:
        """Boxes that share elements with this one, in the order of all."""
        return self._tree.overlapping(box)
