"""What a rank measures of itself in one iteration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Compute times of one GPU in one iteration, without the time it waited for others.

    A layer time is the median over the GPU's layers and micro-batches of the iteration, a stage
    time the median over its micro-batches; seconds.
    """

    gpu: int
    iteration: int
    layer_forward_s: float
    layer_backward_s: float
    stage_forward_s: float
    stage_backward_s: float
    num_layers: int
    num_microbatches: int
    layer_collectives_s: float = 0.0
    """Forward and backward: what the collectives inside a layer took, waiting for others included;
    no part of the times above. 0 where they are not timed: in CPU mode."""

    @property
    def layer_s(self) -> float:
        """Forward and backward of one layer and one micro-batch."""
        return self.layer_forward_s + self.layer_backward_s

    @property
    def stage_s(self) -> float:
        """Forward and backward of the whole stage, one micro-batch."""
        return self.stage_forward_s + self.stage_backward_s
