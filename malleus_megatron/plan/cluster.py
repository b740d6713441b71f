"""The machine: nodes of GPUs, numbered node after node."""

from dataclasses import dataclass
from itertools import accumulate

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.limits import MOST_GPUS, check_within


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with their numbers of GPUs, and the memory of each GPU."""

    gpus_per_node: tuple[int, ...]
    memory_mib: float | None = None
    """Of one GPU; None: memory is not limited."""

    def __post_init__(self) -> None:
        """Refuse a cluster without GPUs, or with no memory at all."""
        if not self.gpus_per_node:
            raise BadInputError("cluster.gpus_per_node: [] names no node; need at least one.")
        for node, size in enumerate(self.gpus_per_node):
            if size < 1:
                raise BadInputError(f"cluster.gpus_per_node[{node}]: {size} GPUs; need >= 1.")
        check_within("cluster.gpus_per_node, in sum", sum(self.gpus_per_node), 1, MOST_GPUS)
        if self.memory_mib is not None and self.memory_mib <= 0:
            raise BadInputError(f"cluster.memory_mib: {self.memory_mib} MiB must be above 0.")

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(self.gpus_per_node)

    def nodes(self) -> tuple[range, ...]:
        """The GPUs of each node."""
        ends = list(accumulate(self.gpus_per_node))
        return tuple(
            range(end - size, end) for size, end in zip(self.gpus_per_node, ends, strict=True)
        )

    def node_by_gpu(self) -> tuple[int, ...]:
        """The node of each GPU."""
        return tuple(node for node, gpus in enumerate(self.nodes()) for _ in gpus)
