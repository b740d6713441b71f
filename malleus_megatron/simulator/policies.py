"""The policies by name, and a whole simulation: one trace, several of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.injection import Injection
from malleus_megatron.plan.limits import LONGEST_S, check_within
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.clock import StepClock, StepSettings
from malleus_megatron.simulator.controlled import ControlledJob, Liberty
from malleus_megatron.simulator.dropping import DroppingJob, Layout, Price
from malleus_megatron.simulator.grids import nominal_plan, templates_on, uniform_on
from malleus_megatron.simulator.jobs import Change, Job, StockJob
from malleus_megatron.simulator.limits import lost_throughput, proved_step_s
from malleus_megatron.simulator.replay import Run, replay, replay_known
from malleus_megatron.simulator.samples import Sampler
from malleus_megatron.simulator.states import MigrationSettings, StateMover, StateSizes
from malleus_megatron.simulator.trace import Situation, situations

BOUND, CAPACITY = "bound", "capacity"
POLICIES = {
    "malleus": "the product's controller and planner at level reshape",
    "stock": "the nominal plan, whatever happens",
    "rebalance": "the controller at level rebalance: only micro-batches move",
    "equal-tp": "the controller at level reshape, with the nominal TP degrees only",
    "templates": "give up nodes with stragglers; pipelines of whole nodes, as Oobleck makes them",
    "restart": "give up nodes with stragglers; restart from a checkpoint with a uniform plan",
    BOUND: "no plan is faster: proved",
    CAPACITY: "the healthy step, longer by the share of throughput that is lost",
}
MOST_ITERATIONS = 100_000_000
MOST_PROVED = 4096
"""Up to so many GPUs times situations the planner proves the bound: seconds for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What problem and trace do not say. None of it is measured: see docs/simulate.md."""

    step: StepSettings = field(default_factory=StepSettings)
    migration: MigrationSettings = field(default_factory=MigrationSettings)
    states: StateSizes = field(default_factory=StateSizes)
    restart_s: float = 300.0
    """Checkpoint, end, start and load."""
    control: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        """Refuse a restart that takes no time that there is."""
        check_within("restart seconds", self.restart_s, 0, LONGEST_S, unit=" s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What all policies are compared with, and their runs."""

    num_iterations: int
    healthy_step_s: float
    """Of the nominal plan."""
    trace: tuple[Situation, ...]
    bound: Run
    bound_by: str
    """`planner`, or `closed form` where the planner would take too long."""
    capacity: Run
    runs: tuple[Run, ...]


def check_policies(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once.

    Raises:
        BadInputError: an unknown name, or none.
    """
    wanted = tuple(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in POLICIES]
    if unknown or not wanted:
        raise BadInputError(
            f"Policy {unknown[0]!r} is unknown; known: {', '.join(POLICIES)}."
            if unknown
            else f"No policy is named; known: {', '.join(POLICIES)}."
        )
    return wanted


def simulate(
    problem: Problem,
    injection: Injection,
    *,
    num_iterations: int,
    names: Iterable[str],
    settings: Settings,
    tell: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Play the trace under each policy. The same input gives the same result.

    Args:
        problem: The job. Its own rates and its rate floor play no part.
        injection: The trace.
        num_iterations: From 1 on.
        names: Of the policies.
        settings: Everything else.
        tell: Told each policy's name when its turn comes.

    Raises:
        BadInputError: what does not fit, with the numbers.
        InfeasiblePlanError: the problem has no nominal plan.
    """
    wanted = check_policies(names)
    check_within("iterations", num_iterations, 1, MOST_ITERATIONS)
    injection.check_gpus(problem.cluster.num_gpus)
    world = World(problem, settings)
    trace = situations(injection, num_iterations)
    thorough = problem.cluster.num_gpus * len(trace) <= MOST_PROVED
    tell(BOUND)
    references = {
        BOUND: replay_known(BOUND, trace, partial(world.bound_s, thorough=thorough)),
        CAPACITY: replay_known(CAPACITY, trace, world.capacity_s),
    }
    runs = []
    for name in wanted:
        if name in references:
            runs.append(references[name])
            continue
        tell(name)
        runs.append(replay(name, world.job(name), trace, world.clock.step_s))
    return Simulation(
        num_iterations=num_iterations,
        healthy_step_s=world.healthy_s,
        trace=trace,
        bound=references[BOUND],
        bound_by="planner" if thorough else "closed form",
        capacity=references[CAPACITY],
        runs=tuple(runs),
    )


class World:
    """What the policies of one simulation share."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        """Make the nominal plan; from here on the problem has no plan and no rates of its own."""
        self._settings = settings
        self.nominal = nominal_plan(problem)
        self._problem = replace(problem, rates=Rates(), current_plan=None)
        self.clock = StepClock(self._problem, settings.step)
        self.healthy_s = self.clock.step_s(self.nominal, Rates())
        self._mover = StateMover(problem.cluster, settings.migration, settings.states)

    def bound_s(self, rates: Rates, *, thorough: bool) -> float:
        """What no plan is faster than."""
        fixed_s = self._settings.step.gradient_sum_s
        return proved_step_s(self._problem, rates, thorough=thorough) + fixed_s

    def capacity_s(self, rates: Rates) -> float:
        """The healthy step, longer by the share of throughput that is lost."""
        fixed_s = self._settings.step.gradient_sum_s
        return (self.healthy_s - fixed_s) * lost_throughput(self._problem, rates) + fixed_s

    def job(self, name: str) -> Job:
        """A job under a policy that is no bound, as it starts."""
        if name == "stock":
            return StockJob(plan=self.nominal)
        if name == "restart":
            return self._dropping(uniform_on, self._restarted)
        if name == "templates":
            most = len(self.nominal.pipelines)
            return self._dropping(
                lambda problem, nodes: templates_on(problem, nodes, most), self._moved
            )
        return self._controlled(self._liberty(name))

    def _liberty(self, name: str) -> Liberty:
        if name == "rebalance":
            return Liberty(level=Level.rebalance)
        sizes: Iterable[int] = self._problem.tensor_parallel_sizes
        if name == "equal-tp":
            stages = (stage for pipeline in self.nominal.pipelines for stage in pipeline.stages)
            sizes = {len(stage.gpus) for stage in stages}
        return Liberty(level=Level.reshape, tensor_parallel_sizes=tuple(sorted(sizes)))

    def _controlled(self, liberty: Liberty) -> ControlledJob:
        return ControlledJob(
            liberty.describe(self._problem, self.nominal),
            self._settings.control,
            Sampler(self._problem.model, self._settings.step.forward_share),
            self._mover,
        )

    def _dropping(self, layout: Layout, price: Price) -> DroppingJob:
        return DroppingJob(
            self.clock, self.nominal, self._settings.control, layout=layout, price=price
        )

    def _restarted(self, before: Plan, after: Plan) -> Change:  # noqa: ARG002
        return Change(plan=after, pause_s=self._settings.restart_s)

    def _moved(self, before: Plan, after: Plan) -> Change:
        cost = self._mover.cost(before, after)
        return Change(plan=after, pause_s=cost.seconds, moved_bytes=cost.moved_bytes)
