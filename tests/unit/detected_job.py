"""A job whose true rates are known, as its controller sees it; it takes offers as jobs do."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from malleus_megatron.config import Level
from malleus_megatron.control.controller import Controller
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, Freedom, JobDescription, Observation
from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.microbatches import scaled_counts
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Pipeline, Plan, Stage

LAYER_S = {1: 0.072, 2: 0.04, 4: 0.024, 8: 0.016}
"""A healthy GPU's layer; smaller groups take less than perfect scaling says."""

type Spread = Callable[[int, int], float]
"""Iteration and GPU -> what its times are multiplied with."""


def grid(tp: int = 2, *, pp: int = 2, dp: int = 2, layers: int = 8) -> Plan:
    return nominal_plan(
        num_layers=layers,
        num_microbatches=8 * dp,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )


def staged(*pipelines: tuple[tuple[int, int], ...], num_microbatches: int = 16) -> Plan:
    """GPUs in order: each pipeline's stages as (TP degree, layers)."""
    gpu, made = 0, []
    counts = scaled_counts([1] * len(pipelines), num_microbatches)
    for stages, count in zip(pipelines, counts, strict=True):
        layer, built = 0, []
        for degree, layers in stages:
            gpus = tuple(range(gpu, gpu + degree))
            built.append(Stage(gpus=gpus, layers=(layer, layer + layers)))
            gpu, layer = gpu + degree, layer + layers
        made.append(Pipeline(num_microbatches=count, stages=tuple(built)))
    return Plan(num_layers=layer, num_microbatches=num_microbatches, pipelines=tuple(made))


def noisy(seed: int, spread: float) -> Spread:
    """Each GPU's times vary from iteration to iteration, whatever happens elsewhere."""
    rng = random.Random(seed)
    return lambda _iteration, _gpu: max(0.05, rng.gauss(1.0, spread))


@dataclass
class DetectedJob:
    """Runs iterations under its plan; an offer made after iteration k holds from k + 2 on."""

    nominal: Plan
    present: Plan | None = None
    level: Level = Level.observe
    policy: Policy = field(default_factory=Policy)
    spread: Spread = lambda _iteration, _gpu: 1.0
    head: float = 0.0
    """In layers."""
    unit_s: float = 1.0
    """All times are multiplied with it."""
    collectives_s: float | None = None
    """What those inside a layer of a TP group take, if they are timed: on GPUs."""
    sizes: tuple[int, ...] = (1, 2, 4)
    probe_every: int = 1
    knows_layer_times: bool = False
    """Of every degree, beforehand."""
    plan: Plan = field(init=False)
    decisions: list[Decision] = field(init=False, default_factory=list)
    changes: list[int] = field(init=False, default_factory=list)
    """First iterations under another plan."""

    def __post_init__(self) -> None:
        self.plan = self.present or self.nominal
        num_gpus = len(list(self.nominal.all_gpus()))
        freedom = Freedom(
            cluster=Cluster(gpus_per_node=(num_gpus,)),
            tensor_parallel_sizes=self.sizes,
            layer_time_s=tuple(sorted(LAYER_S.items())) if self.knows_layer_times else (),
        )
        self.job = JobDescription(
            nominal=self.nominal, present=self.present, level=self.level, freedom=freedom
        )
        self.controller = Controller(self.job, self.policy, clock=lambda: 0.0)

    @property
    def iteration(self) -> int:
        """The last one that ran."""
        return len(self.decisions)

    @property
    def ever_named(self) -> set[int]:
        return {gpu for decision in self.decisions for gpu in decision.stragglers}

    def run(self, iterations: int, rates: Mapping[int, float] | None = None) -> Decision:
        """Train with these rates and return what the last iteration showed."""
        for _ in range(iterations):
            waiting = self.decisions[-1].offer if self.decisions else None
            self.decisions.append(self.controller.observe(self.observation(rates or {})))
            if waiting is not None:
                self.switch(waiting)
        return self.decisions[-1] if self.decisions else Decision(iteration=0)

    def switch(self, plan: Plan) -> None:
        self.plan = plan
        self.changes.append(self.iteration + 1)
        self.controller.relaid(replace(self.job, present=plan))

    def observation(self, rates: Mapping[int, float]) -> Observation:
        iteration = self.iteration + 1
        samples = tuple(
            sample
            for pipeline in self.plan.pipelines
            for stage in pipeline.stages
            for sample in self._waiting(
                [
                    self._sample(iteration, gpu, stage, rate, stage is pipeline.stages[-1])
                    for gpu in stage.gpus
                    for rate in (rates.get(gpu, 1.0),)
                ]
            )
        )
        probes = tuple((gpu, rates.get(gpu, 1.0)) for gpu in self.plan.standby)
        return Observation(
            iteration=iteration,
            generation=len(self.changes),
            plan_id=plan_id(self.plan),
            microbatch_counts=self.plan.microbatch_counts,
            samples=samples,
            probes=probes if iteration % self.probe_every == 0 else (),
        )

    def _waiting(self, group: list[Sample]) -> list[Sample]:
        """A TP group's, each waiting for the slowest in its collectives."""
        if self.collectives_s is None or len(group) == 1:
            return group
        slowest_s = max(sample.layer_s for sample in group)
        return [
            replace(s, layer_collectives_s=self.collectives_s + slowest_s - s.layer_s)
            for s in group
        ]

    def _sample(self, iteration: int, gpu: int, stage: Stage, rate: float, last: bool) -> Sample:
        layer_s = LAYER_S[len(stage.gpus)] * rate * self.spread(iteration, gpu) * self.unit_s
        stage_s = layer_s * (stage.num_layers + self.head * last)
        return Sample(
            gpu=gpu,
            iteration=iteration,
            layer_forward_s=layer_s / 3,
            layer_backward_s=layer_s * 2 / 3,
            stage_forward_s=stage_s / 3,
            stage_backward_s=stage_s * 2 / 3,
            num_layers=stage.num_layers,
            num_microbatches=8,
        )
