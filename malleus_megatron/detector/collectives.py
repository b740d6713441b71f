"""What the collectives inside a layer take by themselves, by TP degree.

The member of a TP group that comes last to a collective waits for nobody, so the least that any
member saw is the transfer alone; what the others saw has their waiting on top.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

from malleus_megatron.detector.degrees import nearest
from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Seconds of one layer and micro-batch, forward plus backward. A value: `after` makes the next.

    What was seen at a degree holds until the degree is seen again.
    """

    seen: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """TP degree -> what the last iterations showed, oldest first."""

    def after(self, samples: Iterable[Sample], layout: Plan, window: int) -> "Collectives":
        """With one more iteration.

        Args:
            samples: Of the iteration.
            layout: Whose TP groups were in force.
            window: How many iterations of a degree count.
        """
        now = _transfers(samples, layout)
        seen = {
            degree: (*self.seen.get(degree, ()), time_s)[-window:] for degree, time_s in now.items()
        }
        return Collectives(seen={**self.seen, **seen})

    def at(self, degree: int) -> float:
        """A GPU alone has none; a degree that was never seen is taken for the nearest one."""
        if degree == 1 or not self.seen:
            return 0.0
        return median(self.seen[nearest(self.seen, degree)])


def _transfers(samples: Iterable[Sample], layout: Plan) -> dict[int, float]:
    """By degree: of each TP group the least of its members, of the groups the lower median."""
    times = {
        sample.gpu: sample.layer_collectives_s
        for sample in samples
        if 0 <= sample.layer_collectives_s < math.inf
    }
    found: dict[int, list[float]] = {}
    for pipeline in layout.pipelines:
        for stage in pipeline.stages:
            members = [times[gpu] for gpu in stage.gpus if gpu in times]
            if len(stage.gpus) > 1 and members:
                found.setdefault(len(stage.gpus), []).append(min(members))
    return {degree: median_low(least) for degree, least in found.items()}
