"""One training job on one rank: what happens before, in and after every iteration.

All ranks call the same methods in the same order; each boundary has one exchange of rows, and one
broadcast more when rank 0 offers a plan.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from malleus_megatron.adapter.data import Batches
from malleus_megatron.adapter.inputs import Inputs
from malleus_megatron.adapter.layers import layers_of
from malleus_megatron.adapter.memory import StepMemory
from malleus_megatron.adapter.plan_changes import PlanChanges
from malleus_megatron.adapter.probes import probes_for
from malleus_megatron.adapter.replica_check import ReplicaCheck
from malleus_megatron.adapter.reshape.evaluation import Evaluation
from malleus_megatron.adapter.reshape.steps import mean_losses
from malleus_megatron.adapter.rows import ABSENT, BoundaryRow
from malleus_megatron.adapter.saves import Saves, saves_any_stages
from malleus_megatron.adapter.scalars import Scalars
from malleus_megatron.adapter.trace import JobTrace
from malleus_megatron.config import Level
from malleus_megatron.control.memory_model import GpuMemory
from malleus_megatron.control.telemetry import GpuReading
from malleus_megatron.errors import MigrationError
from malleus_megatron.plan.microbatches import spread_counts
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.pacing import PaceReport
from malleus_megatron.runtime.telemetry import Telemetry

LEGACY_LOSS = (
    "the script's loss function reports a mean, not a [sum, tokens] pair: its average over "
    "pipelines is only right with equal micro-batch counts"
)
NO_DATA = "the script builds no training data on some ranks; a reshaped job needs it on all"


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
        changes: PlanChanges,
        inputs: Inputs,
        clock: LayerClock,
        replicas: ReplicaCheck | None,
    ) -> None:
        """Take the parts; nothing is called yet.

        Args:
            pipeline: Of this rank under the nominal plan.
            agreement: The control channel of all ranks.
            changes: Knows the plan in force and how to change it.
            inputs: What the user's files say.
            clock: Times this rank's layers.
            replicas: Compares the owners of each parameter; None: nobody does.
        """
        self.clock = clock
        self.probes = probes_for(agreement, clock.device, inputs)
        """Of this rank's GPU while it trains nothing, and when somebody asks."""
        self.batches: Batches | None = None
        self.evaluation = Evaluation()
        self.saves = Saves(changes, agreement.rank)
        self.step_memory: StepMemory | None = None
        """Where the memory of plans is limited."""
        self.telemetry: Telemetry | None = None
        """On a GPU."""
        self.scalars: Scalars | None = None
        """Where the recipe asks for TensorBoard or W&B."""
        self.trace: JobTrace | None = None
        """Records iterations, if that is asked for."""
        self._nominal_pipeline = pipeline
        self._agreement = agreement
        self._changes = changes
        self._changes.after_move = self._after_move
        self._current = changes.current
        self._reporter = changes.reporter
        self._switch = changes.switch
        self._inputs = inputs
        self._replicas = replicas
        self._iteration: int | None = None
        self._counts: tuple[int, ...] = self._current.plan.microbatch_counts
        self._losses: Any = None
        self._finished: Finished | None = None
        self._loss_is_per_token = True

    @property
    def moves_microbatches(self) -> bool:
        """Whether pipelines may get unequal numbers of micro-batches."""
        return self._current.level >= Level.rebalance

    @property
    def runs_steps(self) -> bool:
        """Whether the job splits a step's data: also after its level has sunk on the way."""
        return self.moves_microbatches or self.is_reshaped or self.batches is not None

    @property
    def may_reshape(self) -> bool:
        """Whether this rank may come to sit anywhere in a pipeline."""
        return self._current.level >= Level.reshape

    @property
    def is_reshaped(self) -> bool:
        """Whether other stages than Megatron's own are in place."""
        return self._switch is not None and not self._switch.is_nominal

    @property
    def pipeline(self) -> int | None:
        """Of this rank now; None on standby."""
        if self._switch is None or self._switch.view.seat is None:
            return self._nominal_pipeline
        return self._switch.view.seat.pipeline

    def in_view(self) -> AbstractContextManager[None]:
        """Around Megatron's code for a step or an evaluation: its globals say the present plan."""
        return contextlib.nullcontext() if self._switch is None else self._switch.view.shown()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around Megatron's code for a training step."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.in_view())
            if self.step_memory is not None:
                stack.enter_context(self.step_memory.step())
            try:
                yield
            except torch.OutOfMemoryError as error:
                where = f"GPU {self._agreement.rank}, iteration {self._iteration}"
                error.add_note(self._changes.out_of_memory(where))
                raise

    @contextlib.contextmanager
    def stage_forward(self) -> Iterator[None]:
        """Around the forward of one micro-batch through the whole stage."""
        memory = self.step_memory
        watch = contextlib.nullcontext() if memory is None else memory.forward()
        with watch, self.clock.stage_forward():
            yield

    def stage_backward(self) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch through the whole stage."""
        return self.clock.stage_backward()

    def begin_iteration(self, iteration: int) -> None:
        """Cross the boundary before an iteration (from 1): report the last one, switch plans."""
        first = self._iteration is None
        self._iteration = iteration
        self._cross_boundary()
        scripted = self._inputs.plan_at(iteration, first=first)
        if scripted is not None:
            self._changes.take_scripted(scripted, iteration)
        self._changes.settle(iteration)
        if self._replicas is not None:
            self._replicas.before_iteration(iteration, self._current.plan)
        pipelines = len(self._current.nominal.pipelines)
        self._counts = self._current.counts(get_num_microbatches() * pipelines)
        if self.trace is not None:
            self.trace.begin(iteration, self._current, is_reshaped=self.is_reshaped)
        self.clock.start_iteration(iteration)

    def run_schedule(self, schedule: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run a training step's forward and backward passes under the present plan.

        Args:
            schedule: Megatron's own for the nominal plan.
            kwargs: As Megatron calls it.
        """
        pipeline = self.pipeline
        if self.batches is not None and self._iteration is not None:
            self.batches.begin_step(self._iteration, self._counts, pipeline)
        kwargs["num_microbatches"] = 0 if pipeline is None else self._counts[pipeline]
        if self._switch is None or self._switch.steps is None:
            losses = schedule(**kwargs)
            self._note_losses(losses)
            return losses
        if pipeline is None and self._iteration is not None:
            self.probes.run(self._iteration)
        self._losses = self._switch.steps.forward_backward(**kwargs)
        self._loss_is_per_token = self._switch.steps.reports_pairs
        return self._losses

    def evaluate_step(self, schedule: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run the forward passes of an evaluation step: equal counts, or the plan's shares."""
        nominal = len(self._current.nominal.pipelines)
        total = kwargs["num_microbatches"] * nominal
        if self._switch is None or self._switch.steps is None:
            self.evaluation.begin_step((kwargs["num_microbatches"],) * nominal, self.pipeline)
            return schedule(**kwargs)
        counts = spread_counts(self._current.plan.microbatch_counts, total)
        kwargs["num_microbatches"] = self.evaluation.begin_step(counts, self.pipeline)
        return self.evaluation.note(self._switch.steps.forward_backward(**kwargs))

    def end_iteration(self, outcome: tuple[Any, ...], step_time_s: float) -> tuple[Any, ...]:
        """Keep what Megatron's train_step gave back until the next boundary.

        Returns:
            The outcome; in a reshaped job with the loss on every rank, as the last rank prints it.
        """
        if self.trace is not None:
            self.trace.end()
        self.clock.finish_iteration()
        if self.is_reshaped and self._losses:
            outcome = (mean_losses(self._losses), *outcome[1:])
        self._losses = None
        losses, skipped, grad_norm = outcome[0], outcome[1], outcome[5]
        self._finished = Finished(
            iteration=self._iteration or 0,
            step_time_s=step_time_s,
            loss=losses.get("lm loss", next(iter(losses.values()), None)),
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=bool(skipped),
        )
        return outcome

    def finish(self, *, together: bool) -> None:
        """Report the last iteration, if all ranks are here, and stop what runs beside the job."""
        if together:
            self._exchange(offer=b"")
            if _needs_nominal_stages():
                self._return_to_nominal_stages()
            self.evaluation.leave(len(self._current.nominal.pipelines), self._nominal_pipeline)
        self.clock.detach()
        if self.telemetry is not None:
            self.telemetry.close()
        if self._reporter is not None:
            self._reporter.close()

    def _return_to_nominal_stages(self) -> None:
        fault = self._changes.to_nominal_stages(self._iteration or 0)
        if fault is not None:
            error = MigrationError(
                "All iterations have run and the last checkpoint is whole, but what Megatron does "
                "after them needs the recipe's own stages, and the job cannot go back to them: "
                f"{fault}"
            )
            error.on_all_ranks = True
            raise error

    def _after_move(self) -> None:
        """Time the layers of the stage that is in place now; other GPUs own its parameters."""
        assert self._switch is not None
        if self._replicas is not None:
            self._replicas.forget_owners()
        seat = self._switch.view.seat
        if self.step_memory is not None:
            self.step_memory.moved()
        layers = layers_of(self._switch.model)
        self.clock.attach(layers, tp_degree=self._nominal_tp if seat is None else seat.tp_degree)

    @property
    def _nominal_tp(self) -> int:
        stages = self._current.nominal.pipelines[self._nominal_pipeline].stages
        return next(len(s.gpus) for s in stages if self._agreement.rank in s.gpus)

    def _cross_boundary(self) -> None:
        iteration = self._iteration or 0
        offer = self._changes.offer()
        said = self._exchange(offer=offer)
        if self.moves_microbatches and not said.loss_is_per_token:
            self._changes.sink(Level.observe, LEGACY_LOSS, iteration)
        if self.may_reshape and not said.has_data:
            self._changes.sink(Level.rebalance, NO_DATA, iteration)
        num_bytes = int(said.offer_bytes)
        if num_bytes:
            self._changes.consider(offer, num_bytes, iteration)
        if said.asks_probe:
            self._probe_all(iteration)

    def _probe_all(self, iteration: int) -> None:
        """Somebody wants to know: all GPUs are probed, and the next rows have their rates."""
        try:
            if not self.probes.are_ready:
                self.probes.learn()
        except MigrationError as reason:
            if self._reporter is not None:
                self._reporter.warning(f"The GPUs are not probed: {reason}")
        if self.pipeline is not None:  # others do so in the step
            self.probes.run(iteration)

    def _exchange(self, *, offer: bytes) -> BoundaryRow:
        """Give rank 0 this rank's row and hear what it says to all; it reports the table."""
        row = replace(self._row(), offer_bytes=float(len(offer)))
        rates = b""
        if self._reporter is not None:
            row = replace(
                row,
                asks_readings=float(self._reporter.asks_readings),
                asks_probe=float(self._reporter.take_probe_request()),
            )
            if self.scalars is not None:
                rates = self._reporter.take_rates()
                row = replace(row, rates_bytes=float(len(rates)))
        table: list[BoundaryRow] = []

        def conclude(rows: list[list[float]]) -> list[float]:
            table.extend(map(BoundaryRow.of, rows))
            return BoundaryRow.for_all(table).numbers()

        said = BoundaryRow.of(self._agreement.consult(row.numbers(), conclude))
        self._share_memory()
        if said.asks_readings:
            self._share_readings()
        if self.scalars is not None:
            if said.rates_bytes:
                num_bytes = int(said.rates_bytes)
                self.scalars.learn(self._agreement.broadcast(rates, num_bytes))
            self.scalars.write(said, self._current)
        if self._reporter is not None:
            self._reporter.iteration(table, self._current)
        if self.trace is not None:
            self.trace.share()
        self._finished = None
        return said

    def _share_memory(self) -> None:
        """Where a step was measured, on all ranks at the same boundary: let all learn from all."""
        mine = None if self.step_memory is None else self.step_memory.take()
        if mine is not None:
            rows = self._agreement.exchange(mine.numbers())
            self._changes.learn_memory(tuple(GpuMemory.of(row) for row in rows))

    def _share_readings(self) -> None:
        """Rank 0 wants to know why a GPU is slow: all say what their drivers say."""
        mine = GpuReading() if self.telemetry is None else self.telemetry.latest()
        rows = self._agreement.exchange(mine.numbers())
        if self._reporter is not None:
            news = None if self.telemetry is None else self.telemetry.take_news()
            self._reporter.stragglers([GpuReading.of(row) for row in rows], news)

    def _row(self) -> BoundaryRow:
        row = BoundaryRow(
            loss_is_per_token=float(self._loss_is_per_token),
            has_data=float(self.batches is not None),
        )
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
            probe_rate=self.probes.rate(),
        )
        return row.with_sample(self.clock.read())

    def _note_losses(self, losses: Any) -> None:
        """Only [sum, tokens] pairs can be split unequally."""
        if isinstance(losses, list) and losses and isinstance(losses[0], dict):
            self._loss_is_per_token = all(
                getattr(value, "numel", lambda: 0)() == 2 for value in losses[0].values()
            )


def _needs_nominal_stages() -> bool:
    """Whether Megatron does something after its training loop that knows its own stages only."""
    args = get_args()
    evaluates = getattr(args, "do_valid", 0) or getattr(args, "do_test", 0)
    return bool(evaluates or (args.save and not saves_any_stages()))
