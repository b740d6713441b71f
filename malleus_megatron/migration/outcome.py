"""What a migration came to, over all ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Time, bytes and memory of one switch."""

    seconds: float
    """From the first preparation to the last message, on the slowest rank."""
    received_bytes: tuple[int, ...]
    """By rank: what came."""
    needed_bytes: tuple[int, ...]
    """By rank: what it needed and did not hold."""
    peak_extra_bytes: int
    """Most memory that a rank had beside its old stage: the new state, and messages in flight."""
