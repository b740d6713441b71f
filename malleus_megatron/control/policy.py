"""How sure and how large a gain must be before the job is asked to change."""

from dataclasses import dataclass

from malleus_megatron.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The controller's settings; they may change while the job runs."""

    threshold: float = 1.2
    """A GPU with a rate above it is a straggler."""
    window: int = 3
    """Iterations whose medians count; nothing is decided before so many were seen."""
    patience: int = 2
    """So many iterations one after the other must show the gain."""
    min_gain: float = 0.03
    """Part of the step's time that a new plan must save."""
    offer_timeout_iterations: int = 10
    """An offer that is not taken by then is forgotten; a refused plan rests as long."""

    def __post_init__(self) -> None:
        """Refuse values with which nothing could be decided."""
        if not self.threshold > 1:
            raise BadInputError(f"threshold {self.threshold} must be above 1 (1 = healthy).")
        if not 0 <= self.min_gain < 1:
            raise BadInputError(f"min_gain {self.min_gain} must be in [0, 1).")
        for name in ("window", "patience", "offer_timeout_iterations"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} {getattr(self, name)} must be at least 1.")
