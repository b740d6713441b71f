"""What the controller is told, and what it says."""

from collections import Counter
from dataclasses import dataclass

from malleus_megatron.config import Level
from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """What stays the same while the job runs: its layout, and how much of it may change."""

    plan: Plan
    """The plan that the job starts under; its stages and GPUs are the layout."""
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One iteration: who had how many micro-batches, and what the GPUs measured."""

    iteration: int
    plan_id: str
    """Of the plan that the iteration ran under."""
    counts: tuple[int, ...]
    """Micro-batches of each pipeline; their sum is the step's, which may change in a job."""
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        """Refuse a pipeline without micro-batches and a GPU that speaks twice."""
        if not self.counts or min(self.counts) < 1:
            raise BadInputError(
                f"Iteration {self.iteration}: micro-batches {list(self.counts)}; "
                "every pipeline has at least 1."
            )
        speakers = Counter(sample.gpu for sample in self.samples)
        twice = sorted(gpu for gpu, times in speakers.items() if times > 1)
        if twice:
            raise BadInputError(f"Iteration {self.iteration}: several samples of GPUs {twice}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an iteration showed. Without rates: too little was seen yet."""

    iteration: int
    rates: Rates = Rates()
    stragglers: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    """GPUs that gave no usable sample in this iteration."""
    step_time_s: float | None = None
    """Predicted for the counts that the job has now."""
    offer: Plan | None = None
    """A plan that the job should change to."""
