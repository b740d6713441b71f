"""A trace without holes: every operation of every step and pipeline, as dense arrays."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import numpy as np

from malleus_megatron.whatif.operations import Operation
from malleus_megatron.whatif.rows import Flags, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A step that the analysis leaves out, and why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All pipelines run the same operations in every step: the axes are [operation, step, dp]."""

    operations: tuple[Operation, ...]
    steps: tuple[int, ...]
    num_pipelines: int
    start_s: Floats
    duration_s: Floats
    skipped: tuple[SkippedStep, ...] = ()
    at: Mapping[Operation, int] = field(init=False)
    """Where an operation stands on the first axis."""
    num_stages: int = field(init=False)
    """Of each pipeline."""

    def __post_init__(self) -> None:
        """Look up once what is asked often."""
        positions = {operation: index for index, operation in enumerate(self.operations)}
        object.__setattr__(self, "at", positions)
        last = max(operation.stage for operation in self.operations)
        object.__setattr__(self, "num_stages", last + 1)

    @property
    def end_s(self) -> Floats:
        """When each operation ended."""
        return self.start_s + self.duration_s

    def measured_step_s(self) -> Floats:
        """Of each step: from the first start to the last end, [step]."""
        first_s: Floats = self.start_s.min(axis=(0, 2))
        last_s: Floats = self.end_s.max(axis=(0, 2))
        return last_s - first_s

    def where_kind(self, kinds: Container[str]) -> Flags:
        """Which operations are of one of these kinds, [operation]."""
        return np.array([operation.kind in kinds for operation in self.operations])

    def where_stage(self, stage: int) -> Flags:
        """Which operations are of this stage, [operation]."""
        return np.array([operation.stage == stage for operation in self.operations])

    def of(self, stage: int, *kinds: str) -> list[int]:
        """Positions of a stage's operations of some kinds, in order of their numbers."""
        return sorted(
            (
                index
                for operation, index in self.at.items()
                if operation.stage == stage and operation.kind in kinds
            ),
            key=lambda index: self.operations[index].number,
        )
