"""Replacing attributes of other packages: declared as rows, installed at once, removable.

A row names one attribute by its dotted path and says what stands there instead and why. Rows are
the only way in which this package changes Megatron or torch, so that a person can list them all.

Where the sources of the other package open a slot for us (see patches/), its attribute stays as it
is: the row fills the slot.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from malleus_megatron.errors import UnsupportedMegatronError

_MISSING = object()
_SLOT = "malleus_slot"
"""On a function whose source asks us: a namespace whose `run` is what it calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One attribute of another package, what we put in its place, and why."""

    target: str
    """Dotted name, `package.module.Class.attribute`."""
    make: Callable[[Any], Any]
    """Original value -> the value to put in its place."""
    reason: str
    """One sentence for a person."""
    signature: str | None = None
    """`str(inspect.signature(original))` without annotations; None: not checked (values, torch)."""
    optional: bool = False
    """True: a target that does not exist is left out rather than refused."""


def resolve(target: str) -> tuple[Any, str]:
    """Find the owner of a dotted name.

    Returns:
        The module or class that holds the attribute, and the attribute's name.

    Raises:
        UnsupportedMegatronError: no such module or class.
    """
    names = target.split(".")
    for cut in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:cut])
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and module_name.startswith(error.name):
                continue
            raise
        for name in names[cut:-1]:
            if not hasattr(owner, name):
                raise UnsupportedMegatronError(f"{target}: {owner!r} has no attribute {name!r}.")
            owner = getattr(owner, name)
        return owner, names[-1]
    raise UnsupportedMegatronError(f"{target}: no module of that name can be imported.")


def place(target: str) -> tuple[Any, str]:
    """Find where the replacement of a dotted name goes.

    Returns:
        The slot and "run" if the sources open one; else the attribute's owner and name.

    Raises:
        UnsupportedMegatronError: no such module or class.
    """
    owner, name = resolve(target)
    slot = getattr(getattr(owner, name, None), _SLOT, None)
    return (slot, "run") if isinstance(slot, SimpleNamespace) else (owner, name)


def is_open(target: str) -> bool:
    """Whether the sources open a slot at a dotted name.

    Raises:
        UnsupportedMegatronError: no such module or class.
    """
    return isinstance(place(target)[0], SimpleNamespace)


def plain_signature(function: Callable[..., Any]) -> str:
    """Parameter names, kinds and whether they have a default: what a caller depends on."""
    parts: list[str] = []
    starred = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
            parts.append(f"*{parameter.name}")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        prefix = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else "="
        parts.append(f"{prefix}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def mismatch(row: Replacement) -> str | None:
    """Why this row cannot be installed here, or None."""
    try:
        owner, name = place(row.target)
    except UnsupportedMegatronError as error:
        return None if row.optional else str(error)
    original: Any = getattr(owner, name, _MISSING)
    if original is _MISSING:
        return None if row.optional else f"{row.target}: does not exist."
    if row.signature is None:
        return None
    found = plain_signature(original)
    if found == row.signature:
        return None
    return f"{row.target}: expected {row.signature}, found {found}."


class Installed:
    """Rows that are in place. Installing is all or nothing; `uninstall` puts everything back."""

    def __init__(self, rows: Iterable[Replacement]) -> None:
        """Check every row, then put all of them in place.

        Raises:
            UnsupportedMegatronError: a row does not fit; nothing has been replaced then.
        """
        self.rows: Sequence[Replacement] = tuple(rows)
        self._undo: list[tuple[Any, str, Any]] = []
        _refuse_twice(self.rows)
        faults = [fault for row in self.rows if (fault := mismatch(row)) is not None]
        if faults:
            raise UnsupportedMegatronError("\n".join(faults))
        try:
            for row in self.rows:
                self._put(row)
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Put every original back, last first. A second call does nothing."""
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _put(self, row: Replacement) -> None:
        try:
            owner, name = place(row.target)
        except UnsupportedMegatronError:
            return
        if not hasattr(owner, name):
            return
        original = _own_value(owner, name)
        setattr(owner, name, row.make(getattr(owner, name)))
        self._undo.append((owner, name, original))


def _own_value(owner: Any, name: str) -> Any:
    """What stands in the owner itself (a staticmethod object, say), not what access gives."""
    if isinstance(owner, ModuleType):
        return getattr(owner, name)
    return vars(owner).get(name, _MISSING)


def _refuse_twice(rows: Sequence[Replacement]) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.target in seen:
            raise UnsupportedMegatronError(f"{row.target} is replaced by two rows.")
        seen.add(row.target)
