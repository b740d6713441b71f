"""A stage with its values unset, made on all ranks or on none, and what it needs."""

from dataclasses import dataclass
from typing import Any

import torch

from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.adapter.reshape.shards import OwnerShards
from malleus_megatron.adapter.reshape.stage import RankStage, StageBuilder
from malleus_megatron.adapter.reshape.state import (
    MAIN,
    MOMENTS,
    PARAMETER,
    RankState,
    gradients_of,
    names_by_parameter,
    parameters_of,
    parts_of,
    state_of,
    with_optimizer_state,
)
from malleus_megatron.adapter.reshape.view import View
from malleus_megatron.migration.codec import holdings_from_bytes, holdings_to_bytes
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.shards import ShardGroup, shard_holdings
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.groups import Groups

MAX_BUFFER_BYTES = 128 * 2**20
"""Of one sum over owners: few collectives, and little memory beside the gradients."""
_MASTER_BYTES = 4
"""Of an element of fp32 state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A stage that waits for its values."""

    stage: RankStage
    state: RankState
    """This rank's."""
    needed: Holdings
    """All ranks'."""


class StageMaker:
    """Makes stages; each step is taken on every rank, and fails on all if on one."""

    def __init__(self, builder: StageBuilder, agreement: Agreement, groups: Groups) -> None:
        """Hold the parts."""
        self._builder = builder
        self._agreement = agreement
        self._groups = groups

    def make(self, view: View) -> Made:
        """Make the stage that a view describes.

        Raises:
            MigrationError: on all ranks, with the step that failed and the rank.
        """
        model = self._agreement.together("building the stage", lambda: self._builder.model(view))
        return self._nominal(view, model) if view.is_nominal else self._sharded(view, model)

    def all_holdings(self, state: RankState) -> Holdings:
        """Of every GPU, as each of them lists them."""
        payloads = self._agreement.gather(holdings_to_bytes(state.holdings))
        return {gpu: holdings_from_bytes(payload) for gpu, payload in enumerate(payloads)}

    def _nominal(self, view: View, model: list[Any]) -> Made:
        """With Megatron's own optimizer, whose state lies as Megatron cuts it."""
        together, builder = self._agreement.together, self._builder
        optimizer = together("building the optimizer", lambda: builder.stock_optimizer(view, model))
        stage = RankStage(view=view, model=model, optimizer=optimizer)
        state = together("listing the new state", lambda: state_of(stage, builder.config))
        return Made(stage=stage, state=state, needed=self.all_holdings(state))

    def _sharded(self, view: View, model: list[Any]) -> Made:
        """With optimizer state shared out over the owners of each slice.

        Who keeps what follows from who holds which parameters: those alone are told to all.
        """
        together, builder = self._agreement.together, self._builder
        keeps_main = builder.config.params_dtype != torch.float32
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
        self._groups.make(group.owners for group in groups if len(group.owners) > 1)
        shards = together(
            "allocating the shares",
            lambda: OwnerShards(
                groups,
                self._agreement.rank,
                process_groups=self._groups,
                parameters=mine.tensors,
                gradients=gradients_of(module, parts),
                keeps_main=keeps_main,
            ),
        )
        names = names_by_parameter(module, parts)
        buckets = OwnerBuckets(shards, model[0], names)
        optimizer = together(
            "building the optimizer", lambda: builder.optimizer(view, model, settings, buckets)
        )
        stage = RankStage(view=view, model=model, optimizer=optimizer, buckets=buckets)
        state = together("listing the new state", lambda: with_optimizer_state(stage, parts, mine))
        kinds = (MAIN, *MOMENTS) if keeps_main else MOMENTS
        kept = shard_holdings(groups, kinds, _MASTER_BYTES, f"{PARAMETER}.")
        needed = {gpu: [*held, *kept.get(gpu, ())] for gpu, held in parameters.items()}
        return Made(stage=stage, state=state, needed=needed)


def _shard_groups(parameters: Holdings) -> list[ShardGroup]:
    return [ShardGroup(group=group) for group in reduction_groups(parameters, MAX_BUFFER_BYTES)]
