"""From one stage to the next while the job runs: all ranks switch, or none does."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.adapter.reshape.checkpoint import PlanCheckpoint, checkpoint_of
from malleus_megatron.adapter.reshape.course import CoursePlanner, Move, leaving_of
from malleus_megatron.adapter.reshape.gradients import OwnerSums
from malleus_megatron.adapter.reshape.making import StageMaker
from malleus_megatron.adapter.reshape.room import GradientBuffers, tensors_of
from malleus_megatron.adapter.reshape.stage import (
    RankStage,
    StageBuilder,
    complete_parameters,
    random_streams_kept,
    reseed,
)
from malleus_megatron.adapter.reshape.state import (
    parts_of,
    scaler_state,
    set_scaler_state,
    set_step_count,
    state_of,
    step_count,
)
from malleus_megatron.adapter.reshape.steps import PlanSteps
from malleus_megatron.adapter.reshape.view import View, nominal_view, view_of
from malleus_megatron.errors import MigrationError, StateLostError
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.outcome import Migration
from malleus_megatron.plan.plan import Plan
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.groups import Groups
from malleus_megatron.runtime.migration_clock import MigrationClock
from malleus_megatron.runtime.moving import move_batches
from malleus_megatron.runtime.peak import PeakMemory
from malleus_megatron.runtime.transport import Carried

_NO_WAY_BACK = (
    "A switch to another plan failed when old state had been given back on the way: {reason} The "
    "job cannot go on; restart it from its last checkpoint. Without --malleus-migration-memory, or "
    "with more of it, a switch that fails leaves the job on its plan."
)

_NO_GRADIENTS = (
    "A switch to another plan failed: {reason} Then there was no room any more for the gradients "
    "of the present one: {error} The job cannot go on; restart it from its last checkpoint."
)


class Switch:
    """The stage that this rank trains now, and the way to another one.

    Megatron's loop keeps its list of model chunks, its optimizer object, its scheduler and its
    TransformerConfig; a switch changes what is inside of them.
    """

    def __init__(
        self,
        *,
        builder: StageBuilder,
        agreement: Agreement,
        groups: Groups,
        built: tuple[list[Any], Any, Any],
        node_of: dict[int, int],
        bound_bytes: int | None = None,
    ) -> None:
        """Begin with what Megatron has built; nothing is changed.

        Args:
            builder: Builds any stage of this job.
            agreement: The ranks' control channel.
            groups: Process groups by rank set.
            built: Model chunks, optimizer and scheduler that Megatron's loop holds.
            node_of: The node of each GPU.
            bound_bytes: On memory beyond the larger of the old and the new state; None: none, and
                both are whole until all has moved.
        """
        self._builder = builder
        self._agreement = agreement
        self._groups = groups
        self._maker = StageMaker(builder, agreement, groups)
        self._buckets: OwnerBuckets | None = None
        self._finalize: Callable[..., None] | None = None
        """Of gradients, as Megatron's loop has it under the nominal plan."""
        self._model, self._optimizer, self._scheduler = built
        self._node_of = node_of
        self._nominal = nominal_view(builder.config, builder.collection)
        self._planner = CoursePlanner(builder, agreement, node_of=node_of, bound_bytes=bound_bytes)
        self._clock = MigrationClock()
        self._held: Holdings | None = None
        self._nominal_held: Holdings | None = None
        self.view = self._nominal
        self.steps: PlanSteps | None = None
        """None under the nominal plan: there Megatron's own schedule runs."""

    @property
    def is_nominal(self) -> bool:
        """Whether Megatron's own stage is in place."""
        return self.view.is_nominal

    @property
    def model(self) -> Sequence[Any]:
        """This rank's model chunks."""
        return self._model

    @property
    def module(self) -> Any:
        """The model inside all wrappers."""
        return self._stage().module

    def tensors(self) -> Iterator[Tensor]:
        """All that this rank keeps between steps; each `main_grad` lies in a gradient buffer."""
        return tensors_of(self._stage())

    def check(self) -> None:
        """See that this rank's state can be described.

        Raises:
            MigrationError: a parameter that Megatron's metadata does not cover, or a frozen one.
        """
        stage = self._stage()
        parts_of(stage.module, stage.view, self._builder.config)
        for name, parameter in stage.module.named_parameters():
            if not parameter.requires_grad:
                raise MigrationError(f"{name} is frozen; frozen parameters are not covered yet")

    def complete_parameters(self) -> None:
        """As the function of that name, of the present stage."""
        complete_parameters(self._model, self._optimizer)

    def checkpoint(self) -> PlanCheckpoint:
        """What a checkpoint holds of the present plan's stages; a collective.

        Raises:
            MigrationError: on all ranks, with the rank that cannot describe its state.
        """
        together = self._agreement.together
        together("completing the parameters", self.complete_parameters)
        steps = self._agreement.exchange([step_count(self._optimizer)])
        step = int(max(row[0] for row in steps))
        return together(
            "describing the checkpoint",
            lambda: checkpoint_of(self._stage(), self._builder.config, step),
        )

    @contextlib.contextmanager
    def seeded_as_nominal(self, iteration: int) -> Iterator[None]:
        """Random streams as after a switch to the nominal stages at this iteration."""
        with random_streams_kept():
            reseed(self._nominal, iteration)
            yield

    def to_nominal(self, iteration: int) -> Migration:
        """Go back to the stages that Megatron's own flags describe.

        Raises:
            MigrationError: on all ranks; then nothing has changed.
        """
        return self._go(lambda: self._nominal, None, iteration)

    def to_plan(self, plan: Plan, iteration: int) -> Migration:
        """Go to a plan that has been checked, the same on all ranks.

        Raises:
            MigrationError: on all ranks; then nothing has changed.
        """
        gpu, config = self._agreement.rank, self._builder.config
        # The way the config is now does not matter to the view, but for the pipeline's dtype.
        return self._go(lambda: view_of(plan, gpu, self._groups, config), plan, iteration)

    def _go(self, see: Callable[[], View], plan: Plan | None, iteration: int) -> Migration:
        self._clock.begin(self._agreement, self._node_of)
        gradients = GradientBuffers(self._model)
        memory = PeakMemory(self.tensors())
        reason = move = None
        with memory.watched():
            try:
                self._agreement.together("giving back the gradients", lambda: self._drop(gradients))
                move = self._prepared(see, plan, memory)
                carried = self._carry_out(move)
            except MigrationError as error:
                if move is not None and move.is_final:
                    raise StateLostError(_NO_WAY_BACK.format(reason=error)) from error
                reason = str(error)
        if reason is not None or move is None:
            # Nothing may refer to the new stage any more, neither this frame nor the traceback.
            move = None
            _free()
            memory.forget()
            self._restore(gradients, reason)
            self._groups.give_up_unused()
            stays = MigrationError(reason)
            stays.on_all_ranks = True
            raise stays
        self._commit(move, iteration)
        move.forget_old()
        self._groups.trim()
        _free()
        memory.end(self.tensors())
        return self._report(move, carried, memory.extra_bytes)

    def _drop(self, gradients: GradientBuffers) -> None:
        """What a step leaves of gradients, the next one would throw away."""
        self._optimizer.zero_grad()
        gradients.drop()

    def _restore(self, gradients: GradientBuffers, reason: str | None) -> None:
        """After a switch that failed; others may have taken the room meanwhile.

        Raises:
            StateLostError: on all ranks.
        """
        try:
            self._agreement.together("taking the gradients back", gradients.restore)
        except MigrationError as error:
            raise StateLostError(_NO_GRADIENTS.format(reason=reason, error=error)) from error

    def _prepared(self, see: Callable[[], View], plan: Plan | None, memory: PeakMemory) -> Move:
        """Everything up to the first message; each part on all ranks or on none."""
        together, config = self._agreement.together, self._builder.config
        if plan is not None:
            stages = [stage.gpus for pipe in plan.pipelines for stage in pipe.stages]
            self._groups.make(gpus for gpus in stages if len(gpus) > 1)
        together("completing the parameters", self.complete_parameters)
        view = together("finding the rank's place", see)
        old = together("listing the old state", lambda: state_of(self._stage(), config))
        if self._held is None or self._nominal_held is None:
            # Every job begins under the nominal plan.
            self._held = self._nominal_held = self._maker.all_holdings(old)
        held = self._held
        planner = self._planner
        ends = {"from_nominal": self.is_nominal, "to_nominal": view.is_nominal}
        if planner.is_bounded:
            needed = self._nominal_held if view.is_nominal else self._maker.needed(view)
            moves, course = planner.plan(held, needed, **ends)
            if not view.is_nominal:
                planner.check_way_back(needed, self._nominal_held)
            made = self._maker.make(view, with_memory=not course.frees)
            together("comparing the stage", lambda: planner.check_made(made, needed))
        else:
            made = self._maker.make(view)
            moves, course = planner.plan(held, made.needed, **ends)
        leaving = None
        if course.frees:
            leaving = together("looking at the memory", lambda: leaving_of(old, made, memory))
        steps = None
        if view.seat is not None:
            agree = self._agreement.first_text
            steps = together(
                "preparing the steps", lambda: PlanSteps(made.stage, config, agree=agree)
            )
        return Move(made=made, old=old, moves=moves, course=course, leaving=leaving, steps=steps)

    def _carry_out(self, move: Move) -> Carried:
        together, made, stage = self._agreement.together, move.made, move.made.stage
        with self._clock.moving(move.course.batches):
            carried = move_batches(
                move.course.batches,
                self._agreement.rank,
                old=move.old.tensors,
                new=made.state.tensors,
                leaving=move.leaving,
                guard=together,
            )
        steps = self._agreement.exchange([step_count(self._optimizer)])
        step = int(max(row[0] for row in steps))
        together("setting the step", lambda: set_step_count(stage.optimizer, step))
        scaler = scaler_state(self._optimizer)
        together("setting the loss scale", lambda: set_scaler_state(stage.optimizer, scaler))
        if stage.shards is not None and not stage.shards.keeps_main:
            together("filling the shares", stage.shards.fill)
        if move.leaving is not None:
            together("making room for gradients", made.gradients.restore)
        return carried

    def _commit(self, move: Move, iteration: int) -> None:
        """Put the new stage where Megatron's loop looks; nothing here can fail."""
        config, stage = self._builder.config, move.made.stage
        view = stage.view
        view.put_into(config)
        if self.is_nominal:
            self._finalize = config.finalize_model_grads_func
        config.finalize_model_grads_func = self._finalize
        if view.seat is not None and stage.buckets is not None:
            config.finalize_model_grads_func = OwnerSums(view.seat, stage.buckets)
        old = list(self._model)
        _take_over_hooks(old, stage.model, config)
        self._model[:] = stage.model
        for chunk in old:
            # Megatron's loop keeps a name for the last chunk that it was given: an empty shell.
            chunk.__dict__.clear()
        self._optimizer.__dict__.clear()
        self._optimizer.__dict__.update(stage.optimizer.__dict__)
        self._buckets = stage.buckets
        # The scheduler holds the optimizer: it writes learning rate and decay into its new groups.
        self._scheduler.step(increment=0)
        self._held = move.made.needed
        self.view, self.steps = view, move.steps
        reseed(view, iteration)

    def _stage(self) -> RankStage:
        return RankStage(
            view=self.view,
            model=list(self._model),
            optimizer=self._optimizer,
            buckets=self._buckets,
        )

    def _report(self, move: Move, carried: Carried, extra_bytes: int) -> Migration:
        rows = self._agreement.exchange([*self._clock.row(), carried.received_bytes, extra_bytes])
        needed = move.moves.received_bytes()
        return Migration(
            times=self._clock.learn(rows),
            received_bytes=tuple(int(row[-2]) for row in rows),
            needed_bytes=tuple(needed.get(gpu, 0) for gpu in range(len(rows))),
            peak_extra_bytes=int(max(row[-1] for row in rows)),
            gave_back=move.course.frees,
        )


def _take_over_hooks(old: Sequence[Any], new: Sequence[Any], config: Any) -> None:
    """What Megatron's loop has set up on its model chunks for overlap holds for the new ones."""
    for before, after in zip(old, new, strict=True):
        if after.use_forward_hook and not before.remove_forward_pre_hook_handles:
            # The loop leaves them out until its first step is done.
            after.disable_forward_pre_hook(param_sync=False)
    (chunk,) = new
    if config.no_sync_func is not None:
        config.no_sync_func = chunk.no_sync
    if config.grad_sync_func is not None:
        config.grad_sync_func = chunk.start_grad_sync
    if config.param_sync_func is not None:
        config.param_sync_func = chunk.start_param_sync


def _free() -> None:
    """Give back what the other stage held: its modules refer to each other in circles."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        # Megatron keeps the tables of the last 32, and with them the modules that made them.
        clear = getattr(embedding.forward, "cache_clear", None)
        if clear is not None:
            clear()
    gc.collect()
    torch.cuda.empty_cache()
