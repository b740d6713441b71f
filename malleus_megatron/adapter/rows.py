"""The row of numbers that each rank gives to rank 0 at an iteration boundary, and gets back."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from malleus_megatron.detector.samples import Sample

ABSENT = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryRow:
    """What a rank says of the iteration that it has finished; NaN: it has nothing to say.

    Only numbers, since it travels as one tensor. `offer_bytes` is rank 0's: the length of the plan
    it is about to send, 0 without one. So are `rates_bytes`, of rates, `asks_readings`: then
    all ranks say at once what their drivers say of their GPUs, and `asks_probe`: then all probe.
    """

    iteration: float = ABSENT
    step_time_s: float = ABSENT
    has_loss: float = 0.0
    loss: float = ABSENT
    grad_norm: float = ABSENT
    skipped: float = 0.0
    loss_is_per_token: float = 1.0
    has_data: float = 0.0
    sample_iteration: float = ABSENT
    layer_forward_s: float = ABSENT
    layer_backward_s: float = ABSENT
    stage_forward_s: float = ABSENT
    stage_backward_s: float = ABSENT
    num_layers: float = 0.0
    num_microbatches: float = 0.0
    layer_collectives_s: float = 0.0
    pace_calls: float = 0.0
    pace_misses: float = 0.0
    pace_worst_ratio: float = 0.0
    offer_bytes: float = 0.0
    rates_bytes: float = 0.0
    asks_readings: float = 0.0
    asks_probe: float = 0.0
    probe_rate: float = ABSENT
    """Of a GPU on standby, or that was asked for."""

    def numbers(self) -> list[float]:
        """As the tensor's row."""
        return [float(value) for value in dataclasses.astuple(self)]

    @classmethod
    def of(cls, numbers: list[float]) -> Self:
        """From the tensor's row."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**dict(zip(names, numbers, strict=True)))

    @classmethod
    def for_all(cls, rows: Sequence[Self]) -> Self:
        """Rank 0's row as it tells it to all: of data and loss it says what holds on every rank."""
        return dataclasses.replace(
            rows[0],
            loss_is_per_token=min(row.loss_is_per_token for row in rows),
            has_data=min(row.has_data for row in rows),
        )

    def with_sample(self, sample: Sample | None) -> "BoundaryRow":
        """The row with a measured sample in it."""
        if sample is None:
            return self
        return dataclasses.replace(
            self,
            sample_iteration=float(sample.iteration),
            layer_forward_s=sample.layer_forward_s,
            layer_backward_s=sample.layer_backward_s,
            stage_forward_s=sample.stage_forward_s,
            stage_backward_s=sample.stage_backward_s,
            num_layers=float(sample.num_layers),
            num_microbatches=float(sample.num_microbatches),
            layer_collectives_s=sample.layer_collectives_s,
        )

    def sample(self, gpu: int) -> Sample | None:
        """The sample that the row carries, if any."""
        if math.isnan(self.sample_iteration):
            return None
        return Sample(
            gpu=gpu,
            iteration=int(self.sample_iteration),
            layer_forward_s=self.layer_forward_s,
            layer_backward_s=self.layer_backward_s,
            stage_forward_s=self.stage_forward_s,
            stage_backward_s=self.stage_backward_s,
            num_layers=int(self.num_layers),
            num_microbatches=int(self.num_microbatches),
            layer_collectives_s=self.layer_collectives_s,
        )
