"""One training job on one rank: what happens before, in and after every iteration.

All ranks call the same methods in the same order; each boundary has one exchange of rows, and one
broadcast more when rank 0 offers a plan.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from malleus_megatron.adapter.data import TrainBatches
from malleus_megatron.adapter.inputs import Inputs
from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.rows import ABSENT, BoundaryRow
from malleus_megatron.config import Level
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.errors import MalleusError
from malleus_megatron.plan.codec import canonical_json, plan_from_json, plan_id, plan_to_json
from malleus_megatron.plan.plan import Plan
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.pacing import PaceReport

LEGACY_LOSS = (
    "the script's loss function reports a mean, not a [sum, tokens] pair: its average over "
    "pipelines is only right with equal micro-batch counts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An iteration that this rank has run and not yet exchanged."""

    iteration: int
    step_time_s: float
    loss: Any
    """A tensor of one element, or None where this rank does not hold the loss."""
    grad_norm: float | None
    skipped: bool


class Job:
    """The job as this rank sees it."""

    def __init__(
        self,
        *,
        pipeline: int,
        agreement: Agreement,
        current: CurrentPlan,
        inputs: Inputs,
        clock: LayerClock,
        reporter: Reporter | None,
    ) -> None:
        """Take the parts; nothing is called yet.

        Args:
            pipeline: Of this rank.
            agreement: The control channel of all ranks.
            current: The plan in force.
            inputs: What the user's files say.
            clock: Times this rank's layers.
            reporter: On rank 0, who tells people and the sidecar.
        """
        self.clock = clock
        self.batches: TrainBatches | None = None
        self._pipeline = pipeline
        self._agreement = agreement
        self._current = current
        self._inputs = inputs
        self._reporter = reporter
        self._iteration: int | None = None
        self._counts: tuple[int, ...] = current.plan.microbatch_counts
        self._finished: Finished | None = None
        self._loss_is_per_token = True

    @property
    def moves_microbatches(self) -> bool:
        """Whether pipelines may get unequal numbers of micro-batches."""
        return self._current.level >= Level.rebalance

    def begin_iteration(self, iteration: int) -> None:
        """Cross the boundary before an iteration (from 1): report the last one, switch plans."""
        first = self._iteration is None
        self._iteration = iteration
        self._cross_boundary()
        scripted = self._inputs.plan_at(iteration, first=first)
        if scripted is not None:
            self._switch_if_possible(scripted)
        pipelines = len(self._current.nominal.pipelines)
        self._counts = self._current.counts(get_num_microbatches() * pipelines)
        self.clock.start_iteration(iteration)

    def begin_schedule(self) -> int:
        """Point the data at this step's split; the number of micro-batches of this pipeline."""
        if self.batches is not None and self._iteration is not None:
            self.batches.begin_step(self._iteration, self._counts)
        return self._counts[self._pipeline]

    def note_losses(self, losses: Any) -> None:
        """Look at what the schedule gave back: only [sum, tokens] pairs can be split unequally."""
        if isinstance(losses, list) and losses and isinstance(losses[0], dict):
            self._loss_is_per_token = all(
                getattr(value, "numel", lambda: 0)() == 2 for value in losses[0].values()
            )

    def end_iteration(self, outcome: tuple[Any, ...], step_time_s: float) -> None:
        """Keep what Megatron's train_step gave back until the next boundary."""
        self.clock.finish_iteration()
        losses, skipped, grad_norm = outcome[0], outcome[1], outcome[5]
        self._finished = Finished(
            iteration=self._iteration or 0,
            step_time_s=step_time_s,
            loss=losses.get("lm loss", next(iter(losses.values()), None)),
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=bool(skipped),
        )

    def finish(self, *, together: bool) -> None:
        """Report the last iteration, if all ranks are here, and stop what runs beside the job."""
        if together:
            self._exchange(offer=b"")
        self.clock.detach()
        if self._reporter is not None:
            self._reporter.close()

    def _cross_boundary(self) -> None:
        offer = b""
        if self._reporter is not None:
            offer = self._offer()
        rows = self._exchange(offer=offer)
        self._check_loss(rows)
        num_bytes = int(rows[0].offer_bytes)
        if num_bytes:
            self._consider(self._agreement.broadcast(offer, num_bytes))

    def _exchange(self, *, offer: bytes) -> list[BoundaryRow]:
        """Give all ranks this rank's row; rank 0 reports the table."""
        row = replace(self._row(), offer_bytes=float(len(offer)))
        rows = [BoundaryRow.of(row) for row in self._agreement.exchange(row.numbers())]
        if self._reporter is not None:
            self._reporter.iteration(rows, self._current)
        self._finished = None
        return rows

    def _row(self) -> BoundaryRow:
        row = BoundaryRow(loss_is_per_token=float(self._loss_is_per_token))
        finished = self._finished
        if finished is None:
            return row
        pace = self.clock.pace_report() or PaceReport()
        row = replace(
            row,
            iteration=float(finished.iteration),
            step_time_s=finished.step_time_s,
            has_loss=float(finished.loss is not None),
            loss=ABSENT if finished.loss is None else float(finished.loss),
            grad_norm=ABSENT if finished.grad_norm is None else finished.grad_norm,
            skipped=float(finished.skipped),
            pace_calls=float(pace.num_calls),
            pace_misses=float(pace.num_missed),
            pace_worst_ratio=pace.worst_ratio,
        )
        return row.with_sample(self.clock.read())

    def _check_loss(self, rows: list[BoundaryRow]) -> None:
        """Go down to observe together if any rank saw a loss that cannot be split unequally."""
        if not self.moves_microbatches or all(row.loss_is_per_token for row in rows):
            return
        self._current.level = Level.observe
        if self._reporter is not None:
            self._reporter.level(self._current, LEGACY_LOSS, self._iteration or 0)
        self._switch(self._current.nominal)

    def _offer(self) -> bytes:
        """On rank 0: a plan from the sidecar that this job can run under, as bytes."""
        assert self._reporter is not None
        plan = self._reporter.take_offer()
        if plan is None:
            return b""
        try:
            self._current.check(plan)
        except MalleusError as error:
            self._reporter.reject(plan, str(error))
            return b""
        return canonical_json(plan_to_json(plan)).encode()

    def _consider(self, payload: bytes) -> None:
        """Switch to an offered plan if every rank reads the same one and can run under it."""
        fault = None
        plan = None
        try:
            plan = plan_from_json(json.loads(payload))
            self._current.check(plan)
        except (MalleusError, ValueError) as error:
            fault = str(error)
        identity = "none" if plan is None else plan_id(plan)
        # Every rank takes part in both collectives, whatever it found by itself.
        difference = self._agreement.first_difference(identity)
        reason = self._agreement.first_text(fault or difference)
        if reason is None and plan is not None:
            self._switch(plan)
        elif self._reporter is not None:
            self._reporter.reject(plan, reason or "it could not be read")

    def _switch_if_possible(self, plan: Plan) -> None:
        """Switch to a scripted plan; a job whose level has sunk stays, and says so."""
        try:
            self._current.check(plan)
        except MalleusError as error:
            if self._reporter is not None:
                self._reporter.reject(plan, str(error))
        else:
            self._switch(plan)

    def _switch(self, plan: Plan) -> None:
        if plan == self._current.plan:
            return
        self._current.switch(plan)
        if self._reporter is not None:
            self._reporter.switched(self._current, self._iteration or 0)
