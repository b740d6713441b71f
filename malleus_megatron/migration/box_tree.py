"""Which boxes of a tensor overlap a given one, without a look at each of them."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

from malleus_megatron.migration.boxes import Box

_FEW = 8
"""So many boxes are as soon compared as sorted out further."""


class BoxTree:
    """Boxes by where they start on the first axis; those that start together, on the next one."""

    def __init__(self, boxes: Sequence[Box], axis: int = 0) -> None:
        """Build the tree, of boxes that start at the same place on all axes before this one.

        Args:
            boxes: Sorted by offset.
            axis: Of the tensor.
        """
        self._boxes = boxes
        self._axis = axis
        self._starts: list[int] = []
        self._branches: list[BoxTree] = []
        if len(boxes) <= _FEW or axis == len(boxes[0].offset):
            return
        self._longest = max(box.shape[axis] for box in boxes)
        for start, together in groupby(boxes, key=lambda box: box.offset[axis]):
            self._starts.append(start)
            self._branches.append(BoxTree(list(together), axis + 1))

    def overlapping(self, box: Box) -> list[Box]:
        """Boxes that share elements with this one, in the order in which they were given."""
        if not self._branches:
            return [other for other in self._boxes if other.overlaps(box)]
        start, size = box.offset[self._axis], box.shape[self._axis]
        low = bisect_left(self._starts, start - self._longest + 1)
        high = bisect_left(self._starts, start + size)
        return [other for branch in self._branches[low:high] for other in branch.overlapping(box)]
