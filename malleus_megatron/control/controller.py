"""When to re-plan: a state machine that sees one iteration after the other."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from malleus_megatron.config import Level
from malleus_megatron.control.offers import Offers
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.rebalance import rebalanced
from malleus_megatron.control.values import Decision, JobDescription, Observation
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.rates import estimate_rates
from malleus_megatron.detector.samples import Sample
from malleus_megatron.detector.stages import (
    StageTimes,
    healthy_stage_times,
    measured_stage_times,
)
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.plan import Plan, PlanningNote
from malleus_megatron.plan.rates import HEALTHY, Rates
from malleus_megatron.planner.batches import balance_microbatches


class Controller:
    """Same observations, same decisions: no clock, file or network decides anything here.

    Samples stay in the window when the counts change, since the time of one micro-batch does not
    depend on them. Another layout is another job: make a new controller.
    """

    def __init__(
        self, job: JobDescription, policy: Policy, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start with nothing seen; the clock only notes how long planning took."""
        self.job = job
        self.policy = policy
        self.offers = Offers()
        self.seen: Observation | None = None
        self.decision: Decision | None = None
        self._clock = clock
        self._gpus = sorted(job.nominal.all_gpus())
        self._window: deque[tuple[Sample, ...]] = deque()
        self._stragglers: tuple[int, ...] = ()
        self._streak = 0
        self._sure_streak = 0

    def observe(self, observation: Observation) -> Decision:
        """Take in one iteration and say what it shows.

        An iteration that is not after the last one means that the job went back, to a checkpoint
        say: what was seen before is forgotten.

        Raises:
            BadInputError: counts or GPUs of another layout than the job's.
        """
        self._check(observation)
        if self.seen is not None and observation.iteration <= self.seen.iteration:
            self._start_over()
        self.seen = observation
        self.offers.settle(observation, self.policy.offer_timeout_iterations)
        self._window.append(observation.samples)
        while len(self._window) > self.policy.window:
            self._window.popleft()
        self.decision = self._decide(observation)
        return self.decision

    def reject(self, rejected: str, why: str) -> None:
        """The job does not want the plan with this id; it rests for a while."""
        iteration = 0 if self.seen is None else self.seen.iteration
        rests_until = iteration + self.policy.offer_timeout_iterations
        self.offers.reject(rejected, why, rests_until=rests_until)

    def _decide(self, observation: Observation) -> Decision:
        if len(self._window) < self.policy.window:
            return Decision(iteration=observation.iteration)
        estimate = estimate_rates(self._window, self._gpus, threshold=self.policy.threshold)
        decision = Decision(
            iteration=observation.iteration,
            rates=estimate.rates,
            stragglers=self._name_stragglers(estimate.rates),
            ignored=estimate.ignored,
        )
        stages = measured_stage_times(self._window, self.job.nominal)
        if stages is None:
            return decision
        return replace(
            decision,
            step_time_s=step_time_s(stages, observation.microbatch_counts),
            offer=self._offer(observation, stages, estimate.rates),
        )

    def _name_stragglers(self, rates: Rates) -> tuple[int, ...]:
        """Those above the threshold, and those named before that are not clearly below it."""
        cleared = (HEALTHY + self.policy.threshold) / 2
        self._stragglers = tuple(
            gpu
            for gpu, rate in rates
            if rate > (cleared if gpu in self._stragglers else self.policy.threshold)
        )
        return self._stragglers

    def _offer(self, observation: Observation, stages: StageTimes, rates: Rates) -> Plan | None:
        """A better plan, if the gain has lasted and the job can be asked now."""
        if self.job.level < Level.rebalance:
            return None
        start_s = self._clock()
        counts, min_gain = observation.microbatch_counts, self.policy.min_gain
        plan = rebalanced(self.job.nominal, counts, stages, min_gain=min_gain)
        if plan is None:
            self._streak = self._sure_streak = 0
        if plan is None or not self._lasts(observation, stages, plan):
            return None
        if not self.offers.may_make(plan_id(plan), observation.iteration):
            return None
        self.offers.make(plan_id(plan), observation)
        plan = self._with_healthy_time(plan, rates)
        return replace(plan, planning=PlanningNote(seconds=self._clock() - start_s, seed=0))

    def _lasts(self, observation: Observation, stages: StageTimes, plan: Plan) -> bool:
        """Count iterations in a row with a gain, and those with a sure one: fewer are enough."""
        now_s = step_time_s(stages, observation.microbatch_counts)
        gain = 1 - step_time_s(stages, plan.microbatch_counts) / now_s
        self._streak += 1
        self._sure_streak = self._sure_streak + 1 if gain >= self.policy.sure_gain else 0
        return (
            self._sure_streak >= self.policy.patience or self._streak >= self.policy.long_patience
        )

    def _with_healthy_time(self, plan: Plan, rates: Rates) -> Plan:
        stages = healthy_stage_times(self._window, self.job.nominal, rates)
        if stages is None or plan.predicted is None:
            return plan
        healthy = balance_microbatches(stages, plan.num_microbatches)
        predicted = replace(plan.predicted, healthy_step_time_s=healthy.step_time_s)
        return replace(plan, predicted=predicted)

    def _start_over(self) -> None:
        self.offers = Offers()
        self._window.clear()
        self._stragglers = ()
        self._streak = self._sure_streak = 0

    def _check(self, observation: Observation) -> None:
        counts, pipelines = len(observation.microbatch_counts), len(self.job.nominal.pipelines)
        if counts != pipelines:
            raise BadInputError(
                f"Iteration {observation.iteration}: micro-batches of {counts} pipelines; the "
                f"job's layout has {pipelines}. Describe the job anew after a change of layout."
            )
        strangers = {sample.gpu for sample in observation.samples}.difference(self._gpus)
        if strangers:
            raise BadInputError(
                f"Iteration {observation.iteration}: samples of GPUs {sorted(strangers)}; "
                f"the job's layout has {len(self._gpus)} GPUs and not these."
            )
