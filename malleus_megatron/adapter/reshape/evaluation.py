"""Evaluation while a plan is in force: validation data for any pipelines, one loss for all."""

from collections.abc import Sequence

from torch import Tensor

from malleus_megatron.adapter.data import Batches
from malleus_megatron.adapter.reshape.steps import Losses


class Evaluation:
    """The validation data of this rank, and the sums of the evaluation that runs."""

    def __init__(self) -> None:
        """Without data, as below level reshape, Megatron's own loader is left alone."""
        self.batches: Batches | None = None
        self._step = 0
        self._sums: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Start the sums of another evaluation."""
        self._sums = {}

    def begin_step(self, counts: Sequence[int], pipeline: int | None) -> int:
        """Point the data at the next step's split; the micro-batches of this pipeline."""
        self._step += 1
        if self.batches is not None:
            self.batches.begin_step(self._step, counts, pipeline)
        return 0 if pipeline is None else counts[pipeline]

    def note(self, losses: Losses) -> Losses:
        """Add a step's [sum, tokens] pairs, which are the same on all ranks."""
        for name, value in losses[0].items():
            self._sums[name] = value + self._sums.get(name, 0.0)
        return losses

    def losses(self) -> dict[str, Tensor]:
        """The mean over the tokens of the whole evaluation."""
        return {name: value[0] / value[1] for name, value in self._sums.items()}

    def leave(self, num_pipelines: int, pipeline: int) -> None:
        """Give the data back to Megatron's own order, for evaluations after the training."""
        if self.batches is not None:
            self.begin_step((1,) * num_pipelines, pipeline)
