"""When to re-plan: a state machine that sees one iteration after the other."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from malleus_megatron.config import Level
from malleus_megatron.control.knowledge import Knowledge
from malleus_megatron.control.lives import Lives
from malleus_megatron.control.offers import Offers
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.rebalance import planned_stage_times, rebalanced
from malleus_megatron.control.replanning import Planned, Replanner
from malleus_megatron.control.reshape import Move, Terms, best_layout, reshape_problem, reshaped
from malleus_megatron.control.values import Decision, JobDescription, Observation
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.samples import Sample
from malleus_megatron.detector.stages import measured_stage_times
from malleus_megatron.errors import BadInputError, MalleusError
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.plan import Plan, PlanningNote
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import HEALTHY, Rates
from malleus_megatron.planner.batches import balance_microbatches
from malleus_megatron.planner.search import make_plan


class Controller:
    """Same observations, same decisions: no clock, file or network decides anything here.

    Samples stay in the window when the counts change, since the time of one micro-batch does not
    depend on them. They leave it when the layout changes (`relaid`); what was learned of the GPUs
    stays.
    """

    def __init__(
        self,
        job: JobDescription,
        policy: Policy,
        *,
        clock: Callable[[], float] = time.perf_counter,
        make: Callable[[Problem], Plan] = make_plan,
    ) -> None:
        """Start with nothing seen.

        Args:
            job: What the job is, and what may change of it.
            policy: The settings to begin with.
            clock: Only notes how long planning took.
            make: The planner.
        """
        self.job = job
        self.policy = policy
        self.offers = Offers()
        self.seen: Observation | None = None
        self.decision: Decision | None = None
        self._lives = Lives()
        self._asks_probe = False
        self._cause_since: int | None = None
        """When what plans depend on began to be as it is known now, if no offer was made since."""
        self._clock = clock
        self._replanner = Replanner(clock, make)
        self._gpus = frozenset(job.nominal.all_gpus())
        self._start_over()

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
        self._known.learn(observation, self.job.layout, self.policy)
        if self._known.had_lasted:
            self._cause_since = observation.iteration - self._known.had_lasted
        self._window.append(observation)
        while len(self._window) > self.policy.window:
            self._window.popleft()
        self.decision = self._decide(observation)
        return self.decision

    def relaid(self, job: JobDescription) -> None:
        """Go on with the same job under another layout or at another level.

        Rates, healthy times, settings and refusals stay. Samples of another layout say nothing of
        this one's stages and leave the window.

        Raises:
            BadInputError: another nominal plan: that is another job.
        """
        if job.nominal != self.job.nominal:
            raise BadInputError("Another nominal plan is another job, not another layout.")
        if not job.layout.same_layout(self.job.layout):
            self._forget_samples()
        self.job = job

    def reject(self, rejected: str, why: str) -> None:
        """The job does not want the plan with this id; it rests, longer each time."""
        iteration = 0 if self.seen is None else self.seen.iteration
        rest = self.offers.rest(rejected, self.policy.offer_timeout_iterations)
        rests_until = iteration + rest
        self.offers.reject(rejected, why, rests_until=rests_until)

    def ask_probe(self) -> None:
        """Have all GPUs probed: the next decision says so, once."""
        self._asks_probe = True

    def _decide(self, observation: Observation) -> Decision:
        decision = replace(self._shown(observation), asks_probe=self._asks_probe)
        self._asks_probe = False
        if len(self._window) < self.policy.window:
            return decision
        decision = replace(decision, ignored=self._known.ignored)
        stages = measured_stage_times(self._samples(), self.job.layout)
        if stages is None:
            return decision
        now_s = step_time_s(stages, observation.microbatch_counts)
        decision = replace(decision, step_time_s=now_s)
        if self.job.level < Level.rebalance:
            return decision
        rates = self._known.planned_rates
        if self.job.may_reshape and (rates.by_gpu or not self._runs_its_recipe()):
            return self._reshape(decision, observation, rates)
        self._lives = self._lives.after(observation.iteration, self.job.layout)
        return self._rebalance(decision, observation, rates)

    def _shown(self, observation: Observation) -> Decision:
        """What is known of the GPUs, and nothing decided."""
        known = self._known
        return Decision(
            iteration=observation.iteration,
            rates=known.rates,
            stragglers=tuple(detection.gpu for detection in known.detections),
            detections=known.detections,
            common_rate=known.common_rate,
            warning=""
            if known.common_rate == HEALTHY
            else f"All GPUs take {known.common_rate:.1f} times as long for a layer as at best; "
            "rates and stragglers are relative to that.",
        )

    def _runs_its_recipe(self) -> bool:
        return self.job.layout.same_layout(self.job.nominal)

    def _rebalance(self, decision: Decision, observation: Observation, rates: Rates) -> Decision:
        """Other micro-batches in the present layout."""
        start_s = self._clock()
        try:
            move = self._other_counts(observation, rates) if decision.rates.by_gpu else None
        except MalleusError as error:  # a failed GPU cannot be left out at this level
            self._streak = self._sure_streak = 0
            return _warned(decision, f"No other micro-batches can be planned: {error}")
        return self._offer(decision, observation, move, self._clock() - start_s)

    def _other_counts(self, observation: Observation, rates: Rates) -> Move | None:
        """The best ones by what the stages of the present layout take at these rates."""
        counts, layout = observation.microbatch_counts, self.job.layout
        stages = planned_stage_times(layout, self._known, rates)
        stock = self.job.nominal if self._runs_its_recipe() else layout
        plan = rebalanced(stock, counts, stages, min_gain=self.policy.min_gain)
        if plan is None or plan.predicted is None:
            return None
        gain = 1 - step_time_s(stages, plan.microbatch_counts) / step_time_s(stages, counts)
        healthy = planned_stage_times(layout, self._known, Rates())
        healthy_s = balance_microbatches(healthy, plan.num_microbatches).step_time_s
        predicted = replace(plan.predicted, healthy_step_time_s=healthy_s)
        return Move(plan=replace(plan, predicted=predicted), gain=gain)

    def _reshape(self, decision: Decision, observation: Observation, rates: Rates) -> Decision:
        """Another layout, another split of the present one, or back to the nominal plan."""
        counts = observation.microbatch_counts
        try:
            problem = reshape_problem(self.job, self._known, rates, counts)
            planned = self._planned(problem, observation.iteration) if rates.by_gpu else None
            wanted = self._wanted(planned, observation)
            terms = self._terms(problem, planned, observation.iteration)
            sure = self._known.sure_rates
            move = reshaped(self.job, problem, counts, wanted, terms=terms, sure=sure)
        except MalleusError as error:
            self._streak = self._sure_streak = 0
            return _warned(decision, f"No plan of another layout can be made: {error}")
        if planned is not None:
            decision = _warned(decision, planned.why)
        seconds = 0.0 if planned is None else planned.seconds
        return self._offer(decision, observation, move, seconds)

    def _terms(self, problem: Problem, planned: Planned | None, iteration: int) -> Terms:
        """What a change must bring, layouts living as long as they do in this job."""
        lasting = Terms.of(self.job, self.policy)
        plan = None if planned is None else planned.plan
        best = best_layout(self.job, problem, plan, terms=lasting, before=self._lives.best)
        self._lives = self._lives.after(iteration, best)
        life = self._lives.expected(iteration, self.policy.horizon)
        return Terms.of(self.job, self.policy, life)

    def _planned(self, problem: Problem, iteration: int) -> Planned:
        min_gain = self.policy.min_gain
        return self._replanner.plan(problem, iteration=iteration, min_gain=min_gain)

    def _wanted(self, planned: Planned | None, observation: Observation) -> Plan | None:
        """The planner's plan, unless the job has just refused it: then the next best is offered."""
        if planned is None or planned.plan is None:
            return None
        resting = self.offers.rests(plan_id(planned.plan), observation.iteration)
        return None if resting else planned.plan

    def _offer(
        self, decision: Decision, observation: Observation, move: Move | None, seconds: float
    ) -> Decision:
        """The decision with the better plan, if its gain has lasted and the job can be asked."""
        if not self._lasts(move, observation.iteration) or move is None:
            return decision
        identity = plan_id(move.plan)
        if not self.offers.may_make(identity, observation.iteration):
            return decision
        self.offers.make(identity, observation)
        self._cause_since = None
        return replace(
            decision, offer=replace(move.plan, planning=PlanningNote(seconds=seconds, seed=0))
        )

    def _lasts(self, move: Move | None, iteration: int) -> bool:
        """Count iterations in a row with a gain, and those with a sure one: fewer are enough.

        A gain has lasted since what it comes from first showed, however late that was certain, and
        also where that was certain before a new layout's stages were timed.
        """
        self._streak = self._streak + 1 if move else 0
        sure = move is not None and move.gain >= self.policy.sure_gain
        self._sure_streak = self._sure_streak + 1 if sure else 0
        lasted = self._streak
        if move is None:
            self._cause_since = None
        elif self._cause_since is not None:
            lasted = max(lasted, iteration - self._cause_since + 1)
        return self._sure_streak >= self.policy.patience or lasted >= self.policy.long_patience

    def _samples(self) -> list[tuple[Sample, ...]]:
        return [observation.samples for observation in self._window]

    def _start_over(self) -> None:
        freedom = self.job.freedom
        self.offers = Offers()
        self._cause_since = None
        self._lives = Lives()
        self._known = Knowledge(self.policy, () if freedom is None else freedom.layer_time_s)
        self._forget_samples()

    def _forget_samples(self) -> None:
        self._window: deque[Observation] = deque()
        self._streak = self._sure_streak = 0

    def _check(self, observation: Observation) -> None:
        counts, pipelines = len(observation.microbatch_counts), len(self.job.layout.pipelines)
        if counts != pipelines:
            raise BadInputError(
                f"Iteration {observation.iteration}: micro-batches of {counts} pipelines; the "
                f"job's layout has {pipelines}. Describe the job anew after a change of layout."
            )
        speakers = {sample.gpu for sample in observation.samples}
        strangers = (speakers | {gpu for gpu, _ in observation.probes}).difference(self._gpus)
        if strangers:
            raise BadInputError(
                f"Iteration {observation.iteration}: samples of GPUs {sorted(strangers)}; "
                f"the job's layout has {len(self._gpus)} GPUs and not these."
            )


def _warned(decision: Decision, warning: str) -> Decision:
    """The decision with one more warning."""
    return replace(decision, warning=" ".join(filter(None, (decision.warning, warning))))
