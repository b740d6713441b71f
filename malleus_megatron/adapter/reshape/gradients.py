"""Gradients under a plan: Megatron's own finalisation, then a sum over the owners of each slice."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from malleus_megatron.migration.owners import OwnerGroup
from malleus_megatron.plan.seats import Seat
from malleus_megatron.runtime.groups import Groups

MAX_BUFFER_BYTES = 128 * 2**20
"""Of one sum: few enough collectives, and little memory beside the gradients."""


def summed_groups(groups: Sequence[OwnerGroup]) -> tuple[OwnerGroup, ...]:
    """Those with something to sum: a slice of several contributors.

    Owners of a slice with one contributor are the members of one TP group, who have computed the
    same gradient, as in stock.
    """
    return tuple(
        group for group in groups if any(len(part.contributors) > 1 for part in group.slices)
    )


class OwnerSums:
    """Takes the place of Megatron's `finalize_model_grads` while a plan is in force.

    All owners of a slice end with the same bits: each gets the result of one collective.
    """

    def __init__(
        self,
        *,
        seat: Seat,
        groups: Sequence[OwnerGroup],
        process_groups: Groups,
        gradients: dict[str, Tensor],
    ) -> None:
        """Look up this rank's share.

        Args:
            seat: Of this rank.
            groups: Of the whole job, in the order in which all ranks go through them.
            process_groups: Those of the owners, made.
            gradients: This rank's gradient buffers by the names in its holdings.
        """
        self._seat = seat
        self._mine = [
            (group, process_groups.of(group.owners)) for group in groups if seat.gpu in group.owners
        ]
        self._gradients = gradients

    def __call__(
        self,
        model: list[Any],
        num_tokens: Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Finish the gradients of a step on every rank, also on standby."""
        # Timers, sequence parallelism inside the TP group; its data groups hold this rank alone.
        finalize_model_grads(model, None, pg_collection, force_all_reduce)
        for group, process_group in self._mine:
            self._sum(group, process_group)
        if num_tokens is not None:
            self._divide_by_tokens(model, num_tokens)

    @torch.no_grad()
    def _sum(self, group: OwnerGroup, process_group: dist.ProcessGroup) -> None:
        placements = list(group.placements(self._seat.gpu))
        views = [
            self._gradients[place.holding.name].view(place.holding.box.shape)[place.slices]
            for place in placements
        ]
        buffer = torch.empty(group.num_elements, dtype=views[0].dtype, device=views[0].device)
        for place, view in zip(placements, views, strict=True):
            part = buffer[place.start : place.end]
            if place.contributes:
                part.copy_(view.reshape(-1))
            else:
                part.zero_()
        dist.all_reduce(buffer, group=process_group)
        for place, view in zip(placements, views, strict=True):
            view.copy_(buffer[place.start : place.end].view(view.shape))

    def _divide_by_tokens(self, model: list[Any], num_tokens: Tensor) -> None:
        """Divide by the tokens of the whole step: one GPU of each last stage counts them."""
        counts = self._seat.is_last and self._seat.tp_rank == 0
        total = num_tokens.clone() if counts else torch.zeros_like(num_tokens)
        dist.all_reduce(total)
        for chunk in model:
            chunk.scale_gradients(1.0 / torch.clamp(total, min=1))
