"""The whole assignment of a job: pipelines, stages, GPUs, layers, micro-batches, standby GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from malleus_megatron.errors import BadInputError

OBJECTIVES = ("step-time", "bottleneck")
"""What a plan was made for; the first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A TP group and its consecutive layers, half open."""

    gpus: tuple[int, ...]
    """In the order of their TP ranks."""
    layers: tuple[int, int]

    def __post_init__(self) -> None:
        """Refuse a stage without GPUs or with a layer range that runs backwards."""
        start, end = self.layers
        if not self.gpus:
            raise BadInputError(f"A stage with layers [{start}, {end}) has no GPU.")
        if not 0 <= start <= end:
            raise BadInputError(f"A stage has layers [{start}, {end}); need 0 <= start <= end.")

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Ordered stages that hold the whole model, and the micro-batches they get in a step."""

    num_microbatches: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        """Refuse an empty pipeline, no micro-batches, or layers with a gap or an overlap."""
        if not self.stages:
            raise BadInputError("A pipeline has no stage.")
        if self.num_microbatches < 1:
            raise BadInputError(f"A pipeline has {self.num_microbatches} micro-batches; need >= 1.")
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.layers[0] != expected:
                raise BadInputError(
                    f"Stage {index} starts at layer {stage.layers[0]}; "
                    f"the one before ends at {expected}."
                )
            expected = stage.layers[1]

    @property
    def num_layers(self) -> int:
        """Layers of the whole pipeline."""
        return self.stages[-1].layers[1]

    @property
    def gpus(self) -> tuple[int, ...]:
        """All GPUs, stage by stage."""
        return tuple(chain.from_iterable(stage.gpus for stage in self.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of a plan; None where it does not say."""

    step_time_s: float | None = None
    bottleneck: float | None = None
    lower_bound: float | None = None
    healthy_step_time_s: float | None = None
    memory_mib: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningNote:
    """How a plan came about. Not part of the plan's identity."""

    seconds: float
    seed: int
    problem: str | None = None
    """The digest of what it was made for; what was proved of it holds there alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who computes what. Equal assignments are equal plans, whatever was predicted for them."""

    num_layers: int
    num_microbatches: int
    pipelines: tuple[Pipeline, ...]
    standby: tuple[int, ...] = ()
    objective: str = OBJECTIVES[0]
    predicted: Prediction | None = field(default=None, compare=False)
    planning: PlanningNote | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check every sum of the plan; the message names the numbers that do not fit."""
        if self.objective not in OBJECTIVES:
            raise BadInputError(
                f"Objective {self.objective!r} is unknown; known: {', '.join(OBJECTIVES)}."
            )
        if not self.pipelines:
            raise BadInputError("A plan has no pipeline.")
        for index, pipeline in enumerate(self.pipelines):
            if pipeline.num_layers != self.num_layers:
                raise BadInputError(
                    f"Pipeline {index} holds {pipeline.num_layers} layers; "
                    f"the model has {self.num_layers}."
                )
        total = sum(self.microbatch_counts)
        if total != self.num_microbatches:
            counts = " + ".join(map(str, self.microbatch_counts))
            raise BadInputError(
                f"Micro-batches {counts} = {total}; the step has {self.num_microbatches}."
            )
        self._check_gpus()

    def _check_gpus(self) -> None:
        seen: set[int] = set()
        for gpu in self.all_gpus():
            if gpu < 0:
                raise BadInputError(f"GPU {gpu}: numbers start at 0.")
            if gpu in seen:
                raise BadInputError(f"GPU {gpu} stands in the plan twice.")
            seen.add(gpu)

    @property
    def microbatch_counts(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        return tuple(pipeline.num_microbatches for pipeline in self.pipelines)

    def all_gpus(self) -> Iterator[int]:
        """Every GPU, those on standby last."""
        for pipeline in self.pipelines:
            yield from pipeline.gpus
        yield from self.standby

    def same_layout(self, other: "Plan") -> bool:
        """True if only micro-batch counts differ: nothing has to move."""
        return self.standby == other.standby and [p.stages for p in self.pipelines] == [
            p.stages for p in other.pipelines
        ]

    def with_counts(self, counts: tuple[int, ...], predicted: Prediction | None = None) -> "Plan":
        """The same layout with other micro-batch counts, one a pipeline.

        Raises:
            BadInputError: a number of counts that is not the number of pipelines, or a count < 1.
        """
        if len(counts) != len(self.pipelines):
            raise BadInputError(f"{len(counts)} counts for {len(self.pipelines)} pipelines.")
        return Plan(
            num_layers=self.num_layers,
            num_microbatches=sum(counts),
            objective=self.objective,
            standby=self.standby,
            predicted=predicted,
            pipelines=tuple(
                Pipeline(num_microbatches=count, stages=pipeline.stages)
                for count, pipeline in zip(counts, self.pipelines, strict=True)
            ),
        )


def check_world(plan: Plan, world_size: int) -> None:
    """Refuse a plan that was made for another number of GPUs.

    Raises:
        BadInputError: GPUs of the plan are not exactly 0 .. world_size - 1.
    """
    gpus = sorted(plan.all_gpus())
    if gpus != list(range(world_size)):
        raise BadInputError(
            f"The plan is for {len(gpus)} GPUs ({_span(gpus)}); the job has {world_size} "
            f"({_span(list(range(world_size)))}). Make a plan for this job; GPUs without "
            "layers belong into its `standby` list."
        )


def _span(gpus: list[int]) -> str:
    if not gpus:
        return "none"
    if gpus == list(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}..{gpus[-1]}"
    return ", ".join(map(str, gpus))
