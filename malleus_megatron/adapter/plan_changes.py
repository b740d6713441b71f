"""Changes of plan at an iteration boundary: offered, scripted, or back from nominal stages."""

import json
from collections.abc import Callable

from megatron.core.num_microbatches_calculator import get_num_microbatches

from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.config import Level
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.control.memory import JobMemory
from malleus_megatron.control.memory_model import GpuMemory
from malleus_megatron.errors import BadInputError, MalleusError, MigrationError, sentence
from malleus_megatron.migration.outcome import Migration
from malleus_megatron.plan.codec import canonical_json, plan_from_json, plan_id, plan_to_json
from malleus_megatron.plan.pace import Pace
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.render import in_short
from malleus_megatron.plan.seats import with_ascending_tp_ranks
from malleus_megatron.runtime.agreement import Agreement


class PlanChanges:
    """Every rank has one, and all of them make the same changes in the same order."""

    def __init__(
        self,
        *,
        agreement: Agreement,
        current: CurrentPlan,
        reporter: Reporter | None,
        switch: Switch | None,
        pace: Pace | None = None,
    ) -> None:
        """Begin under the nominal plan.

        Args:
            agreement: The ranks' control channel.
            current: The plan in force.
            reporter: On rank 0, who tells people and the sidecar.
            switch: Moves the job's state; None below level reshape.
            pace: Of a paced run; it knows some TP degrees.
        """
        self.current = current
        self.reporter = reporter
        self.switch = switch
        self.after_move: Callable[[], None] = _nothing
        """Called on every rank when its stage has become another one."""
        self.memory: JobMemory | None = None
        """What plans may take of a GPU, where that is limited."""
        self._agreement = agreement
        self._pace = pace
        self._in_place = current.nominal
        """Whose stages the ranks hold; after `to_nominal_stages` not the present plan's."""

    def offer(self) -> bytes:
        """On rank 0: a plan from the sidecar that this job can run under, as bytes."""
        plan = None if self.reporter is None else self.reporter.take_offer()
        if plan is None:
            return b""
        try:
            self.check(plan)
        except MalleusError as error:
            self._reject(plan, str(error))
            return b""
        return canonical_json(plan_to_json(plan)).encode()

    def consider(self, offer: bytes, num_bytes: int, iteration: int) -> None:
        """Change to an offered plan if every rank reads the same one and can run under it.

        Args:
            offer: On rank 0; what `offer` gave.
            num_bytes: Its length, on every rank.
            iteration: That the plan would hold from.
        """
        fault = None
        plan = None
        try:
            plan = plan_from_json(json.loads(self._agreement.broadcast(offer, num_bytes)))
            self.check(plan)
        except (MalleusError, ValueError) as error:
            fault = str(error)
        self._agree_and_change(plan, fault, iteration)

    def take_scripted(self, plan: Plan, iteration: int) -> None:
        """Change to a plan of the user's; a job that cannot stays under its own, and says so."""
        fault = None
        try:
            self.check(plan)
        except MalleusError as error:
            fault = str(error)
        self._agree_and_change(plan, fault, iteration)

    def learn_memory(self, gpus: tuple[GpuMemory, ...]) -> None:
        """Take in what every GPU used in a step under the plan in force."""
        if self.memory is None:
            return
        predicted, news = self.memory.predicted(self.current.plan), False
        try:
            news = self.memory.learn(self.current.plan, gpus)
        except BadInputError as error:
            if self.reporter is not None:
                self.reporter.warning(
                    f"{sentence(error)} Plans keep to what was known of memory before."
                )
            return
        if self.reporter is not None:
            self.reporter.memory(self.memory, gpus, predicted, self.current)
            if news:
                self.reporter.describe(self.current, self.memory.model)

    def out_of_memory(self, where: str) -> str:
        """What to say when a step has no room: that ends the job, as in stock."""
        if self.current.generation == 0:
            return f"malleus: out of memory, {where}, under the recipe's own plan."
        limit = "less than now" if self.memory is None else self.memory.less_words()
        return (
            f"malleus: out of memory, {where}, under plan {self.current.generation} "
            f"({in_short(self.current.plan)}). Start again from the last checkpoint; with "
            f"--malleus-memory ({limit}) later plans keep more room free."
        )

    def sink(self, level: Level, reason: str, iteration: int) -> None:
        """Go down to a level together, and to the nominal plan."""
        self.current.level = level
        if self.reporter is not None:
            self.reporter.level(self.current, reason, iteration)
        self._change(self.current.nominal, iteration)

    def settle(self, iteration: int) -> None:
        """Go back to the plan in force where something has put the nominal stages in place."""
        plan = self.current.plan
        if plan.same_layout(self._in_place):
            return
        migration = self._move(plan, iteration)
        if migration is None:
            self._change(self.current.nominal, iteration)
            if self.reporter is not None:
                self.reporter.describe(self.current)
        else:
            self._tell(migration, iteration)

    def to_nominal_stages(self, iteration: int) -> str | None:
        """Put Megatron's own stages in place, for code that knows no others; the plan stays.

        Returns:
            Why they cannot be, the same on all ranks; None where they are.
        """
        nominal = self.current.nominal
        if nominal.same_layout(self._in_place):
            return None
        try:
            migration = self._migrated(nominal, iteration)
        except MigrationError as error:
            return str(error)
        self._tell(migration, iteration)
        return None

    def check(self, plan: Plan) -> None:
        """Refuse a plan that this job cannot run under, now.

        Raises:
            MalleusError: with the numbers that do not fit.
        """
        self.current.check(plan)
        total = get_num_microbatches() * len(self.current.nominal.pipelines)
        if len(plan.pipelines) > total:
            raise BadInputError(
                f"The plan has {len(plan.pipelines)} pipelines; the step has {total} micro-batches "
                "now, and every pipeline needs one."
            )
        if self._pace is not None:
            self._pace.check(plan)
        if self.memory is not None:
            self.memory.check(plan)

    def _agree_and_change(self, plan: Plan | None, fault: str | None, iteration: int) -> None:
        identity = "none" if plan is None else plan_id(plan)
        # Every rank takes part in both collectives, whatever it found by itself.
        difference = self._agreement.first_difference(identity)
        reason = self._agreement.first_text(fault or difference)
        if reason is None and plan is not None:
            self._change(with_ascending_tp_ranks(plan), iteration)
        else:
            self._reject(plan, reason or "it could not be read")

    def _change(self, plan: Plan, iteration: int) -> None:
        if plan == self.current.plan:
            return
        migration = None
        if not plan.same_layout(self._in_place):
            migration = self._move(plan, iteration)
            if migration is None:
                return
        self.current.switch(plan)
        if self.reporter is not None:
            self.reporter.switched(self.current, iteration)
        if migration is not None:
            self._tell(migration, iteration)

    def _move(self, plan: Plan, iteration: int) -> Migration | None:
        """Move the job's state to a plan's owners; None, and a warning, if it stays where it is."""
        try:
            return self._migrated(plan, iteration)
        except MigrationError as error:
            self._reject(plan, str(error))
            return None

    def _migrated(self, plan: Plan, iteration: int) -> Migration:
        assert self.switch is not None, "a plan of another layout was let through"
        if plan.same_layout(self.current.nominal):
            migration = self.switch.to_nominal(iteration)
        else:
            migration = self.switch.to_plan(plan, iteration)
        self._in_place = plan
        self.after_move()
        return migration

    def _tell(self, migration: Migration, iteration: int) -> None:
        if self.reporter is not None:
            self.reporter.migrated(migration, self.current, iteration)

    def _reject(self, plan: Plan | None, why: str) -> None:
        if self.reporter is not None:
            self.reporter.reject(plan, why)


def _nothing() -> None:
    """Nobody waits for a move."""
