"""What a change of plan moves between GPUs, and how long that takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding
from malleus_megatron.migration.transfers import plan_transfers
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.limits import LARGEST_MIB, LONGEST_S, check_within
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.seats import Seat, seats

_MIB = 2**20
_MOST_BYTES = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Parameters, gradients and optimizer state in bytes, over all GPUs of a TP group."""

    layer_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0

    @classmethod
    def of(cls, problem: Problem, *, layer_mib: float | None = None) -> "StateSizes":
        """From the memory model: a layer with no micro-batch in flight.

        Args:
            problem: Without a memory model, embedding and head have no size.
            layer_mib: Of a layer, where it is known better; over all GPUs of a TP group.

        Raises:
            BadInputError: a size below 0.
        """
        memory = problem.model.memory
        if layer_mib is not None:
            check_within("layer state", layer_mib, 0, LARGEST_MIB, unit=" MiB")
        if memory is None:
            return cls(layer_bytes=_bytes(layer_mib or 0.0))
        if layer_mib is None:
            one, two = memory.layer_mib(1), memory.layer_mib(2)
            layer_mib = max(0.0, one - (two - one)) * memory.reference_tp
        return cls(
            layer_bytes=_bytes(layer_mib),
            embedding_bytes=_bytes(memory.embedding_mib * memory.reference_tp),
            head_bytes=_bytes(memory.head_mib * memory.reference_tp),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """How fast state moves."""

    bytes_per_s: float = 10e9
    """What one GPU sends or receives in a second."""
    fixed_s: float = 2.0
    """Groups, buffers and agreement, however little moves."""

    def __post_init__(self) -> None:
        """Refuse a wire that never ends and times that are none."""
        check_within("migration bytes per second", self.bytes_per_s, 1, _MOST_BYTES)
        check_within("migration seconds", self.fixed_s, 0, LONGEST_S, unit=" s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationCost:
    """Of one change of plan."""

    seconds: float = 0.0
    moved_bytes: int = 0


class StateMover:
    """Prices changes of plan by the transfers that a job would make."""

    def __init__(self, cluster: Cluster, settings: MigrationSettings, sizes: StateSizes) -> None:
        """Take the nodes, how fast state moves and how large it is."""
        self._settings = settings
        self._sizes = sizes
        self._node_of = dict(enumerate(cluster.node_by_gpu()))

    def cost(self, before: Plan, after: Plan) -> MigrationCost:
        """Fixed seconds, plus the most bytes that a GPU sends or receives over the wire's speed.

        Other micro-batch counts in the same layout move nothing and cost nothing.
        """
        if before.same_layout(after):
            return MigrationCost()
        old, new = seats(before), seats(after)
        parts = math.lcm(*(seat.tp_degree for seat in (*old.values(), *new.values())))
        made = plan_transfers(
            {
                gpu: list(self._holdings(seat, before.num_layers, parts))
                for gpu, seat in old.items()
            },
            {gpu: list(self._holdings(seat, after.num_layers, parts)) for gpu, seat in new.items()},
            self._node_of,
        )
        received = made.received_bytes()
        busiest = max([*received.values(), *made.sent_bytes().values()], default=0)
        return MigrationCost(
            seconds=self._settings.fixed_s + busiest / self._settings.bytes_per_s,
            moved_bytes=sum(received.values()),
        )

    def _holdings(self, seat: Seat, num_layers: int, parts: int) -> Iterator[Holding]:
        """A TP rank's share of each layer, cut into so many parts that all degrees divide it."""
        share = parts // seat.tp_degree
        first = seat.tp_rank * share
        sizes = self._sizes
        for layer in range(*seat.layers):
            if sizes.layer_bytes:
                yield Holding(
                    key="layers",
                    global_shape=(num_layers, parts),
                    box=Box(offset=(layer, first), shape=(1, share)),
                    element_bytes=max(1, round(sizes.layer_bytes / parts)),
                    name=f"layers/{layer}",
                )
        ends = (
            ("embedding", seat.is_first, sizes.embedding_bytes),
            ("head", seat.is_last, sizes.head_bytes),
        )
        for key, is_here, num_bytes in ends:
            if is_here and num_bytes:
                yield Holding(
                    key=key,
                    global_shape=(parts,),
                    box=Box(offset=(first,), shape=(share,)),
                    element_bytes=max(1, round(num_bytes / parts)),
                    name=key,
                )


def _bytes(mib: float) -> int:
    return round(mib * _MIB)
