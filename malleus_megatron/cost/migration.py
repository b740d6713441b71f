"""The time to move state: the busiest GPU's bytes over its links, round by round."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

_TRUST = 0.5
"""How far a single migration's time moves the correction, as a power of the ratio."""
_LARGEST_STEP = 4.0
"""A migration that was held up by something else does not spoil the next prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Of one GPU, when all of them send and receive at once."""

    inside_bytes_per_s: float
    """To another GPU of its node."""
    between_bytes_per_s: float
    """To another node."""
    copy_bytes_per_s: float
    """From one of its tensors to another."""
    round_s: float
    """What a round takes without any bytes: ranks meet, messages start."""
    correction: float = 1.0
    """Learnt from migrations: measured over predicted time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLoad:
    """Bytes of the busiest GPU in its busier direction; not the same GPU for both links."""

    inside_bytes: int
    between_bytes: int


def round_time_s(speeds: LinkSpeeds, load: RoundLoad) -> float:
    """t = t0 + max(a / v, b / w): links inside the node and between nodes work side by side."""
    inside_s = load.inside_bytes / speeds.inside_bytes_per_s
    between_s = load.between_bytes / speeds.between_bytes_per_s
    return speeds.round_s + max(inside_s, between_s)


def transfer_time_s(
    speeds: LinkSpeeds, rounds: Iterable[RoundLoad], copied_bytes: Iterable[int]
) -> float:
    """T = f (sum over rounds of t + sum over batches of c / u), with f the correction.

    Args:
        speeds: Measured.
        rounds: In any order.
        copied_bytes: By batch, of the GPU that copies most inside itself.
    """
    rounds_s = sum(round_time_s(speeds, load) for load in rounds)
    return speeds.correction * (rounds_s + sum(copied_bytes) / speeds.copy_bytes_per_s)


def corrected(speeds: LinkSpeeds, *, predicted_s: float, measured_s: float) -> LinkSpeeds:
    """Learn from a migration: f' = f (measured / predicted)^(1/2), the ratio within [1/4, 4]."""
    if predicted_s <= 0 or measured_s <= 0:
        return speeds
    ratio = min(max(measured_s / predicted_s, 1 / _LARGEST_STEP), _LARGEST_STEP)
    return replace(speeds, correction=speeds.correction * ratio**_TRUST)
