"""A step under a plan: Megatron's 1F1B schedule on all ranks, standby too, and one loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args
from torch import Tensor

from malleus_megatron.adapter.communicator import StageCommunicator
from malleus_megatron.adapter.reshape.stage import RankStage

type Losses = list[dict[str, Tensor]]
"""What Megatron's schedules give back: for each micro-batch, [sum, tokens] by name."""
type AgreeOnText = Callable[[str | None], str | None]


class PlanSteps:
    """Runs forward and backward passes of one rank under one plan."""

    def __init__(self, stage: RankStage, config: Any, *, agree: AgreeOnText) -> None:
        """Make the rank's end of the exchanges between stages.

        Args:
            stage: This rank's.
            config: Megatron's TransformerConfig.
            agree: A collective: gives every rank the first text that a rank has.
        """
        self.reports_pairs = True
        """False once this rank has seen a loss that is a mean, not [sum, tokens]."""
        assert stage.view.seat is not None
        self.seat = stage.view.seat
        self._stage = stage
        self._agree = agree
        args = get_args()
        self._communicator = StageCommunicator(
            self.seat,
            config=config,
            device=torch.device("cuda", torch.cuda.current_device()),
            seq_length=args.seq_length,
            sequence_parallel=args.sequence_parallel,
        )
        self._names: list[str] | None = None

    def forward_backward(self, **kwargs: Any) -> Losses:
        """Megatron's schedule with this rank's number of micro-batches.

        Args:
            kwargs: As Megatron calls a schedule; `num_microbatches` is this pipeline's own.

        Returns:
            On every rank one entry: sums and tokens of the whole step.
        """
        kwargs["p2p_communicator"] = self._communicator
        kwargs["pg_collection"] = self._stage.view.collection
        losses = schedules.forward_backward_pipelining_without_interleaving(**kwargs)
        return self._summed(losses)

    def _summed(self, losses: Losses) -> Losses:
        if self._names is None:
            # Only last stages know what the loss function reports; it reports the same each time.
            known = ",".join(losses[0]) if losses else None
            self._names = (self._agree(known) or "").split(",")
        device = torch.device("cuda", torch.cuda.current_device())
        totals = torch.zeros(len(self._names), 2, dtype=torch.float64, device=device)
        if self.seat.is_last and self.seat.tp_rank == 0:
            for micro_batch in losses:
                for row, name in enumerate(self._names):
                    value = micro_batch[name].view(-1)
                    self.reports_pairs &= value.numel() == 2
                    totals[row, 0] += value[0]
                    totals[row, 1] += value[1] if value.numel() == 2 else 1
        dist.all_reduce(totals)
        return [{name: row.float() for row, name in zip(totals, self._names, strict=True)}]


def mean_losses(losses: Losses) -> dict[str, Tensor]:
    """Sum over tokens, for each loss of a summed step."""
    return {name: value[0] / value[1] for name, value in losses[0].items()} if losses else {}
