"""What the controller knows of the job's GPUs. It outlives a change of layout."""

from collections.abc import Sequence
from statistics import median_low

from malleus_megatron.control.values import Observation
from malleus_megatron.detector.degrees import DegreeTimes, TimesByDegree
from malleus_megatron.detector.ends import Ends, measured_ends
from malleus_megatron.detector.rates import estimate_rates
from malleus_megatron.detector.smoothing import Window
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import HEALTHY, Rates


class Knowledge:
    """Rates, stragglers, and what healthy GPUs take. A GPU that is not measured keeps its rate."""

    def __init__(self, prior: TimesByDegree = ()) -> None:
        """Know nothing but healthy layer times by TP degree, if any are known beforehand."""
        self.stragglers: tuple[int, ...] = ()
        self.ignored: tuple[int, ...] = ()
        """GPUs that hold layers and gave no usable sample in the last iteration."""
        self.ends = Ends()
        self._rates: dict[int, float] = {}
        self._times = DegreeTimes(prior=prior)
        self._healthy_s: dict[int, float] = {}

    @property
    def rates(self) -> Rates:
        """The last one known of each GPU."""
        return Rates.of(self._rates)

    def learn(self, observed: Sequence[Observation], layout: Plan, threshold: float) -> None:
        """Take in the last iterations, all of them under one layout."""
        window: Window = [observation.samples for observation in observed]
        degrees = {
            gpu: len(stage.gpus)
            for pipeline in layout.pipelines
            for stage in pipeline.stages
            for gpu in stage.gpus
        }
        estimate = estimate_rates(window, degrees, self._times, threshold=threshold)
        self._times, self._healthy_s = estimate.times, dict(estimate.healthy_s)
        self._rates |= dict(estimate.rates) | _probed(observed, layout.standby)
        self.ignored = estimate.ignored
        self.ends = measured_ends(window, layout, self.ends)
        self._name_stragglers(threshold)

    def healthy_s(self, degree: int) -> float:
        """A layer on healthy GPUs at a TP degree: as measured now, else as expected.

        Raises:
            BadInputError: nothing was ever measured and nothing is known beforehand.
        """
        return self._healthy_s.get(degree) or self._times.expected_s(degree)

    def is_within_reach(self, degree: int) -> bool:
        """True if the time at this degree is known well enough to plan with it."""
        return self._times.is_within_reach(degree)

    def _name_stragglers(self, threshold: float) -> None:
        """Those above the threshold, and those named before that are not clearly below it."""
        cleared = (HEALTHY + threshold) / 2
        self.stragglers = tuple(
            gpu
            for gpu, rate in sorted(self._rates.items())
            if rate > (cleared if gpu in self.stragglers else threshold)
        )


def _probed(observed: Sequence[Observation], standby: Sequence[int]) -> dict[int, float]:
    """Median rate of every standby GPU that was probed."""
    rates: dict[int, list[float]] = {}
    for observation in observed:
        for gpu, rate in observation.probes:
            if gpu in standby:
                rates.setdefault(gpu, []).append(rate)
    return {gpu: median_low(values) for gpu, values in rates.items()}
