"""How sure and how large a gain must be before the job is asked to change."""

import math
from dataclasses import dataclass

from malleus_megatron.detector.shifts import Sensitivity
from malleus_megatron.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The controller's settings; they may change while the job runs."""

    threshold: float = 1.1
    """A GPU with a rate above it is a straggler, if that is more than noise makes up."""
    window: int = 3
    """Iterations that a large shift to a slower rate must last, and whose medians are what stages
    take; nothing is decided before so many were seen."""
    patience: int = 2
    """So many iterations one after the other must show a gain of `sure_gain` or more."""
    large_shift: float = 1.75
    """A rate that has grown by this factor is believed after `window` iterations."""
    long_patience: int = 8
    """So many must show a smaller shift, a smaller gain, or that a GPU has recovered: none of them
    is urgent."""
    long_window: int = 16
    """Iterations whose median is a GPU's rate; so many may pass before a small shift is seen."""
    sure_gain: float = 0.25
    """Part of the step's time that no noise of three iterations' medians makes up."""
    min_gain: float = 0.03
    """Part of the step's time that a new plan must save."""
    horizon: int = 200
    """Iterations over which another layout must save what the switch to it takes, at most: fewer
    where layouts are seen to stay the best ones for a shorter time."""
    switch_s: float = 1.0
    """What a switch counts as until the job has made one and says what it took."""
    offer_timeout_iterations: int = 10
    """An offer that is not taken by then is forgotten; a refused plan rests as long."""

    def __post_init__(self) -> None:
        """Refuse values with which nothing could be decided."""
        if not self.threshold > 1:
            raise BadInputError(f"threshold {self.threshold} must be above 1 (1 = healthy).")
        if not self.large_shift > 1:
            raise BadInputError(f"large_shift {self.large_shift} must be above 1.")
        if not 0 <= self.min_gain < 1:
            raise BadInputError(f"min_gain {self.min_gain} must be in [0, 1).")
        if not 0 <= self.sure_gain < 1:
            raise BadInputError(f"sure_gain {self.sure_gain} must be in [0, 1).")
        if not 0 <= self.switch_s < math.inf:
            raise BadInputError(f"switch_s {self.switch_s} must be from 0 on.")
        counts = (
            *("window", "patience", "long_patience", "long_window", "horizon"),
            "offer_timeout_iterations",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} {getattr(self, name)} must be at least 1.")

    @property
    def sensitivity(self) -> Sensitivity:
        """What of it the detector needs. The long window is no shorter than the short one."""
        return Sensitivity(
            threshold=self.threshold,
            window=self.window,
            large_shift=self.large_shift,
            patience=self.long_patience,
            long_window=max(self.long_window, self.window, self.long_patience),
        )
