"""Reading fields of a JSON document: each function returns the value or says what is wrong."""

import difflib
import math
from collections.abc import Collection
from typing import Any

from malleus_megatron.errors import BadInputError


def as_dict(value: Any, where: str) -> dict[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: expected an object, got {_shown(value)}.")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """The value, which must be an array."""
    if not isinstance(value, list):
        raise BadInputError(f"{where}: expected an array, got {_shown(value)}.")
    return value


def as_int(value: Any, where: str) -> int:
    """The value, which must be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInputError(f"{where}: expected a whole number, got {_shown(value)}.")
    return value


def as_float(value: Any, where: str) -> float:
    """The value, which must be a finite number."""
    number = to_float(value)
    if number is None or not math.isfinite(number):
        raise BadInputError(f"{where}: expected a finite number, got {_shown(value)}.")
    return number


def to_float(value: object) -> float | None:
    """A JSON number as a float, infinite where it is too large for one; None: not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def required(body: dict[str, Any], name: str, where: str) -> Any:
    """The field, which must be there."""
    if name not in body:
        raise BadInputError(f"{where}: the field {name!r} is missing.")
    return body[name]


def only_known(body: dict[str, Any], known: Collection[str], where: str) -> None:
    """Refuse a field that nobody reads, but a comment: it is an optional one, misspelt."""
    for name in body:
        if name not in known and name != "comment":
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise BadInputError(
                f"{where}: the field {_shown(name)} is not known; the nearest is {nearest!r}. "
                "What people are to read belongs into 'comment'."
            )


def check_version(body: dict[str, Any], supported: int, where: str) -> None:
    """Refuse a document of another schema version."""
    version = required(body, "schema_version", where)
    if version != supported or isinstance(version, bool):
        raise BadInputError(
            f"{where}: schema_version {_shown(version)} is not known; "
            f"this version reads {supported}."
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
