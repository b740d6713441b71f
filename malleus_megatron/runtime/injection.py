"""Injected straggling rates: what is added to a layer's own work so that a GPU looks slow."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Protocol

import torch

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.injection import Injection
from malleus_megatron.plan.pace import Pace
from malleus_megatron.runtime.pacing import Pacer, Sleeper
from malleus_megatron.runtime.stopwatch import CudaStopwatch, Stopwatch
from malleus_megatron.runtime.windows import LayerCall, Phase

_CALIBRATION_CYCLES = 20_000_000


class Stretch(Protocol):
    """Makes layer calls last longer than their own work."""

    rate: float
    """The injected straggling rate of the current iteration."""

    def reset(self, tp_degree: int) -> None:
        """Other layers are measured from now on, at this TP degree."""

    def stretch(self, call: LayerCall) -> float:
        """Add to a call whose own work is done. Returns the seconds that it tried to add."""


class HostInjection:
    """Without a pace, on CPU: sleep `rate - 1` times the layer's own compute time."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        """Healthy until `rate` says otherwise."""
        self.rate = 1.0
        self._stopwatch = stopwatch
        self._sleeper = Sleeper()

    def reset(self, tp_degree: int) -> None:
        """Nothing is kept about layers."""

    def stretch(self, call: LayerCall) -> float:
        """Sleep after the call."""
        if self.rate == 1.0:
            return 0.0
        return self._sleeper.sleep((self.rate - 1) * call.own_s(self._stopwatch))


class CudaInjection:
    """On a GPU: keep the stream busy for `rate - 1` times the layer's healthy time.

    The healthy time is the layer's own median in the last iteration that was read, so an injection
    starts one iteration after the first measured one. The busy kernel counts clock cycles, and a
    loaded GPU's clock moves: what each iteration really added corrects the next.
    """

    def __init__(self, stopwatch: CudaStopwatch) -> None:
        """Measure the current device's clock; waits for the device once."""
        self.rate = 1.0
        self._stopwatch = stopwatch
        self._healthy_s: dict[tuple[int, Phase], float] = {}
        self._cycles_per_s = _cycles_per_s()

    def reset(self, tp_degree: int) -> None:  # noqa: ARG002
        """Forget the healthy times: the layers are others now."""
        self._healthy_s.clear()

    def stretch(self, call: LayerCall) -> float:
        """Queue device work behind the call."""
        added_s = (self.rate - 1) * self._healthy_s.get((call.layer, call.phase), 0.0)
        if added_s > 0:
            torch.cuda._sleep(int(added_s * self._cycles_per_s))  # noqa: SLF001
        return added_s

    def learn(self, calls: Sequence[LayerCall]) -> None:
        """Take healthy times and the clock's correction from calls that the device has passed."""
        own_s: dict[tuple[int, Phase], list[float]] = defaultdict(list)
        drift = []
        for call in calls:
            own_s[call.layer, call.phase].append(call.own_s(self._stopwatch))
            if call.added_s > 0:
                really_added_s = call.total_s(self._stopwatch) - own_s[call.layer, call.phase][-1]
                drift.append(really_added_s / call.added_s)
        self._healthy_s |= {key: median(times) for key, times in own_s.items()}
        if drift:
            self._cycles_per_s /= median(drift)


def stretch_for(
    *,
    gpu: int,
    pace: Pace | None,
    injection: Injection,
    stopwatch: Stopwatch,
) -> Stretch | None:
    """What stretches the layers of this GPU; None: they take the time they take.

    Raises:
        BadInputError: a pace on a GPU, or a rate below 1 where no pace could be shortened.
    """
    rates = injection.rates_of(gpu)
    if pace is not None:
        if isinstance(stopwatch, CudaStopwatch):
            raise BadInputError("A pace holds layers in CPU mode only; this job trains on GPUs.")
        return Pacer(pace, stopwatch)
    if any(rate < 1 for rate in rates):
        raise BadInputError(
            f"GPU {gpu}: rate {min(rates)} is below 1; without a pace (CPU mode) a GPU can be "
            "slowed down, not sped up."
        )
    if not rates:
        return None
    if isinstance(stopwatch, CudaStopwatch):
        return CudaInjection(stopwatch)
    return HostInjection(stopwatch)


def _cycles_per_s() -> float:
    """Cycles that the busy kernel counts in a second of device time."""
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # noqa: SLF001  (warms the clock up)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # noqa: SLF001
    end.record()
    end.synchronize()
    return _CALIBRATION_CYCLES / (float(start.elapsed_time(end)) / 1000)
