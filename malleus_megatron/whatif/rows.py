"""The rows of a trace as columns of numbers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.operations import COMPUTE, KINDS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One entry per recorded operation in each column; all columns are of one length.

    Raises:
        BadInputError: no rows, an operation that is not known, no compute, or several model chunks
            a stage.
    """

    dp_rank: Ints
    stage: Ints
    step: Ints
    kind: Ints
    """Index into `kinds`."""
    kinds: tuple[str, ...]
    number: Ints
    """Among the operations of its kind that the worker runs in the step, from 0."""
    chunk: Ints
    """Model chunk of a compute operation, otherwise -1."""
    start_s: Floats
    """On one clock for all workers."""
    duration_s: Floats

    def __post_init__(self) -> None:
        """Refuse what is no trace of a pipeline."""
        if not len(self.step):
            raise BadInputError("there are no rows.")
        used = {self.kinds[index] for index in np.unique(self.kind)}
        if unknown := sorted(used - KINDS):
            raise BadInputError(
                f"optype {_short(unknown)} is not known. Known are {', '.join(sorted(KINDS))}."
            )
        if missing := [kind for kind in COMPUTE if kind not in used]:
            raise BadInputError(f"there is no {missing[0]} among the operations.")
        if (self.chunk > 0).any():
            raise BadInputError(
                "its schedule is interleaved (mc is above 0); only one model chunk a stage is read."
            )


def _short(names: list[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
