"""What the first and the last stage do besides their layers: embedding and head."""

from dataclasses import dataclass
from statistics import median

from malleus_megatron.detector.smoothing import (
    Window,
    layer_time_s,
    median_by_gpu,
    stage_time_s,
)
from malleus_megatron.plan.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Embedding and head in layers: their time over that of a layer on the same GPU."""

    embedding_layers: float = 0.0
    head_layers: float = 0.0


def measured_ends(window: Window, plan: Plan, known: Ends) -> Ends:
    """What is left of the first and last stages' time without their layers, never below 0.

    In a pipeline of one stage embedding and head are one figure: what is known of the embedding
    is taken off, the rest is the head's.

    Args:
        window: Samples of the last iterations under this layout.
        plan: Who holds which layers.
        known: What was measured before; it stays where nothing is measured now.
    """
    layers, stages = median_by_gpu(window, layer_time_s), median_by_gpu(window, stage_time_s)

    def extra(gpus_of: list[Stage]) -> float | None:
        values = [
            stages[gpu] / layers[gpu] - stage.num_layers
            for stage in gpus_of
            for gpu in stage.gpus
            if gpu in stages and gpu in layers
        ]
        return max(0.0, median(values)) if values else None

    divided = [pipeline.stages for pipeline in plan.pipelines if len(pipeline.stages) > 1]
    embedding = extra([pipeline[0] for pipeline in divided])
    head = extra([pipeline[-1] for pipeline in divided])
    if head is None:
        both = extra([pipeline.stages[0] for pipeline in plan.pipelines])
        head = None if both is None else max(0.0, both - known.embedding_layers)
    return Ends(
        embedding_layers=known.embedding_layers if embedding is None else embedding,
        head_layers=known.head_layers if head is None else head,
    )
