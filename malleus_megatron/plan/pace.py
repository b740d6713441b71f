"""pace.json: how long a healthy GPU takes for one layer and micro-batch, per TP degree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import read_json
from malleus_megatron.plan.fields import as_dict, as_float, required
from malleus_megatron.plan.limits import LONGEST_LAYER_S
from malleus_megatron.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPace:
    """Nominal time of one layer and one micro-batch; the backward includes any recomputation."""

    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        """Refuse times that are no positive number, or so long that nobody can mean them."""
        _layer_time(self.forward_s, "forward_s")
        _layer_time(self.backward_s, "backward_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Nominal layer times of every TP degree that the job may use."""

    by_degree: tuple[tuple[int, LayerPace], ...]
    """Pairs (TP degree, times), sorted by degree."""

    def at(self, tp_degree: int) -> LayerPace:
        """The times at a TP degree.

        Raises:
            BadInputError: the pace does not say; the message names the degrees that it has.
        """
        times = dict(self.by_degree).get(tp_degree)
        if times is None:
            raise BadInputError(
                f"The pace has no times for TP degree {tp_degree}; it has {_degrees(self)}. "
                "Add them to the pace file."
            )
        return times

    def check(self, plan: Plan) -> None:
        """Refuse a plan with a TP degree that has no times.

        Raises:
            BadInputError: as `at`.
        """
        for degree in {len(stage.gpus) for pipe in plan.pipelines for stage in pipe.stages}:
            self.at(degree)


def pace_from_json(document: Any, where: str = "pace") -> Pace:
    """Read pace.json. Unknown fields are let through.

    Raises:
        BadInputError: a missing field, a key that is no TP degree, a time that is not
            within limits, or degrees that only one of the two tables has.
    """
    body = as_dict(document, where)
    forward = _times(body, "layer_forward_s", where)
    backward = _times(body, "layer_backward_s", where)
    if forward.keys() != backward.keys():
        raise BadInputError(
            f"{where}: layer_forward_s has TP degrees {sorted(forward)}, "
            f"layer_backward_s has {sorted(backward)}; both must have the same."
        )
    return Pace(
        by_degree=tuple(
            (degree, LayerPace(forward_s=forward[degree], backward_s=backward[degree]))
            for degree in sorted(forward)
        )
    )


def read_pace(path: Path) -> Pace:
    """Read a pace.json file."""
    return pace_from_json(read_json(path), str(path))


_LONGEST_DEGREE = 6
"""Digits; longer ones are no degree, and Python refuses to read thousands of them."""


def _times(body: dict[str, Any], name: str, where: str) -> dict[int, float]:
    times: dict[int, float] = {}
    for key, value in as_dict(required(body, name, where), f"{where}.{name}").items():
        place = f"{where}.{name}[{key!r}]"
        digits = key.isascii() and key.isdigit() and len(key) <= _LONGEST_DEGREE
        if not digits or int(key) < 1:
            raise BadInputError(f"{where}.{name}: {key[:40]!r} is not a TP degree.")
        times[int(key)] = _layer_time(value, place)
    if not times:
        raise BadInputError(f"{where}.{name}: names no TP degree.")
    return times


def _layer_time(value: Any, where: str) -> float:
    time_s = as_float(value, where)
    if not 0 < time_s <= LONGEST_LAYER_S:
        raise BadInputError(
            f"{where}: {time_s} s must be above 0 and at most {LONGEST_LAYER_S:g} s."
        )
    return time_s


def _degrees(pace: Pace) -> str:
    return ", ".join(str(degree) for degree, _ in pace.by_degree) or "none"
