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
    """So many iterations one after the other must show a gain of `sure_gain` or more."""
    long_patience: int = 8
    """So many must show a smaller gain: what noise looks like, and what is not urgent."""
    sure_gain: float = 0.25
    """Part of the step's time that no noise of three iterations' medians makes up."""
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
        if not 0 <= self.sure_gain < 1:
            raise BadInputError(f"sure_gain {self.sure_gain} must be in [0, 1).")
        for name in ("window", "patience", "long_patience", "offer_timeout_iterations"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} {getattr(self, name)} must be at least 1.")
