"""What the planner is asked: a cluster, a model's costs, a batch, the freedom it has, the rates."""

import hashlib
import math
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.limits import (
    LARGEST_MIB,
    LARGEST_RATE,
    LONGEST_S,
    MOST_GPUS,
    MOST_LAYERS,
    MOST_MICROBATCHES,
    SHORTEST_S,
    check_within,
)
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import HEALTHY, Rates

_MOST_LISTED = 1000
"""Micro-batches in flight: no pipeline is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory of a stage's parts, in MiB at the reference TP degree."""

    reference_tp: int
    layer_mib_by_inflight: tuple[float, ...]
    """One layer with 1, 2, 3, ... micro-batches in flight; goes on by its last step."""
    embedding_mib: float = 0.0
    head_mib: float = 0.0
    fixed_mib: float = 0.0
    """On every GPU, whatever the degree."""
    reserve_mib: float = 0.0
    """Kept free on every GPU."""
    working_mib: float = 0.0
    """Of whatever a stage computes at a time."""
    replicated_mib: float = 0.0
    """Of one layer and micro-batch in flight, on every GPU whatever the degree: activations that
    no TP group shares out."""
    layer_shared_mib: float = 0.0
    """Of one layer, over all pipelines: optimizer state, of which each keeps an equal share."""
    embedding_shared_mib: float = 0.0
    """The same, of the embedding."""
    head_shared_mib: float = 0.0
    """The same, of the head."""
    layer_update_mib: float = 0.0
    """Of one layer, over all pipelines: what the optimizer's step takes for a moment, when no
    activation is left; the larger of both counts."""

    def __post_init__(self) -> None:
        """Refuse sizes below 0, an empty list, or layers that shrink with micro-batches."""
        where = "model.memory"
        check_within(f"{where}.reference_tp", self.reference_tp, 1, MOST_GPUS)
        layers = self.layer_mib_by_inflight
        if not layers or layers[0] <= 0:
            raise BadInputError(
                f"{where}.layer_mib_by_inflight: {list(layers)} must start with a size above 0."
            )
        for before, after in pairwise(layers):
            if after < before:
                raise BadInputError(
                    f"{where}.layer_mib_by_inflight: {after} follows {before}; more micro-batches "
                    "in flight cannot need less."
                )
        for name in MEMORY_PARTS:
            check_within(f"{where}.{name}", getattr(self, name), 0, LARGEST_MIB, unit=" MiB")

    def layer_mib(self, num_inflight: int) -> float:
        """One layer with so many micro-batches in flight, at the reference degree."""
        sizes = self.layer_mib_by_inflight
        if num_inflight <= len(sizes):
            return sizes[num_inflight - 1]
        step = sizes[-1] - sizes[-2] if len(sizes) > 1 else 0.0
        return sizes[-1] + step * (num_inflight - len(sizes))

    def among(self, num_pipelines: int) -> "ModelMemory":
        """The sizes in one of so many pipelines, its share of what they share out included."""
        shared = self.layer_shared_mib, self.embedding_shared_mib, self.head_shared_mib
        if not any(shared) and not self.layer_update_mib:
            return self
        layer, embedding, head = (size / num_pipelines for size in shared)
        return replace(
            self,
            layer_mib_by_inflight=tuple(
                size + layer for size in self._with_update(self.layer_update_mib / num_pipelines)
            ),
            embedding_mib=self.embedding_mib + embedding,
            head_mib=self.head_mib + head,
            layer_shared_mib=0.0,
            embedding_shared_mib=0.0,
            head_shared_mib=0.0,
            layer_update_mib=0.0,
        )

    def _with_update(self, update_mib: float) -> list[float]:
        """Layers by micro-batches in flight, none below a layer at rest plus its update."""
        first, second = self.layer_mib(1), self.layer_mib(2)
        least = first - (second - first) + update_mib
        num_listed = len(self.layer_mib_by_inflight)
        grows = self.layer_mib(num_listed + 1) > self.layer_mib(num_listed)
        while grows and num_listed < _MOST_LISTED and self.layer_mib(num_listed) < least:
            num_listed += 1
        # One more: the list goes on by its last step.
        return [max(least, self.layer_mib(count)) for count in range(1, num_listed + 2)]


MEMORY_PARTS = tuple(
    part.name
    for part in fields(ModelMemory)
    if part.name not in {"reference_tp", "layer_mib_by_inflight"}
)
"""The sizes of `ModelMemory` that are one number and may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's layers and what they cost a healthy GPU."""

    num_layers: int
    layer_time_s: tuple[tuple[int, float], ...]
    """Pairs (TP degree, forward plus backward of one layer and micro-batch), sorted by degree."""
    embedding_time_s: float = 0.0
    """Of the first stage, at the largest degree of `layer_time_s`."""
    head_time_s: float = 0.0
    """Of the last stage, at the largest degree of `layer_time_s`."""
    memory: ModelMemory | None = None

    def __post_init__(self) -> None:
        """Refuse a model without layers or with times that are not positive."""
        check_within("model.num_layers", self.num_layers, 1, MOST_LAYERS)
        if not self.layer_time_s:
            raise BadInputError("model.layer_time_s: names no TP degree.")
        for degree, time_s in self.layer_time_s:
            check_within("model.layer_time_s", degree, 1, MOST_GPUS)
            check_within(f"model.layer_time_s[{degree}]", time_s, SHORTEST_S, LONGEST_S, unit=" s")
        for name in ("embedding_time_s", "head_time_s"):
            check_within(f"model.{name}", getattr(self, name), 0, LONGEST_S, unit=" s")

    @property
    def largest_degree_time_s(self) -> float:
        """A layer's time at the largest degree: the unit of the objective `bottleneck`."""
        return self.layer_time_s[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The planner's input. GPUs are numbered node after node."""

    cluster: Cluster
    model: Model
    num_microbatches: int
    """Of the whole job and step."""
    tensor_parallel_sizes: tuple[int, ...]
    """Sizes that a TP group may have, ascending."""
    num_pipelines: int | None = None
    """None: the planner chooses."""
    rate_floor: float = HEALTHY
    """A rate below it counts as 1."""
    rates: Rates = field(default_factory=Rates)
    current_plan: Plan | None = None

    @property
    def digest(self) -> str:
        """The same for problems whose plans have the same values, wherever they lie now."""
        text = repr(replace(self, current_plan=None))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; the message names the field and its value."""
        check_within("batch.num_microbatches", self.num_microbatches, 1, MOST_MICROBATCHES)
        if self.rate_floor < 0:
            raise BadInputError(f"rate_floor: {self.rate_floor}; need >= 0.")
        self._check_sizes()
        self._check_pipelines()
        num_gpus = self.cluster.num_gpus
        for gpu, rate in self.rates:
            if not 0 <= gpu < num_gpus:
                raise BadInputError(f"rates: GPU {gpu} is not one of 0..{num_gpus - 1}.")
            if math.isfinite(rate):
                check_within(f"rates: GPU {gpu}", rate, SHORTEST_S, LARGEST_RATE)
        current = self.current_plan
        if current is not None and current.num_layers != self.model.num_layers:
            raise BadInputError(
                f"current_plan: it has {current.num_layers} layers; the model has "
                f"{self.model.num_layers}."
            )
        if self.cluster.memory_mib is not None and self.model.memory is None:
            raise BadInputError(
                f"model.memory is missing, but cluster.memory_mib is {self.cluster.memory_mib}; "
                "give the model's memory, or null for memory_mib."
            )

    def _check_sizes(self) -> None:
        where = "parallel.tensor_parallel_sizes"
        if not self.tensor_parallel_sizes:
            raise BadInputError(f"{where}: [] allows no TP group; need at least one size.")
        known = dict(self.model.layer_time_s)
        largest = max(self.cluster.gpus_per_node)
        for size in self.tensor_parallel_sizes:
            if size < 1:
                raise BadInputError(f"{where}: {size}; need >= 1.")
            if size > largest:
                raise BadInputError(
                    f"{where}: {size} is larger than a node; the largest has {largest} GPUs."
                )
            if size not in known:
                raise BadInputError(
                    f"{where}: {size} has no time in model.layer_time_s; it has {sorted(known)}."
                )

    def _check_pipelines(self) -> None:
        wanted = self.num_pipelines
        if wanted is None:
            return
        if wanted < 1:
            raise BadInputError(f"parallel.num_pipelines: {wanted}; need >= 1, or null.")
        if wanted > self.cluster.num_gpus:
            raise BadInputError(
                f"parallel.num_pipelines: {wanted} pipelines for {self.cluster.num_gpus} GPUs; "
                "every pipeline needs at least one."
            )

    @property
    def memory(self) -> ModelMemory | None:
        """What a stage takes in a plan with `num_pipelines` pipelines.

        Where the planner chooses their number, as with a single one, which shares with none: the
        safe side.
        """
        memory = self.model.memory
        return None if memory is None else memory.among(self.num_pipelines or 1)

    def counted_rates(self) -> tuple[float, ...]:
        """The rate that counts, for each GPU: one below the floor is 1."""
        raw = dict(self.rates.by_gpu)
        rates = (raw.get(gpu, HEALTHY) for gpu in range(self.cluster.num_gpus))
        return tuple(HEALTHY if rate < self.rate_floor else rate for rate in rates)
