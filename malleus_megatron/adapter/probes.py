"""Probes: of GPUs that train nothing now, so that they can come back, and of all when asked."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

import torch

from malleus_megatron.adapter.inputs import Inputs
from malleus_megatron.adapter.rows import ABSENT, BoundaryRow
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import HEALTHY
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.probe import Probe

_LEARNING_RUNS = 3
_CLEARLY_SLOW = 1.1
_MOST_NAMED = 16


class Probes:
    """Every rank has them; only what has learned its reference can run."""

    def __init__(self, agreement: Agreement, make: Callable[[], Probe]) -> None:
        """Take no memory yet.

        Args:
            agreement: The ranks' control channel.
            make: Makes this rank's probe, which takes memory.
        """
        self._agreement = agreement
        self._make = make
        self._probe: Probe | None = None
        self._reference_s = math.inf

    @property
    def are_ready(self) -> bool:
        """Whether the time on a healthy GPU is known; the same on all ranks."""
        return self._reference_s < math.inf

    def learn(self) -> None:
        """Probe all GPUs at once; a collective that waits for them.

        The lower median of all GPUs is the reference: up to half of them may be slow already. Where
        no GPU can be timed there is none.

        Raises:
            MigrationError: on all ranks, if one has no room for its probe.
        """
        self._probe, time_s = self._agreement.together(
            "probing the GPU", lambda: _timed(self._make())
        )
        reference_s = median_low(row[0] for row in self._agreement.exchange([time_s]))
        self._reference_s = reference_s if reference_s > 0 else math.inf

    def run(self, iteration: int) -> None:
        """Probe this rank's GPU, if that is possible; on a GPU it is only queued."""
        if self._probe is not None and self.are_ready:
            self._probe.run(iteration)

    def rate(self) -> float:
        """Of the last probe that has ended; NaN if there is no news."""
        time_s = None if self._probe is None else self._probe.time_s()
        if time_s is None or not 0 < time_s < math.inf or not self.are_ready:
            return ABSENT
        return time_s / self._reference_s


def probes_for(agreement: Agreement, device: torch.device, inputs: Inputs) -> Probes:
    """Probes that are paced and slowed down as the user's files say."""

    def probe() -> Probe:
        return Probe(
            gpu=agreement.rank, device=device, pace=inputs.pace, injection=inputs.injection
        )

    return Probes(agreement, probe)


class ProbeWatch:
    """On rank 0: waits for the rates of a probe that somebody asked for."""

    def __init__(self) -> None:
        """Nobody has asked."""
        self.is_awaited = False

    def look(self, rows: Sequence[BoundaryRow], plan: Plan) -> dict[int, float] | None:
        """The rates of all GPUs, once, when those that train have told theirs.

        All were probed at about one time, so the lower median of them is what is healthy now: what
        slows the whole machine down since the job began makes nobody slow.

        Args:
            rows: Of all ranks, at a boundary.
            plan: In force in the iteration before it; GPUs on standby always tell.
        """
        rates = {gpu: r.probe_rate for gpu, r in enumerate(rows) if not math.isnan(r.probe_rate)}
        if not self.is_awaited or rates.keys() <= set(plan.standby):
            return None
        self.is_awaited = False
        common = median_low(rates.values())
        return {gpu: rate / common for gpu, rate in rates.items()}


def probe_words(probed: Mapping[int, float], in_steps: Mapping[int, float]) -> str:
    """Which GPUs are slow by their probe or by their steps, side by side, and the others' range."""
    slow = [
        gpu
        for gpu, rate in sorted(probed.items())
        if max(rate, in_steps.get(gpu, HEALTHY)) > _CLEARLY_SLOW
    ]
    named = [
        f"GPU {gpu} at {probed[gpu]:.2f}"
        + (f" (in its steps {in_steps[gpu]:.2f})" if gpu in in_steps else "")
        for gpu in slow[:_MOST_NAMED]
    ]
    if len(slow) > _MOST_NAMED:
        named.append(f"{len(slow) - _MOST_NAMED} more")
    rest = [rate for gpu, rate in probed.items() if gpu not in slow]
    if rest:
        others = f"the other {len(rest)}" if named else f"all {len(rest)} GPUs"
        named.append(f"{others} from {min(rest):.2f} to {max(rest):.2f}")
    return "probe: " + ", ".join(named)


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
