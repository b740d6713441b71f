"""Sizes up to which a problem is taken: far beyond any job, and far from where numbers break."""

from malleus_megatron.errors import BadInputError

MOST_GPUS = 1_000_000
MOST_LAYERS = 100_000
MOST_MICROBATCHES = 1_000_000
LARGEST_RATE = 1e6
"""A GPU that takes a million times as long has failed."""
SHORTEST_S, LONGEST_S = 1e-9, 1e9
LONGEST_LAYER_S = 3600.0
"""Of a pace: at the largest rate still a time that a process can sleep."""
LARGEST_MIB = 1e12


def check_within(
    where: str, value: float, lowest: float, highest: float, *, unit: str = ""
) -> None:
    """Refuse a value outside of a range, in few words however long the number is.

    Raises:
        BadInputError: with the field, the value and the range.
    """
    if not lowest <= value <= highest:
        shown = str(value) if abs(value) < 1e15 else "a number too large to be meant"
        raise BadInputError(f"{where}: {shown}{unit}; need {lowest:g} to {highest:g}.")
