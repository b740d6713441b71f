"""A job that the product's own controller steers, with simulated samples."""

from dataclasses import dataclass, replace

from malleus_megatron.config import Level
from malleus_megatron.control.controller import Controller
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Freedom, JobDescription
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.jobs import Change
from malleus_megatron.simulator.samples import Sampler
from malleus_megatron.simulator.states import StateMover


@dataclass(frozen=True, slots=True, kw_only=True)
class Liberty:
    """How much of its plan a job may change."""

    level: Level
    tensor_parallel_sizes: tuple[int, ...] = ()
    """Ascending; at level reshape at least one."""

    def describe(self, problem: Problem, nominal: Plan) -> JobDescription:
        """The job as its controller knows it: layer times of the problem are known beforehand."""
        freedom = (
            Freedom(
                cluster=problem.cluster,
                tensor_parallel_sizes=self.tensor_parallel_sizes,
                layer_time_s=problem.model.layer_time_s,
                memory=problem.model.memory,
            )
            if self.level >= Level.reshape
            else None
        )
        return JobDescription(nominal=nominal, level=self.level, freedom=freedom)


class ControlledJob:
    """An offer is answered as in a job: made after iteration k, in force from k + 2 on."""

    def __init__(
        self,
        description: JobDescription,
        policy: Policy,
        sampler: Sampler,
        mover: StateMover,
    ) -> None:
        """Start under the nominal plan, generation 0."""
        self._job = description
        self._policy = policy
        self._sampler = sampler
        self._mover = mover
        self._controller = Controller(description, policy, clock=lambda: 0.0)
        self._plan = description.nominal
        self._generation = 0
        self._offer: Plan | None = None
        self._rates: Rates | None = None
        self._quiet = 0

    @property
    def plan(self) -> Plan:
        """In force in the next iteration."""
        return self._plan

    @property
    def is_settled(self) -> bool:
        """True once every count of the controller has run out without an offer."""
        policy = self._policy
        longest = max(policy.patience, policy.long_patience, policy.window, policy.long_window)
        return self._quiet > policy.window + longest + policy.offer_timeout_iterations

    def after(self, iteration: int, rates: Rates) -> Change | None:
        """Show the controller the iteration, and take the offer that it made one before."""
        observation = self._sampler.observation(
            self._plan, rates, iteration=iteration, generation=self._generation
        )
        waiting, self._offer = self._offer, self._controller.observe(observation).offer
        new = rates != self._rates or waiting is not None or self._offer is not None
        self._quiet = 0 if new else self._quiet + 1
        self._rates = rates
        return None if waiting is None else self._switch(waiting)

    def _switch(self, plan: Plan) -> Change:
        cost = self._mover.cost(self._plan, plan)
        self._plan = plan
        self._generation += 1
        took_s = cost.seconds if cost.moved_bytes else self._job.switch_s
        self._job = replace(self._job, present=plan, switch_s=took_s)
        self._controller.relaid(self._job)
        return Change(plan=plan, pause_s=cost.seconds, moved_bytes=cost.moved_bytes)
