"""The plugin's figures in the TensorBoard and W&B writers that Megatron has made.

Megatron makes them on the last rank; rates are known on rank 0, which sends them whenever they
are news.
"""

import math
from collections.abc import Iterator

from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from malleus_megatron.adapter.curves import Curves
from malleus_megatron.adapter.rows import BoundaryRow
from malleus_megatron.control.current import CurrentPlan


class Scalars:
    """Every rank has one, so that all pass the same collectives; the last one writes."""

    def __init__(self) -> None:
        """No rates are known yet."""
        self._curves = Curves()

    @staticmethod
    def are_wanted() -> bool:
        """Whether the recipe asks for a writer; the same on all ranks."""
        args = get_args()
        return bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None))

    def learn(self, payload: bytes) -> None:
        """Take in rates and stragglers as rank 0 has sent them."""
        self._curves.learn(payload)

    def write(self, row: BoundaryRow, current: CurrentPlan) -> None:
        """Write one iteration's figures as often as Megatron writes its own.

        Args:
            row: Rank 0's; NaN as its iteration where none has ended.
            current: The plan that the iteration ran under.
        """
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if math.isnan(row.iteration) or not (tensorboard or wandb):
            return
        iteration = int(row.iteration)
        if iteration % get_args().tensorboard_log_interval:
            return
        figures = dict(self._figures(row, current))
        if tensorboard:
            for name, value in figures.items():
                tensorboard.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(figures, iteration)

    def _figures(self, row: BoundaryRow, current: CurrentPlan) -> Iterator[tuple[str, float]]:
        yield "malleus/generation", float(current.generation)
        yield "malleus/step-time", row.step_time_s
        predicted = current.plan.predicted
        if predicted is not None and predicted.step_time_s is not None:
            yield "malleus/predicted-step-time", predicted.step_time_s
        yield "malleus/standby-gpus", float(len(current.plan.standby))
        yield from self._curves.points()
