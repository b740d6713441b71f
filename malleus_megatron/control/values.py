"""What the controller is told, and what it says."""

from collections import Counter
from dataclasses import dataclass, field

from malleus_megatron.config import Level
from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """What stays the same while the job runs: its layout, and how much of it may change."""

    nominal: Plan
    """Its stages and GPUs are the layout; its micro-batches are the stock way to share a step."""
    level: Level


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

    def __post_init__(self) -> None:
        """Refuse a pipeline without micro-batches and a GPU that speaks twice."""
        if not self.microbatch_counts or min(self.microbatch_counts) < 1:
            raise BadInputError(
                f"Iteration {self.iteration}: micro-batches {list(self.microbatch_counts)}; "
                "every pipeline has at least 1."
            )
        speakers = Counter(sample.gpu for sample in self.samples)
        twice = sorted(gpu for gpu, times in speakers.items() if times > 1)
        if twice:
            raise BadInputError(f"Iteration {self.iteration}: several samples of GPUs {twice}.")

    @property
    def num_microbatches(self) -> int:
        """Of the whole step."""
        return sum(self.microbatch_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an iteration showed. Without rates: too little was seen yet."""

    iteration: int
    rates: Rates = field(default_factory=Rates)
    stragglers: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    """GPUs that gave no usable sample in this iteration."""
    step_time_s: float | None = None
    """Predicted for the counts that the job has now."""
    offer: Plan | None = None
    """A plan that the job should change to."""
