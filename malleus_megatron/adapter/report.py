"""Rank 0's reports: events.jsonl, one clear line at each event, and the talk with the sidecar."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from malleus_megatron.adapter.curves import curves_payload
from malleus_megatron.adapter.memory_news import MemoryNews
from malleus_megatron.adapter.pace_watch import PaceWatch
from malleus_megatron.adapter.probes import ProbeWatch, probe_words
from malleus_megatron.adapter.rows import BoundaryRow
from malleus_megatron.adapter.straggler_news import StragglerNews
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.control.memory import JobMemory
from malleus_megatron.control.memory_model import GpuMemory
from malleus_megatron.control.telemetry import GpuReading
from malleus_megatron.control.values import Decision, Freedom, JobDescription, Observation
from malleus_megatron.cost.memory import StageMib
from malleus_megatron.errors import sentence
from malleus_megatron.events import EventLog
from malleus_megatron.migration.outcome import Migration
from malleus_megatron.migration.replicas import Difference
from malleus_megatron.plan.codec import canonical_json, plan_id, plan_to_json, rates_to_json
from malleus_megatron.plan.injection import Injection
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import ModelMemory
from malleus_megatron.plan.rate_news import RateNews
from malleus_megatron.plan.rates import Rates
from malleus_megatron.plan.render import in_short
from malleus_megatron.sidecar.client import SidecarClient
from malleus_megatron.whatif.links import LinkNews


class Reporter:
    """Says what happens. Nothing here can stop or slow down a step."""

    def __init__(
        self,
        *,
        events: EventLog,
        say: Callable[[str], None],
        sidecar: SidecarClient | None,
        freedom: Freedom | None = None,
    ) -> None:
        """Say nothing yet.

        Args:
            events: Where events and plans go; closed at the end.
            say: Prints one line into the training log.
            sidecar: The client, already started; None: no re-planning.
            freedom: What a planner may do at level reshape.
        """
        self._freedom = freedom
        if sidecar is not None:
            events.follower = sidecar.tell
        self._say = say
        self._sidecar = sidecar
        self._events = events
        self._iteration = 0
        self._rates = RateNews()
        self._latest_rates: dict[int, float] = {}
        self._untold: Decision | None = None
        """With rates that were told, and curves have not taken yet."""
        self._switch_s: float | None = None
        self._stragglers = StragglerNews(events, say)
        self._memory = MemoryNews()
        self._pace = PaceWatch()
        self._probe = ProbeWatch()
        self._told_overfull = False
        self.job: JobDescription | None = None
        """As the sidecar knows it, or would."""
        self.observation: Observation | None = None
        """What the GPUs measured in the iteration that was reported last."""

    def level(self, current: CurrentPlan, reason: str, iteration: int) -> None:
        """Say at which level the job runs and why not higher; the sidecar plans for it."""
        plan = current.plan
        self._events.write(
            "level",
            iteration,
            level=current.level.name,
            reason=reason,
            generation=current.generation,
            plan=current.plan_id,
            layout=in_short(plan),
            gpus=len(list(plan.all_gpus())),
        )
        self._keep_plan(current)
        self._say(f"level {current.level.name}: {reason}")
        self.describe(current)

    def injected(self, injection: Injection) -> None:
        """Write down which rates are injected, and when."""
        for entry in injection.entries:
            self._events.write("injection", 0, **asdict(entry))

    def describe(self, current: CurrentPlan, memory: ModelMemory | None = None) -> None:
        """Tell the sidecar how the job lies now, and what its plans take if that is news."""
        if memory is not None and self._freedom is not None:
            self._freedom = replace(self._freedom, memory=memory)
        self.job = JobDescription(
            nominal=current.nominal,
            level=current.level,
            freedom=self._freedom,
            present=None if current.plan.same_layout(current.nominal) else current.plan,
            switch_s=self._switch_s,
        )
        if self._sidecar is not None:
            self._sidecar.describe(self.job)

    def warning(self, message: str) -> None:
        """Say that something went wrong and what happens now."""
        self._events.write("warning", self._iteration, message=message)
        self._say(f"warning: {message}")

    def iteration(self, rows: Sequence[BoundaryRow], current: CurrentPlan) -> None:
        """Take in the rows of all ranks for the iteration that has ended."""
        mine = rows[0]
        if not math.isnan(mine.iteration):
            self._iteration = int(mine.iteration)
            self._write_iteration(rows, current)
            message = self._pace.look(rows)
            if message is not None:
                self.warning(message)
            probed = self._probe.look(rows, current.plan)
            if probed is not None:
                self._events.write("probe", self._iteration, rates=rates_to_json(Rates.of(probed)))
                self._say(probe_words(probed, self._latest_rates))
        samples = [sample for gpu, row in enumerate(rows) if (sample := row.sample(gpu))]
        self.observation = None
        if samples:
            self.observation = Observation(
                # A device may be behind: some samples are of an iteration before.
                iteration=self._iteration,
                generation=current.generation,
                plan_id=current.plan_id,
                microbatch_counts=current.plan.microbatch_counts,
                samples=tuple(samples),
                probes=tuple(
                    (gpu, row.probe_rate)
                    for gpu, row in enumerate(rows)
                    if not math.isnan(row.probe_rate)
                ),
            )
            if self._sidecar is not None:
                self._sidecar.post(self.observation)

    def memory(
        self,
        memory: JobMemory,
        gpus: Sequence[GpuMemory],
        predicted: StageMib,
        current: CurrentPlan,
    ) -> None:
        """Take in what a step took on every GPU; said, if it is news, beside the prediction."""
        if self._memory.take(current.plan, [used.peak_mib for used in gpus]):
            self._write_memory(memory.limit.usable_mib, gpus, predicted, current)
        overfull = memory.overfull(gpus)
        if overfull is not None and not self._told_overfull:
            self._told_overfull = True
            self.warning(overfull)

    def take_probe_request(self) -> bool:
        """Whether all GPUs are to be probed now, since somebody asks the sidecar."""
        asked = self._sidecar is not None and self._sidecar.take_probe_request()
        self._probe.is_awaited |= asked
        return asked

    def take_offer(self) -> Plan | None:
        """Hear the sidecar: rates and warnings are told; the plan that it offers, if any."""
        self._tell_of_the_log()
        if self._sidecar is None:
            return None
        for news in self._sidecar.take_news():
            self._say(news)
        self._take_warnings()
        decision = self._sidecar.take_reply()
        if decision is None:
            return None
        self._take(decision)
        return decision.offer

    def take_rates(self) -> bytes:
        """For curves, if rates were told since these were last taken; else nothing."""
        told, self._untold = self._untold, None
        return b"" if told is None else curves_payload(told.rates, told.stragglers)

    @property
    def asks_readings(self) -> bool:
        """Whether there are new stragglers: their GPUs' readings are to be shown with them."""
        return self._stragglers.asks_readings

    def stragglers(self, readings: Sequence[GpuReading], news: str | None = None) -> None:
        """Name the new stragglers, each with what sets its GPU apart.

        Args:
            readings: Of every GPU.
            news: Why there are none.
        """
        if news is not None:
            self._say(news)
        self._stragglers.explain(readings, self._iteration)

    def reject(self, plan: Plan | None, why: str) -> None:
        """Say that a plan, offered or scripted, is not taken."""
        told = sentence(why)
        self.warning(f"A plan was not taken: {told} Training goes on under the current one.")
        if self._sidecar is not None and plan is not None:
            self._sidecar.reject(plan_id(plan), why)

    def switched(self, current: CurrentPlan, iteration: int) -> None:
        """Say that a plan is in force from this iteration on, and keep it beside the events."""
        plan = current.plan
        document = plan_to_json(plan)
        self._events.write(
            "plan",
            iteration,
            generation=current.generation,
            plan=current.plan_id,
            micro_batches=list(plan.microbatch_counts),
            layout=in_short(plan),
            seconds=plan.planning.seconds if plan.planning else 0.0,
            predicted=document.get("predicted", {}),
        )
        self._keep_plan(current)
        predicted = plan.predicted.step_time_s if plan.predicted else None
        expected = "" if predicted is None else f", predicted step {predicted:.3f} s"
        self._say(f"iteration {iteration}: plan {current.generation}, {in_short(plan)}{expected}")

    def migrated(self, migration: Migration, current: CurrentPlan, iteration: int) -> None:
        """Say what moved for the present plan; the sidecar plans from its layout."""
        total = sum(migration.received_bytes)
        self._switch_s = migration.times.seconds
        self._events.write(
            "migration",
            iteration,
            generation=current.generation,
            bytes=total,
            **asdict(migration.times),
            peak_extra_bytes=migration.peak_extra_bytes,
            gave_back=migration.gave_back,
            received_bytes=list(migration.received_bytes),
            needed_bytes=list(migration.needed_bytes),
        )
        self._say(
            f"iteration {iteration}: moved {total / 2**20:.1f} MiB in "
            f"{migration.times.seconds:.2f} s"
        )
        self.describe(current)

    def replicas(self, found: Sequence[Difference], action: str, iteration: int) -> None:
        """Write down which GPUs differ from the other owners of what they hold."""
        for difference in found:
            for gpu in difference.gpus:
                self._events.write(
                    "replica",
                    iteration,
                    gpu=gpu,
                    parameter=difference.parameter,
                    state=difference.state,
                    offset=list(difference.slice.box.offset),
                    shape=list(difference.slice.box.shape),
                    good_gpu=difference.good_gpu,
                    is_certain=difference.is_certain,
                    action=action,
                )

    def traced(self, iteration: int, num_operations: int, clock_error_s: float) -> None:
        """Say in the events that a trace of an iteration is there."""
        self._events.write(
            "trace", iteration, operations=num_operations, clock_error_s=clock_error_s
        )

    def link(self, news: LinkNews, iteration: int) -> None:
        """Say that a link has become slow, or is no longer; no GPU is blamed for it."""
        link = news.link
        self._events.write(
            "slow_link",
            iteration,
            gpus=list(link.gpus),
            peers=list(link.peers),
            is_slow=news.is_slow,
            seconds=news.seconds,
            usual_seconds=news.usual_s,
        )
        state = "is slow" if news.is_slow else "is no longer slow"
        self._say(
            f"the link {link} {state}: {news.seconds:.4g} s a transfer, "
            f"{news.usual_s:.4g} s on links like it"
        )

    def note(self, line: str) -> None:
        """Say something that is no event, or whose events are written."""
        self._say(line)

    def close(self) -> None:
        """Stop the sidecar and close the log."""
        if self._sidecar is not None:
            self._sidecar.close()
            self._take_warnings()
        if self._pace.misses:
            self._events.write("pace", self._iteration, **self._pace.summary())
        self._events.close()

    def _keep_plan(self, current: CurrentPlan) -> None:
        document = canonical_json(plan_to_json(current.plan))
        self._events.keep(f"plans/generation-{current.generation}.json", document + "\n")

    def _write_iteration(self, rows: Sequence[BoundaryRow], current: CurrentPlan) -> None:
        with_loss = next((row for row in rows if row.has_loss), None)
        self._events.write(
            "iteration",
            self._iteration,
            step_time_s=rows[0].step_time_s,
            loss=None if with_loss is None else with_loss.loss,
            grad_norm=_number(rows[0].grad_norm),
            skipped=bool(rows[0].skipped),
            generation=current.generation,
            plan=current.plan_id,
        )

    def _write_memory(
        self,
        usable_mib: float,
        gpus: Sequence[GpuMemory],
        predicted: StageMib,
        current: CurrentPlan,
    ) -> None:
        expected: list[float | None] = [None] * len(gpus)
        for pipeline, needs_mib in zip(current.plan.pipelines, predicted, strict=True):
            for stage, need_mib in zip(pipeline.stages, needs_mib, strict=True):
                for gpu in stage.gpus:
                    expected[gpu] = need_mib
        self._events.write(
            "memory",
            self._iteration + 1,
            generation=current.generation,
            plan=current.plan_id,
            measured_mib=[used.peak_mib for used in gpus],
            predicted_mib=expected,
            usable_mib=usable_mib,
        )

    def _tell_of_the_log(self) -> None:
        if self._events.failure is not None:
            self._say(f"warning: {self._events.failure} Training goes on.")
            self._events.failure = None
        if self._events.news is not None:
            self._say(self._events.news)
            self._events.news = None

    def _take_warnings(self) -> None:
        if self._sidecar is not None:
            for message in self._sidecar.take_warnings():
                self.warning(message)

    def _take(self, decision: Decision) -> None:
        rates, stragglers = decision.rates, decision.stragglers
        self._latest_rates = dict(rates)
        if self._rates.take(self._iteration, rates, stragglers):
            self._events.write("rates", self._iteration, rates=rates_to_json(rates))
            self._untold = decision
        self._stragglers.take(decision, self._iteration)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
