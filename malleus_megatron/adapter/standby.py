"""GPUs that train nothing now: probed while the others work, so that they can come back."""

import math
from collections.abc import Callable
from statistics import median_low

import torch

from malleus_megatron.adapter.rows import ABSENT
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.probe import Probe

_LEARNING_RUNS = 3


class Standby:
    """Every rank has one; it works only where the rank is on standby."""

    def __init__(self, probe: Probe, reference_s: float) -> None:
        """Hold a probe and its time on a healthy GPU, in seconds; see `learn_reference`."""
        self._probe = probe
        self._reference_s = reference_s

    def run(self, iteration: int) -> None:
        """Instead of an iteration's passes."""
        self._probe.run(iteration)

    def rate(self) -> float:
        """Of the last probe that has ended; NaN if there is no news."""
        time_s = self._probe.time_s()
        if time_s is None or not 0 < time_s < math.inf:
            return ABSENT
        return time_s / self._reference_s


def learn_reference(agreement: Agreement, make: Callable[[], Probe]) -> Standby | None:
    """Probe all GPUs at once before the first step; a collective.

    The lower median of all GPUs is the reference: up to half of them may be slow already.

    Args:
        agreement: The ranks' control channel.
        make: Makes this rank's probe, which takes memory.

    Returns:
        None where no GPU could be timed.

    Raises:
        MigrationError: on all ranks, if one has no room for its probe.
    """
    probe, time_s = agreement.together("probing the GPU", lambda: _timed(make()))
    rows = agreement.exchange([time_s])
    reference_s = median_low(row[0] for row in rows)
    return Standby(probe, reference_s) if 0 < reference_s < math.inf else None


def _timed(probe: Probe) -> tuple[Probe, float]:
    """With its least time: the first runs warm up, and a busy host only ever adds."""
    times = []
    for _ in range(_LEARNING_RUNS):
        probe.run(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        time_s = probe.time_s()
        times.append(math.inf if time_s is None or math.isnan(time_s) else time_s)
    return probe, min(times)
