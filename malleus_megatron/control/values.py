"""What the controller is told, and what it says."""

import math
from collections import Counter
from dataclasses import dataclass, field

from malleus_megatron.config import Level
from malleus_megatron.detector.degrees import TimesByDegree
from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.plan import Plan, check_world
from malleus_megatron.plan.problem import ModelMemory
from malleus_megatron.plan.rates import Rates, check_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What a plan at level reshape may use."""

    cluster: Cluster
    tensor_parallel_sizes: tuple[int, ...]
    """Degrees that the model's widths allow, ascending."""
    layer_time_s: TimesByDegree = ()
    """Healthy forward plus backward of a layer and micro-batch, where known beforehand."""
    memory: ModelMemory | None = None
    """None: plans are not limited by memory, and neither may the cluster be."""

    def __post_init__(self) -> None:
        """Refuse degrees and times with which no plan could be made."""
        sizes = self.tensor_parallel_sizes
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise BadInputError(
                f"tensor_parallel_sizes: {list(sizes)}; need at least one, ascending, from 1."
            )
        degrees = [degree for degree, _ in self.layer_time_s]
        if degrees != sorted(set(degrees)) or any(
            degree < 1 or not 0 < time_s < math.inf for degree, time_s in self.layer_time_s
        ):
            raise BadInputError(
                f"layer_time_s: {list(self.layer_time_s)}; need one time above 0 for each degree, "
                "ascending."
            )
        if self.cluster.memory_mib is not None and self.memory is None:
            raise BadInputError("cluster.memory_mib is given, but the model's memory is not.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """A job: its recipe's layout, the one in force, and how much of it may change."""

    nominal: Plan
    """The recipe's layout; its micro-batches are the stock way to share a step."""
    level: Level
    freedom: Freedom | None = None
    """None below level reshape."""
    present: Plan | None = None
    """The layout in force; None: the nominal one."""
    switch_s: float | None = None
    """What a change of layout takes, as the last ones did; None: there was none yet."""

    def __post_init__(self) -> None:
        """Refuse a present plan or a cluster of another job, and a switch that takes no time.

        Raises:
            BadInputError: with both numbers.
        """
        num_gpus = len(list(self.nominal.all_gpus()))
        if self.present is not None:
            check_world(self.present, num_gpus)
            if self.present.num_layers != self.nominal.num_layers:
                raise BadInputError(
                    f"The present plan has {self.present.num_layers} layers; the nominal plan has "
                    f"{self.nominal.num_layers}."
                )
        if self.switch_s is not None and not 0 <= self.switch_s < math.inf:
            raise BadInputError(f"A change of layout cannot take {self.switch_s} s.")
        if self.freedom is not None and self.freedom.cluster.num_gpus != num_gpus:
            raise BadInputError(
                f"The cluster has {self.freedom.cluster.num_gpus} GPUs; the job has {num_gpus}."
            )

    @property
    def layout(self) -> Plan:
        """Whose stages and GPUs are in force."""
        return self.nominal if self.present is None else self.present

    @property
    def may_reshape(self) -> bool:
        """True if stages, layers and TP groups may change."""
        return self.level >= Level.reshape and self.freedom is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One iteration: who had how many micro-batches, and what the GPUs measured."""

    iteration: int
    generation: int
    plan_id: str
    """Of the plan that the iteration ran under."""
    microbatch_counts: tuple[int, ...]
    """Micro-batches of each pipeline; their sum is the step's, which may change in a job."""
    samples: tuple[Sample, ...]
    probes: tuple[tuple[int, float], ...] = ()
    """Pairs (standby GPU, rate) where the job probes them: time of a probe over a healthy one's."""

    def __post_init__(self) -> None:
        """Refuse a pipeline without micro-batches, a GPU that speaks twice, a probe of nothing."""
        if not self.microbatch_counts or min(self.microbatch_counts) < 1:
            raise BadInputError(
                f"Iteration {self.iteration}: micro-batches {list(self.microbatch_counts)}; "
                "every pipeline has at least 1."
            )
        speakers = Counter(sample.gpu for sample in self.samples)
        twice = sorted(gpu for gpu, times in speakers.items() if times > 1)
        if twice:
            raise BadInputError(f"Iteration {self.iteration}: several samples of GPUs {twice}.")
        for gpu, rate in self.probes:
            check_rate(gpu, rate)

    @property
    def num_microbatches(self) -> int:
        """Of the whole step."""
        return sum(self.microbatch_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """When a straggler was found out."""

    gpu: int
    since: int
    """The iteration in which it first stood out."""
    named: int
    """The iteration after which that was certain."""

    @property
    def delay(self) -> int:
        """Iterations from the one to the other."""
        return self.named - self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an iteration showed. Without rates: too little was seen yet."""

    iteration: int
    rates: Rates = field(default_factory=Rates)
    """Measured, and the last ones known of GPUs that are not measured now."""
    stragglers: tuple[int, ...] = ()
    detections: tuple[Detection, ...] = ()
    """One for each straggler."""
    common_rate: float = 1.0
    """Of all healthy GPUs together, against the best that they did in this job or against times
    that were known beforehand; 1 below the threshold."""
    ignored: tuple[int, ...] = ()
    """GPUs that gave no usable sample in this iteration."""
    step_time_s: float | None = None
    """Predicted for the counts that the job has now."""
    offer: Plan | None = None
    """A plan that the job should change to."""
    asks_probe: bool = False
    """Somebody wants all GPUs probed at the next iteration boundary."""
    warning: str = ""
    """Why there is no better plan, where the planner found none; or that all GPUs are slow."""
