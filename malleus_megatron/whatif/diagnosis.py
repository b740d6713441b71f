"""One sentence: what holds the job up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from malleus_megatron.whatif.causes import Causes
from malleus_megatron.whatif.operations import COMMUNICATION, FAMILIES
from malleus_megatron.whatif.workers import THRESHOLD, Straggler

ALIKE = 0.9
"""Correlation of forward and backward times from which sequence lengths are the cause."""
SMALLEST_SHARE = 0.2
"""A cause that leaves a smaller share of the lost time is not named."""
MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the sentence is made of."""

    slowdown: float
    causes: Causes
    stragglers: tuple[Straggler, ...]
    steps: tuple[int, ...]
    num_pipelines: int
    highest_rate: float
    """Highest median rate of a worker."""
    stage_times_s: tuple[float, ...]
    by_operation: Mapping[str, float]
    noticeable: float
    """From here on a slowdown is worth a word."""


def diagnose(evidence: Evidence) -> str:
    """Name the cause that alone leaves the largest slowdown."""
    found = evidence.causes
    sayings: list[tuple[float, Callable[[Evidence], str]]] = [
        (found.gpus, _gpus),
        (found.stages, _stages),
        (found.microbatches, _microbatches),
        (found.pauses, _pauses),
        (found.communication, _communication),
        (found.gaps, _gaps),
    ]
    lost = evidence.slowdown * found.gaps - 1
    if max(evidence.slowdown, found.gaps) < evidence.noticeable:
        return f"Nothing holds the job up: its slowdown is {evidence.slowdown:.3f}."
    largest, say = max(sayings, key=lambda saying: saying[0])
    if largest - 1 < SMALLEST_SHARE * lost:
        return (
            f"No single cause explains the slowdown of {evidence.slowdown:.2f}; the largest alone "
            f"leaves {largest:.3f}."
        )
    return say(evidence)


def _gpus(evidence: Evidence) -> str:
    alone = f"alone, that is a slowdown of {evidence.causes.gpus:.2f} of {evidence.slowdown:.2f}"
    if not evidence.stragglers:
        return (
            f"Uneven GPUs, none above the threshold of {THRESHOLD:g}: the slowest worker has the "
            f"rate {evidence.highest_rate:.2f}; {alone}."
        )
    if len(evidence.stragglers) == 1:
        [slow] = evidence.stragglers
        return (
            f"A slow GPU: {_worker(slow)} takes {slow.rate:.2f} times as long as its peers"
            f"{_during(slow, evidence)}; {alone}."
        )
    named = [
        f"{_worker(slow)} {slow.rate:.2f} times{_during(slow, evidence)}"
        for slow in evidence.stragglers[:MOST_NAMED]
    ]
    more = len(evidence.stragglers) - len(named)
    if more:
        named.append(f"{more} more")
    return f"Slow GPUs, which take longer than their peers: {', '.join(named)}; {alone}."


def _worker(straggler: Straggler) -> str:
    return f"worker (dp {straggler.dp_rank}, stage {straggler.stage})"


def _during(straggler: Straggler, evidence: Evidence) -> str:
    """The steps, unless they are all."""
    if (straggler.first_step, straggler.last_step) == (evidence.steps[0], evidence.steps[-1]):
        return ""
    return f" from step {straggler.first_step} to {straggler.last_step}"


def _stages(evidence: Evidence) -> str:
    times_s = evidence.stage_times_s
    heaviest = max(range(len(times_s)), key=lambda stage: times_s[stage])
    others_s = [time_s for stage, time_s in enumerate(times_s) if stage != heaviest]
    ratio = times_s[heaviest] * len(others_s) / sum(others_s)
    last = heaviest == len(times_s) - 1
    place = f"The last stage (stage {heaviest})" if last else f"Stage {heaviest}"
    doubt = ", unless its GPU is slow, which one pipeline cannot show"
    return (
        f"{place} is too heavy: a micro-batch takes {ratio:.2f} times as long there as on the "
        f"others, alone a slowdown of {evidence.causes.stages:.2f} of "
        f"{evidence.slowdown:.2f}; give it fewer layers"
        f"{doubt if evidence.num_pipelines == 1 else ''}."
    )


def _microbatches(evidence: Evidence) -> str:
    alone = (
        f"alone, that is a slowdown of {evidence.causes.microbatches:.2f} of "
        f"{evidence.slowdown:.2f}"
    )
    correlation = f"{evidence.causes.correlation:.2f}"
    if evidence.causes.correlation >= ALIKE:
        return (
            "Unequal sequence lengths: forward and backward of a micro-batch are long or short "
            f"together (correlation {correlation}); {alone}."
        )
    return (
        "Micro-batches take unequal times, forward and backward not alike (correlation "
        f"{correlation}), so not for their lengths; {alone}."
    )


def _pauses(evidence: Evidence) -> str:
    return (
        "Pauses: a few compute operations take more than twice as long as usual, or garbage is "
        f"collected at different times; alone, that is a slowdown of {evidence.causes.pauses:.2f} "
        f"of {evidence.slowdown:.2f}."
    )


def _communication(evidence: Evidence) -> str:
    families = {FAMILIES.get(kind, kind) for kind in COMMUNICATION}
    worst = max(families & set(evidence.by_operation), key=lambda name: evidence.by_operation[name])
    return (
        f"Communication: above all {worst} is at times slower than its median; alone, that is a "
        f"slowdown of {evidence.causes.communication:.2f} of {evidence.slowdown:.2f}."
    )


def _gaps(evidence: Evidence) -> str:
    return (
        f"Pauses between operations: the measured step is {evidence.causes.gaps - 1:.1%} longer "
        "than its operations and their dependencies explain (input data, the host, logging)."
    )
