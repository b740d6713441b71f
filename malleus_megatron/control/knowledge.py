"""What the controller knows of the job's GPUs. It outlives a change of layout."""

import math
from collections import deque
from dataclasses import replace
from statistics import median

from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Detection, Observation
from malleus_megatron.detector.collectives import Collectives
from malleus_megatron.detector.degrees import DegreeTimes, TimesByDegree
from malleus_megatron.detector.ends import Ends, measured_ends
from malleus_megatron.detector.rates import Rating, Seen
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import HEALTHY, Rates

_MOVED = 1.1
"""A straggler's rate must change by this factor before another one is planned with."""


class Knowledge:
    """Rates, stragglers, and what healthy GPUs take. A GPU that is not measured keeps its rate."""

    def __init__(self, policy: Policy, prior: TimesByDegree = ()) -> None:
        """Know nothing but healthy layer times by TP degree, if any are known beforehand."""
        self.ends = Ends()
        self._policy = policy
        self._rating = Rating(times=DegreeTimes(prior=prior))
        self._ends: deque[Ends] = deque()
        self._collectives = Collectives()
        self._planned: dict[int, float] = {}
        self.had_lasted = 0
        """Iterations for which what plans depend on had shown before it was certain just now."""

    @property
    def rates(self) -> Rates:
        """The last one known of each GPU that was seen long enough."""
        return Rates.of(
            {
                gpu: math.exp(track.level)
                for gpu, track in self._rating.tracks.items()
                if track.is_measured or len(track.readings) >= self._policy.window
            }
        )

    @property
    def sure_rates(self) -> Rates:
        """Of GPUs that differ from healthy ones by more than noise, stragglers or not."""
        return Rates.of(
            {
                gpu: math.exp(track.level)
                for gpu, track in self._rating.tracks.items()
                if abs(track.level) > track.doubt or track.named is not None
            }
        )

    @property
    def planned_rates(self) -> Rates:
        """Of the stragglers, as plans see them: small corrections leave them as they are."""
        return Rates.of(self._planned)

    @property
    def detections(self) -> tuple[Detection, ...]:
        """One for each straggler."""
        return tuple(
            Detection(gpu=gpu, since=track.since, named=track.named)
            for gpu, track in self._rating.tracks.items()
            if track.named is not None and track.since is not None
        )

    @property
    def ignored(self) -> tuple[int, ...]:
        """GPUs that hold layers and gave no usable sample in the last iteration."""
        return self._rating.ignored

    @property
    def common_rate(self) -> float:
        """Of all healthy GPUs together, against the best that they did; 1 below the threshold."""
        common = self._rating.common
        return common if common > self._policy.threshold else HEALTHY

    def learn(self, observation: Observation, layout: Plan, policy: Policy) -> None:
        """Take in an iteration that ran under this layout."""
        self._policy = policy
        degrees = {
            gpu: len(stage.gpus)
            for pipeline in layout.pipelines
            for stage in pipeline.stages
            if stage.num_layers
            for gpu in stage.gpus
        }
        seen = Seen(
            iteration=observation.iteration,
            samples=observation.samples,
            degrees=degrees,
            probes=tuple(probe for probe in observation.probes if probe[0] in layout.standby),
        )
        self._rating = self._rating.after(seen, policy.sensitivity)
        self._learn_ends(observation, layout)
        self._collectives = self._collectives.after(observation.samples, layout, policy.long_window)
        before, self._planned = self._planned, self._planned_now()
        changed = dict(before.items() ^ self._planned.items())
        firsts = [self._rating.tracks[gpu].readings[0][0] for gpu in changed]
        self.had_lasted = observation.iteration - max(firsts) if firsts else 0

    def healthy_s(self, degree: int) -> float:
        """A layer on healthy GPUs at a TP degree, collectives included.

        As measured now, else as expected.

        Raises:
            BadInputError: nothing was ever measured and nothing is known beforehand.
        """
        compute_s = self._rating.healthy_s(degree, self._policy.window)
        return compute_s + self._collectives.at(degree)

    def is_within_reach(self, degree: int) -> bool:
        """True if the time at this degree is known well enough to plan with it."""
        return self._rating.times.is_within_reach(degree)

    def _learn_ends(self, observation: Observation, layout: Plan) -> None:
        """The median of what many iterations show: ends do not change."""
        self._ends.append(measured_ends([observation.samples], layout, self.ends))
        while len(self._ends) > self._policy.long_window:
            self._ends.popleft()
        self.ends = replace(
            self.ends,
            embedding_layers=median(ends.embedding_layers for ends in self._ends),
            head_layers=median(ends.head_layers for ends in self._ends),
        )

    def _planned_now(self) -> dict[int, float]:
        rates = {
            detection.gpu: math.exp(self._rating.tracks[detection.gpu].level)
            for detection in self.detections
        }
        planned = {gpu: self._planned.get(gpu, rate) for gpu, rate in rates.items()}
        return {
            gpu: rate
            if max(rate, planned[gpu]) / min(rate, planned[gpu]) > _MOVED
            else planned[gpu]
            for gpu, rate in rates.items()
        }
