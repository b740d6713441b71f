"""Gradients under a plan: Megatron's own finalisation, then sums over the owners of each slice."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.plan.seats import Seat


class OwnerSums:
    """Takes the place of Megatron's `finalize_model_grads` while a plan is in force."""

    def __init__(self, seat: Seat, buckets: OwnerBuckets) -> None:
        """Hold the rank's seat, and what sums its shares."""
        self._seat = seat
        self._buckets = buckets

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
        timers = get_model_config(model[0]).timers
        if timers is not None:
            timers("all-grads-sync", log_level=1).start()
        self._buckets.finish_sums()
        if timers is not None:
            timers("all-grads-sync").stop()
        if num_tokens is not None:
            self._divide_by_tokens(num_tokens)

    def _divide_by_tokens(self, num_tokens: Tensor) -> None:
        """Divide by the tokens of the whole step: one GPU of each last stage counts them."""
        counts = self._seat.is_last and self._seat.tp_rank == 0
        total = num_tokens.clone() if counts else torch.zeros_like(num_tokens)
        dist.all_reduce(total)
        self._buckets.shards.scale_gradients(1.0 / torch.clamp(total, min=1))
