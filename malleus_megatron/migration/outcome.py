"""What a migration came to, over all ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationTimes:
    """Of one switch, on the slowest rank; what was predicted was so before the first message."""

    seconds: float
    """From the first preparation to the last step of the commit."""
    predicted_seconds: float
    """The transfer's, and the rest as in the switches before; in the first as it was so far."""
    transfer_seconds: float
    """From the first copy to the last message, memory that comes and leaves included."""
    predicted_transfer_seconds: float
    """The closed form of `cost.migration`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Time, bytes and memory of one switch."""

    times: MigrationTimes
    received_bytes: tuple[int, ...]
    """By rank: what came."""
    needed_bytes: tuple[int, ...]
    """By rank: what it needed and did not hold."""
    peak_extra_bytes: int
    """Most memory that a rank had beyond the larger of its old and its new state: measured."""
    gave_back: bool
    """Whether old state left on the way, so that there was no way back."""
