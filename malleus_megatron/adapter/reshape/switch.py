"""From one stage to the next while the job runs: all ranks switch, or none does."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.adapter.reshape.checkpoint import PlanCheckpoint, checkpoint_of
from malleus_megatron.adapter.reshape.gradients import OwnerSums
from malleus_megatron.adapter.reshape.making import Made, StageMaker
from malleus_megatron.adapter.reshape.stage import (
    RankStage,
    StageBuilder,
    random_streams_kept,
    reseed,
)
from malleus_megatron.adapter.reshape.state import (
    RankState,
    parts_of,
    scaler_state,
    set_scaler_state,
    set_step_count,
    state_of,
    step_count,
)
from malleus_megatron.adapter.reshape.steps import PlanSteps
from malleus_megatron.adapter.reshape.view import View, nominal_view, view_of
from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.outcome import Migration
from malleus_megatron.migration.rounds import Round, cut_into_rounds
from malleus_megatron.migration.transfers import TransferPlan, plan_transfers
from malleus_megatron.plan.plan import Plan
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.groups import Groups
from malleus_megatron.runtime.transport import Carried, carry_out, copy_own

MAX_ROUND_BYTES = 256 * 2**20
"""That a GPU sends, and receives, before the ranks meet again."""


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
    ) -> None:
        """Begin with what Megatron has built; nothing is changed.

        Args:
            builder: Builds any stage of this job.
            agreement: The ranks' control channel.
            groups: Process groups by rank set.
            built: Model chunks, optimizer and scheduler that Megatron's loop holds.
            node_of: The node of each GPU.
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
        self._held: Holdings | None = None
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

    @torch.no_grad()
    def complete_parameters(self) -> None:
        """Let all parameters have their values of now: with overlap, gathers may be under way.

        All ranks together: Megatron's own stages gather here what they would before a layer.
        """
        for chunk in self._model:
            if chunk.use_forward_hook:
                chunk.start_param_sync(force_sync=True)

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
        started = time.perf_counter()
        reason = move = None
        try:
            move = self._prepared(see, plan)
            carried = self._carry_out(move)
        except MigrationError as error:
            reason = str(error)
        if reason is not None or move is None:
            # Nothing may refer to the new stage any more, neither this frame nor the traceback.
            move = None
            _free()
            raise MigrationError(reason)
        self._commit(move, iteration)
        move.old.tensors.clear()
        self._groups.trim()
        _free()
        return self._report(move, carried, started)

    def _prepared(self, see: Callable[[], View], plan: Plan | None) -> "_Move":
        """Everything up to the first message; each part on all ranks or on none."""
        together, config = self._agreement.together, self._builder.config
        if plan is not None:
            stages = [stage.gpus for pipe in plan.pipelines for stage in pipe.stages]
            self._groups.make(gpus for gpus in stages if len(gpus) > 1)
        together("completing the parameters", self.complete_parameters)
        view = together("finding the rank's place", see)
        old = together("listing the old state", lambda: state_of(self._stage(), config))
        held = self._maker.all_holdings(old) if self._held is None else self._held
        made = self._maker.make(view)
        transfers = together(
            "planning the transfers", lambda: plan_transfers(held, made.needed, self._node_of)
        )
        rounds = together(
            "planning the rounds", lambda: cut_into_rounds(transfers.transfers, MAX_ROUND_BYTES)
        )
        steps = None
        if view.seat is not None:
            agree = self._agreement.first_text
            steps = together(
                "preparing the steps", lambda: PlanSteps(made.stage, config, agree=agree)
            )
        return _Move(made=made, old=old, transfers=transfers, rounds=rounds, steps=steps)

    def _carry_out(self, move: "_Move") -> Carried:
        gpu, together = self._agreement.rank, self._agreement.together
        old, new, stage = move.old.tensors, move.made.state.tensors, move.made.stage
        mine = [copy for copy in move.transfers.copies if copy.destination_gpu == gpu]
        together("copying what is here", lambda: copy_own(mine, old, new))
        carried = carry_out(move.rounds, gpu, old=old, new=new, guard=together)
        steps = self._agreement.exchange([step_count(self._optimizer)])
        step = int(max(row[0] for row in steps))
        together("setting the step", lambda: set_step_count(stage.optimizer, step))
        scaler = scaler_state(self._optimizer)
        together("setting the loss scale", lambda: set_scaler_state(stage.optimizer, scaler))
        if stage.shards is not None and not stage.shards.keeps_main:
            together("filling the shares", stage.shards.fill)
        return carried

    def _commit(self, move: "_Move", iteration: int) -> None:
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

    def _report(self, move: "_Move", carried: Carried, started: float) -> Migration:
        extra_bytes = carried.peak_buffer_bytes + sum(
            tensor.numel() * tensor.element_size() for tensor in move.made.state.tensors.values()
        )
        seconds = time.perf_counter() - started
        rows = self._agreement.exchange([seconds, carried.received_bytes, extra_bytes])
        needed = move.transfers.received_bytes()
        return Migration(
            seconds=max(row[0] for row in rows),
            received_bytes=tuple(int(row[1]) for row in rows),
            needed_bytes=tuple(needed.get(gpu, 0) for gpu in range(len(rows))),
            peak_extra_bytes=int(max(row[2] for row in rows)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A switch in preparation: everything but the step from which there is no way back."""

    made: Made
    old: RankState
    transfers: TransferPlan
    rounds: tuple[Round, ...]
    steps: PlanSteps | None


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
