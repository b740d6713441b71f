"""A job that gives up nodes with stragglers: what one does without malleable plans."""

from collections.abc import Callable, Sequence

from malleus_megatron.control.policy import Policy
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.clock import StepClock, at_rates
from malleus_megatron.simulator.jobs import Change

type Layout = Callable[[Problem, Sequence[int]], Plan | None]
"""The best plan on some of the nodes, at the problem's rates; None if there is none."""
type Price = Callable[[Plan, Plan], Change]
"""What it takes to go from one plan to another."""


class DroppingJob:
    """Runs on all nodes, or without those of the slowest stragglers, whichever is fastest.

    It acts when the same change has promised `min_gain` for as many iterations as pass before the
    controller acts on a large shift: a window until a straggler is named, patience that counts from
    then on, and one iteration from offer to switch.
    """

    def __init__(
        self, clock: StepClock, nominal: Plan, policy: Policy, *, layout: Layout, price: Price
    ) -> None:
        """Start under the nominal plan."""
        self._clock = clock
        self._nominal = nominal
        self._policy = policy
        self._layout = layout
        self._price = price
        self._plan = nominal
        self._best: dict[Rates, Plan] = {}
        self._wanted: Plan | None = None
        self._streak = 0
        self._patience = policy.window + policy.patience

    @property
    def plan(self) -> Plan:
        """In force in the next iteration."""
        return self._plan

    @property
    def is_settled(self) -> bool:
        """True if the last iteration's rates give no reason for another plan."""
        return self._wanted == self._plan

    def after(self, iteration: int, rates: Rates) -> Change | None:  # noqa: ARG002
        """Change once a gain has lasted."""
        wanted = self._target(rates)
        self._streak = self._streak + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted == self._plan or self._streak < self._patience:
            return None
        change = self._price(self._plan, wanted)
        self._plan = wanted
        return change

    def _target(self, rates: Rates) -> Plan:
        """The best plan at these rates, or the present one where that is nearly as good."""
        if rates not in self._best:
            self._best[rates] = min(
                self._plans(rates), key=lambda plan: self._clock.step_s(plan, rates)
            )
        best = self._best[rates]
        best_s, now_s = (self._clock.step_s(plan, rates) for plan in (best, self._plan))
        return best if 1 - best_s / now_s > self._policy.min_gain else self._plan

    def _plans(self, rates: Rates) -> list[Plan]:
        """Without the node of the worst straggler, of the two worst, and so on; all nodes first."""
        problem = at_rates(self._clock.problem, rates)
        node_of = problem.cluster.node_by_gpu()
        worst: dict[int, float] = {}
        for gpu, rate in rates:
            if rate > self._policy.threshold:
                worst[node_of[gpu]] = max(rate, worst.get(node_of[gpu], rate))
        slowest_first = sorted(worst, key=lambda node: (-worst[node], node))
        plans = [self._nominal]
        for number in range(1, len(slowest_first) + 1):
            dropped = set(slowest_first[:number])
            kept = [n for n in range(len(problem.cluster.gpus_per_node)) if n not in dropped]
            plan = self._layout(problem, kept)
            if plan is not None:
                plans.append(plan)
        return plans
