"""A dense decoder cut over the GPUs of a plan, as holdings; and random plans for it."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.seats import Seat, seats

STATES = {"": 2, "optimizer.fp32_param.": 4, "optimizer.exp_avg.": 4, "optimizer.exp_avg_sq.": 4}
"""Prefix of the key -> bytes an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the model, without its layer axis."""

    key: str
    shape: tuple[int, ...]
    cut: int | None = None
    """Axis that a TP group shares out; None: each GPU has it whole."""
    parts: int = 1
    """A gated MLP's first weight has two, each shared out for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Widths of the model; tests want them small, benches large."""

    num_layers: int
    hidden: int = 8
    query_groups: int = 4
    ffn: int = 8
    vocabulary: int = 16
    tied: bool = True
    states: tuple[str, ...] = ("",)
    kinds: tuple[str, ...] = ("norm_1", "qkv", "proj", "norm_2", "fc1", "fc2")

    def layer_tensors(self) -> list[Tensor]:
        """Twelve: all ways in which Megatron cuts a tensor of a dense layer."""
        h, qkv = self.hidden, 3 * self.query_groups
        tensors = (
            Tensor(key="layers.norm_1.weight", shape=(h,)),
            Tensor(key="layers.norm_1.bias", shape=(h,)),
            Tensor(key="layers.qkv.weight", shape=(qkv, h), cut=0),
            Tensor(key="layers.qkv.bias", shape=(qkv,), cut=0),
            Tensor(key="layers.proj.weight", shape=(h, h), cut=1),
            Tensor(key="layers.proj.bias", shape=(h,)),
            Tensor(key="layers.norm_2.weight", shape=(h,)),
            Tensor(key="layers.norm_2.bias", shape=(h,)),
            Tensor(key="layers.fc1.weight", shape=(2 * self.ffn, h), cut=0, parts=2),
            Tensor(key="layers.fc1.bias", shape=(2 * self.ffn,), cut=0, parts=2),
            Tensor(key="layers.fc2.weight", shape=(h, self.ffn), cut=1),
            Tensor(key="layers.fc2.bias", shape=(h,)),
        )
        return [tensor for tensor in tensors if tensor.key.split(".")[1] in self.kinds]

    def holdings(self, plan: Plan) -> dict[int, list[Holding]]:
        """What each GPU holds under a plan. GPUs on standby are left out."""
        return {gpu: list(self._of_seat(seat)) for gpu, seat in seats(plan).items()}

    def _of_seat(self, seat: Seat) -> Iterator[Holding]:
        for layer in range(*seat.layers):
            for tensor in self.layer_tensors():
                yield from self._cut(tensor, seat, depth=layer + 1, layer=layer)
        for tensor, depth in self._ends(seat):
            yield from self._cut(tensor, seat, depth=depth, layer=None)

    def _ends(self, seat: Seat) -> Iterator[tuple[Tensor, int]]:
        last = self.num_layers + 1
        word = (self.vocabulary, self.hidden)
        if seat.is_first:
            yield Tensor(key="embedding", shape=word, cut=0), 0
        if seat.is_last:
            yield Tensor(key="final_norm", shape=(self.hidden,)), last
            if not self.tied:
                yield Tensor(key="output", shape=word, cut=0), last
            elif not seat.is_first:
                yield Tensor(key="embedding", shape=word, cut=0), last

    def _cut(
        self, tensor: Tensor, seat: Seat, *, depth: int, layer: int | None
    ) -> Iterator[Holding]:
        front = () if layer is None else (layer,)
        for state in self.states:
            for part, (offset, shape) in enumerate(_shares(tensor, seat)):
                yield Holding(
                    key=f"{state}{tensor.key}",
                    global_shape=(*(self.num_layers for _ in front), *tensor.shape),
                    box=Box(offset=(*front, *offset), shape=(*(1 for _ in front), *shape)),
                    element_bytes=STATES[state],
                    name=f"{state}{tensor.key}/{front}/{part}",
                    replica=seat.tp_rank if tensor.cut is None else 0,
                    depth=depth,
                )


def _shares(tensor: Tensor, seat: Seat) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if tensor.cut is None:
        yield (0,) * len(tensor.shape), tensor.shape
        return
    size = tensor.shape[tensor.cut] // (seat.tp_degree * tensor.parts)
    for part in range(tensor.parts):
        offset, shape = [0] * len(tensor.shape), list(tensor.shape)
        offset[tensor.cut] = (part * seat.tp_degree + seat.tp_rank) * size
        shape[tensor.cut] = size
        yield tuple(offset), tuple(shape)


def random_plan(
    rng: random.Random, *, num_gpus: int, num_layers: int, degrees: Sequence[int] = (1, 2, 4)
) -> Plan:
    """Unequal pipelines and stages, empty stages, GPUs in any order, some on standby."""
    gpus = list(range(num_gpus))
    if rng.random() < 0.5:
        rng.shuffle(gpus)
    elif rng.random() < 0.5:
        gpus.reverse()
    groups: list[tuple[int, ...]] = []
    while gpus and (not groups or rng.random() < 0.9):
        degree = rng.choice([d for d in degrees if d <= len(gpus)])
        groups.append(tuple(gpus[:degree]))
        gpus = gpus[degree:]
    num_pipelines = rng.randint(1, min(4, len(groups)))
    starts = sorted(rng.sample(range(1, len(groups)), num_pipelines - 1))
    bounds = [0, *starts, len(groups)]
    pipelines = tuple(_pipeline(rng, groups[a:b], num_layers) for a, b in pairwise(bounds))
    return Plan(
        num_layers=num_layers,
        num_microbatches=sum(pipeline.num_microbatches for pipeline in pipelines),
        pipelines=pipelines,
        standby=tuple(gpus),
    )


def _pipeline(rng: random.Random, groups: Iterable[tuple[int, ...]], num_layers: int) -> Pipeline:
    groups = list(groups)
    cuts = sorted(rng.randint(0, num_layers) for _ in groups[1:])
    return Pipeline(
        num_microbatches=rng.randint(1, 5),
        stages=tuple(
            Stage(gpus=group, layers=layers)
            for group, layers in zip(groups, pairwise([0, *cuts, num_layers]), strict=True)
        ),
    )
