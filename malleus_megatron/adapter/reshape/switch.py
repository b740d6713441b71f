"""From one stage to the next while the job runs: all ranks switch, or none does."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from malleus_megatron.adapter.reshape.gradients import MAX_BUFFER_BYTES, OwnerSums, summed_groups
from malleus_megatron.adapter.reshape.stage import RankStage, StageBuilder, reseed
from malleus_megatron.adapter.reshape.state import (
    PARAMETER,
    RankState,
    gradients_of,
    parts_of,
    set_step_count,
    state_of,
    step_count,
)
from malleus_megatron.adapter.reshape.steps import PlanSteps
from malleus_megatron.adapter.reshape.view import View, nominal_view, view_of
from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.codec import holdings_from_bytes, holdings_to_bytes
from malleus_megatron.migration.holdings import Holding, Holdings
from malleus_megatron.migration.outcome import Migration
from malleus_megatron.migration.owners import OwnerGroup, reduction_groups
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
        parts_of(stage, self._builder.config)
        for name, parameter in stage.module.named_parameters():
            if not parameter.requires_grad:
                raise MigrationError(f"{name} is frozen; frozen parameters are not covered yet")

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
        reason = None
        try:
            move = self._prepared(see, plan)
            carried = self._carry_out(move)
        except MigrationError as error:
            reason = str(error)
        if reason is not None:
            # Here nothing refers to the new stage any more, the error's traceback included.
            _free()
            raise MigrationError(reason)
        self._commit(move, iteration)
        move.old.tensors.clear()
        _free()
        return self._report(move, carried, started)

    def _prepared(self, see: Callable[[], View], plan: Plan | None) -> "_Move":
        """Everything up to the first message; each part on all ranks or on none."""
        together, config = self._agreement.together, self._builder.config
        if plan is not None:
            stages = [stage.gpus for pipe in plan.pipelines for stage in pipe.stages]
            self._groups.make(gpus for gpus in stages if len(gpus) > 1)
        view = together("finding the rank's place", see)
        old = together("listing the old state", lambda: state_of(self._stage(), config))
        held = self._all_holdings(old) if self._held is None else self._held
        model = together("building the stage", lambda: self._builder.model(view))
        optimizer = together("building the optimizer", lambda: self._builder.optimizer(view, model))
        stage = RankStage(view=view, model=model, optimizer=optimizer)
        new = together("listing the new state", lambda: state_of(stage, config))
        needed = self._all_holdings(new)
        transfers = together(
            "planning the transfers", lambda: plan_transfers(held, needed, self._node_of)
        )
        rounds = together(
            "planning the rounds", lambda: cut_into_rounds(transfers.transfers, MAX_ROUND_BYTES)
        )
        sums, steps = self._under(stage, needed)
        return _Move(
            stage=stage,
            old=old,
            new=new,
            needed=needed,
            transfers=transfers,
            rounds=rounds,
            sums=sums,
            steps=steps,
        )

    def _under(
        self, stage: RankStage, needed: Holdings
    ) -> tuple[OwnerSums | None, PlanSteps | None]:
        """What runs a step under a plan; nothing where Megatron's own code does."""
        seat = stage.view.seat
        if seat is None:
            return None, None
        together, config = self._agreement.together, self._builder.config
        groups = together("finding the owners", lambda: summed_groups(_owner_groups(needed)))
        self._groups.make(group.owners for group in groups)
        return together(
            "preparing the steps",
            lambda: (
                OwnerSums(
                    seat=seat,
                    groups=groups,
                    process_groups=self._groups,
                    gradients=gradients_of(stage, config),
                ),
                PlanSteps(stage, config, agree=self._agreement.first_text),
            ),
        )

    def _carry_out(self, move: "_Move") -> Carried:
        gpu, together = self._agreement.rank, self._agreement.together
        old, new = move.old.tensors, move.new.tensors
        mine = [copy for copy in move.transfers.copies if copy.destination_gpu == gpu]
        together("copying what is here", lambda: copy_own(mine, old, new))
        carried = carry_out(move.rounds, gpu, old=old, new=new, guard=together)
        steps = self._agreement.exchange([step_count(self._optimizer)])
        step = int(max(row[0] for row in steps))
        together("setting the step", lambda: set_step_count(move.stage.optimizer, step))
        return carried

    def _commit(self, move: "_Move", iteration: int) -> None:
        """Put the new stage where Megatron's loop looks; nothing here can fail."""
        config, view = self._builder.config, move.stage.view
        view.put_into(config)
        config.finalize_model_grads_func = finalize_model_grads if move.sums is None else move.sums
        self._model[:] = move.stage.model
        self._optimizer.__dict__.clear()
        self._optimizer.__dict__.update(move.stage.optimizer.__dict__)
        # The scheduler holds the optimizer: it writes learning rate and decay into its new groups.
        self._scheduler.step(increment=0)
        self._held = move.needed
        self.view, self.steps = view, move.steps
        reseed(view, iteration)

    def _stage(self) -> RankStage:
        return RankStage(view=self.view, model=list(self._model), optimizer=self._optimizer)

    def _all_holdings(self, state: RankState) -> Holdings:
        """Of every GPU, as each of them lists them."""
        payloads = self._agreement.gather(holdings_to_bytes(state.holdings))
        return {gpu: holdings_from_bytes(payload) for gpu, payload in enumerate(payloads)}

    def _report(self, move: "_Move", carried: Carried, started: float) -> Migration:
        extra_bytes = carried.peak_buffer_bytes + sum(
            tensor.numel() * tensor.element_size() for tensor in move.new.tensors.values()
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

    stage: RankStage
    old: RankState
    new: RankState
    needed: Holdings
    transfers: TransferPlan
    rounds: tuple[Round, ...]
    sums: OwnerSums | None
    steps: PlanSteps | None


def _owner_groups(needed: Holdings) -> tuple[OwnerGroup, ...]:
    """Who sums which slice: the owners of the parameters are those of the gradients."""
    parameters: dict[int, list[Holding]] = {
        gpu: [one for one in holdings if one.key.startswith(f"{PARAMETER}.")]
        for gpu, holdings in needed.items()
    }
    return reduction_groups(parameters, MAX_BUFFER_BYTES)


def _free() -> None:
    """Give back what the other stage held: its modules refer to each other in circles."""
    gc.collect()
    torch.cuda.empty_cache()
