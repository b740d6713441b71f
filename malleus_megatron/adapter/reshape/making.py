"""A stage with its values unset, made on all ranks or on none, and what it needs."""

from dataclasses import dataclass
from typing import Any

import torch

from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.adapter.reshape.room import GradientBuffers
from malleus_megatron.adapter.reshape.shards import OwnerShards, ShareSettings
from malleus_megatron.adapter.reshape.stage import RankStage, StageBuilder
from malleus_megatron.adapter.reshape.state import (
    MAIN,
    MOMENTS,
    PARAMETER,
    Parts,
    RankState,
    gradients_of,
    parameters_of,
    parts_of,
    state_of,
    with_optimizer_state,
)
from malleus_megatron.adapter.reshape.view import View
from malleus_megatron.migration.codec import holdings_from_bytes, holdings_to_bytes
from malleus_megatron.migration.heap import no_search_for_cycles
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.shards import ShardGroup, shard_holdings
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.groups import Groups

MAX_BUFFER_BYTES = 128 * 2**20
"""Of one sum over owners: few collectives, and little memory beside the gradients."""
MASTER_BYTES = 4
"""Of an element of fp32 state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A stage that waits for its values."""

    stage: RankStage
    state: RankState
    """This rank's."""
    needed: Holdings
    """All ranks'."""
    gradients: GradientBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """The parameters of a stage: this rank's own, and who keeps which share of what goes along."""

    parts: Parts
    settings: list[dict[str, Any]]
    mine: RankState
    groups: list[ShardGroup]
    needed: Holdings


def keeps_main(config: Any) -> bool:
    """Whether a plan's fp32 values are state of their own, and not the parameters' copy."""
    return bool(config.params_dtype != torch.float32)


class StageMaker:
    """Makes stages; each step is taken on every rank, and fails on all if on one."""

    def __init__(self, builder: StageBuilder, agreement: Agreement, groups: Groups) -> None:
        """Hold the parts."""
        self._builder = builder
        self._agreement = agreement
        self._groups = groups

    def needed(self, view: View) -> Holdings:
        """What all ranks would hold under a plan, found without memory for it.

        Raises:
            MigrationError: on all ranks, with the step that failed and the rank.
        """
        outline = self._agreement.together(
            "describing the stage", lambda: self._builder.outline(view)
        )
        return self._described(view, [outline]).needed

    def make(self, view: View, *, with_memory: bool = True) -> Made:
        """Make the stage that a view describes.

        Args:
            view: This rank's.
            with_memory: False: gradients and the optimizer's state are without; it comes later.

        Raises:
            MigrationError: on all ranks, with the step that failed and the rank.
        """
        model = self._agreement.together("building the stage", lambda: self._builder.model(view))
        make = self._nominal if view.is_nominal else self._sharded
        return make(view, model, with_memory)

    def all_holdings(self, state: RankState) -> Holdings:
        """Of every GPU, as each of them lists them."""
        payloads = self._agreement.gather(holdings_to_bytes(state.holdings))
        with no_search_for_cycles():
            return {gpu: holdings_from_bytes(payload) for gpu, payload in enumerate(payloads)}

    def _nominal(self, view: View, model: list[Any], with_memory: bool) -> Made:
        """With Megatron's own optimizer, whose state lies as Megatron cuts it."""
        together, builder = self._agreement.together, self._builder
        gradients = GradientBuffers(model)
        if not with_memory:
            gradients.drop()
        optimizer = together("building the optimizer", lambda: builder.stock_optimizer(view, model))
        stage = RankStage(view=view, model=model, optimizer=optimizer)
        state = together(
            "listing the new state",
            lambda: state_of(stage, builder.config, with_memory=with_memory),
        )
        needed = self.all_holdings(state)
        return Made(stage=stage, state=state, needed=needed, gradients=gradients)

    def _sharded(self, view: View, model: list[Any], with_memory: bool) -> Made:
        """With optimizer state shared out over the owners of each slice."""
        together, builder = self._agreement.together, self._builder
        module = RankStage(view=view, model=model, optimizer=None).module
        found = self._described(view, model)
        self._groups.make(group.owners for group in found.groups if len(group.owners) > 1)
        shards = together(
            "sharing out the state",
            lambda: OwnerShards(
                found.groups,
                self._agreement.rank,
                process_groups=self._groups,
                parameters=found.mine.tensors,
                gradients=gradients_of(module, found.parts),
                settings=ShareSettings(
                    keeps_main=keeps_main(builder.config),
                    gradient_weight=builder.gradient_weight,
                ),
            ),
        )
        gradients = GradientBuffers(model)
        if not with_memory:
            gradients.drop()
        buckets = OwnerBuckets(shards, model[0], found.mine.names_of)
        optimizer = together(
            "building the optimizer",
            lambda: builder.optimizer(view, model, found.settings, buckets),
        )
        stage = RankStage(view=view, model=model, optimizer=optimizer, buckets=buckets)
        state = together(
            "listing the new state",
            lambda: with_optimizer_state(stage, found.parts, found.mine, with_memory=with_memory),
        )
        return Made(stage=stage, state=state, needed=found.needed, gradients=gradients)

    def _described(self, view: View, model: list[Any]) -> _Described:
        """Describe the parameters of a plan's stage, with or without memory.

        Who keeps what follows from who holds which parameters: those alone are told to all.
        """
        together, builder = self._agreement.together, self._builder
        module = RankStage(view=view, model=model, optimizer=None).module
        settings = together(
            "grouping the parameters", lambda: builder.parameter_groups(view, model)
        )
        parts = together(
            "describing the parameters", lambda: parts_of(module, view, builder.config)
        )
        mine = together("listing the parameters", lambda: parameters_of(module, parts, settings))
        parameters = self.all_holdings(mine)
        groups = together("finding the owners", lambda: _shard_groups(parameters))
        kinds = (MAIN, *MOMENTS) if keeps_main(builder.config) else MOMENTS
        kept = shard_holdings(groups, kinds, MASTER_BYTES, f"{PARAMETER}.")
        needed = {gpu: [*held, *kept.get(gpu, ())] for gpu, held in parameters.items()}
        return _Described(parts=parts, settings=settings, mine=mine, groups=groups, needed=needed)


def _shard_groups(parameters: Holdings) -> list[ShardGroup]:
    return [ShardGroup(group=group) for group in reduction_groups(parameters, MAX_BUFFER_BYTES)]
