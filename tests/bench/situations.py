"""The seven situations that policies are compared in, and what is known of them beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Model, Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.batches import balance_microbatches
from malleus_megatron.planner.search import make_plan
from tests.harness.training import Grid

NODES = (4, 4)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Which GPUs are slow, and for how many iterations a closed loop is shown it."""

    name: str
    rates: Mapping[int, float] = field(default_factory=dict)
    held: int = 10
    """More where GPUs heal at its beginning: that is believed later than that they slow down."""


NODE = 2.35
SITUATIONS = (
    Situation(name="healthy", held=7),
    Situation(name="one GPU at 2.57", rates={2: 2.57}),
    Situation(name="one GPU at 5.42", rates={2: 5.42}),
    Situation(name="one GPU at 12.53", rates={2: 12.53}),
    Situation(name="two on two nodes", rates={2: 2.57, 5: 5.42}, held=17),
    Situation(name="a whole node at 2.35", rates=dict.fromkeys(range(4), NODE), held=17),
    Situation(name="three", rates={2: 2.57, 5: 5.42, 7: 12.53}, held=17),
    Situation(name="healthy again", held=17),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The job: its grid and how long a layer takes by TP degree (paced)."""

    grid: Grid
    layer_s: Mapping[int, float]

    @property
    def pace(self) -> dict[str, dict[str, float]]:
        """pace.json: a third of a layer's time is its forward."""
        return {
            "layer_forward_s": {str(degree): time / 3 for degree, time in self.layer_s.items()},
            "layer_backward_s": {
                str(degree): 2 * time / 3 for degree, time in self.layer_s.items()
            },
        }

    def problem(self, rates: Mapping[int, float] | None = None) -> Problem:
        """What the planner is asked, with as many pipelines as the recipe has."""
        return Problem(
            cluster=Cluster(gpus_per_node=NODES),
            model=Model(
                num_layers=self.grid.num_layers,
                layer_time_s=tuple(sorted(self.layer_s.items())),
            ),
            num_microbatches=self.grid.num_microbatches,
            tensor_parallel_sizes=tuple(sorted(self.layer_s)),
            num_pipelines=self.grid.pipelines,
            rates=Rates.of(dict(rates or {})),
        )

    @property
    def nominal(self) -> Plan:
        """The recipe's layout."""
        return nominal_plan(
            num_layers=self.grid.num_layers,
            num_microbatches=self.grid.num_microbatches,
            tensor_parallel_size=self.grid.tp,
            pipeline_parallel_size=self.grid.stages,
            data_parallel_size=self.grid.pipelines,
        )

    def bound_s(self, rates: Mapping[int, float]) -> float:
        """What no plan of so many pipelines is below, in the closed form of the step: proved."""
        predicted = make_plan(self.problem(rates)).predicted
        assert predicted is not None
        assert predicted.lower_bound is not None
        return predicted.lower_bound

    def split(self, rates: Mapping[int, float]) -> Plan:
        """The nominal layout with the micro-batches that suit the rates best."""
        times = plan_costs(self.problem(rates), self.nominal).stage_times_s
        total = self.grid.num_microbatches
        return self.nominal.with_counts(balance_microbatches(times, total).counts)


PACED = Work(
    grid=Grid(pipelines=2, stages=2, tp=2, num_layers=16, num_microbatches=32),
    layer_s={1: 0.125, 2: 0.066, 4: 0.0366},
)
"""Two cores hold this pace: a layer's forward and backward costs a rank some 8 ms of them."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A situation's iterations, from 1, half open."""

    situation: Situation
    start: int
    end: int


def spans(held: Sequence[int]) -> tuple[Span, ...]:
    """The situations one after the other, each for so many iterations."""
    found, start = [], 1
    for situation, number in zip(SITUATIONS, held, strict=True):
        found.append(Span(situation=situation, start=start, end=start + number))
        start += number
    return tuple(found)


def injection(trace: Sequence[Span]) -> Injection:
    """The trace as `--malleus-inject` takes it."""
    return Injection(
        entries=tuple(
            InjectedRate(gpu=gpu, rate=rate, from_iteration=span.start, to_iteration=span.end)
            for span in trace
            for gpu, rate in span.situation.rates.items()
        )
    )
