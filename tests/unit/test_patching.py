"""Replacing attributes: all or nothing, and everything put back."""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from malleus_megatron.errors import UnsupportedMegatronError
from malleus_megatron.runtime.patching import (
    Installed,
    Replacement,
    is_open,
    mismatch,
    place,
    plain_signature,
    resolve,
)

HOST = "host_of_attributes"


class Base:
    """A class of another package."""

    limit = 3

    def inherited(self, a: int) -> int:
        return a

    @staticmethod
    def static(a: int, b: int = 1) -> int:
        return a + b

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


class Derived(Base):
    """Has nothing of its own."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of another package, as rows name it."""
    module = ModuleType(HOST)
    module.function = lambda a, *, b=2: (a, b)  # type: ignore[attr-defined]
    module.VALUE = 7  # type: ignore[attr-defined]
    module.Derived = Derived  # type: ignore[attr-defined]
    module.Base = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HOST, module)
    yield module


def row(target: str, value: Any = None, **options: Any) -> Replacement:
    return Replacement(
        target=f"{HOST}.{target}", make=lambda _original: value, reason="a test", **options
    )


def wrap(target: str, wrapper: Callable[[Any], Any]) -> Replacement:
    return Replacement(target=f"{HOST}.{target}", make=wrapper, reason="a test")


def test_what_was_there_comes_back(host: ModuleType) -> None:
    before = dict(vars(host))
    rows = [row("VALUE", 8), row("function", len)]
    installed = Installed(rows)
    assert (host.VALUE, host.function) == (8, len)
    assert tuple(installed.rows) == tuple(rows)
    installed.uninstall()
    assert dict(vars(host)) == before
    host.VALUE = 9  # type: ignore[attr-defined]
    installed.uninstall()
    assert host.VALUE == 9, "a second call does nothing"


def test_a_replacement_can_call_the_original(host: ModuleType) -> None:
    Installed([wrap("function", lambda original: lambda *a, **k: ["wrapped", original(*a, **k)])])
    assert host.function(1) == ["wrapped", (1, 2)]


def test_an_inherited_attribute_is_shadowed_and_uncovered_again(host: ModuleType) -> None:
    installed = Installed([row("Derived.inherited", lambda self, a: -a)])
    assert Derived().inherited(3) == -3
    assert Base().inherited(3) == 3
    installed.uninstall()
    assert "inherited" not in vars(Derived)
    assert Derived().inherited(3) == 3


@pytest.mark.parametrize("name", ["static", "of_class", "limit"])
def test_class_attributes_come_back_as_they_stood(host: ModuleType, name: str) -> None:
    before = vars(Base)[name]
    installed = Installed([row(f"Base.{name}", 0)])
    assert getattr(Base, name) == 0
    installed.uninstall()
    assert vars(Base)[name] is before


def test_wrappers_are_taken_off_last_first(host: ModuleType) -> None:
    first = Installed([wrap("VALUE", lambda value: value + 1)])
    second = Installed([wrap("VALUE", lambda value: value * 10)])
    assert host.VALUE == 80
    second.uninstall()
    assert host.VALUE == 8
    first.uninstall()
    assert host.VALUE == 7


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row("missing"), f"{HOST}.missing: does not exist"),
        (row("Nowhere.method"), "has no attribute 'Nowhere'"),
        (
            row("function", signature="(a)"),
            rf"{HOST}.function: expected \(a\), found \(a, \*, b=\)",
        ),
        (Replacement(target="no_such_package.x", make=len, reason=""), "no module of that name"),
    ],
)
def test_one_row_that_does_not_fit_keeps_all_out(
    host: ModuleType, bad: Replacement, said: str
) -> None:
    with pytest.raises(UnsupportedMegatronError, match=said):
        Installed([row("VALUE", 8), bad])
    assert host.VALUE == 7


def test_every_fault_is_named_at_once(host: ModuleType) -> None:
    with pytest.raises(UnsupportedMegatronError, match=r"\.a: .*\n.*\.b: "):
        Installed([row("a"), row("b")])


def test_a_replacement_that_cannot_be_made_keeps_all_out(host: ModuleType) -> None:
    def refuse(_original: Any) -> Any:
        raise ValueError("cannot be made")

    with pytest.raises(ValueError, match="cannot be made"):
        Installed([row("VALUE", 8), wrap("function", refuse)])
    assert host.VALUE == 7


def test_two_rows_for_one_target_are_refused(host: ModuleType) -> None:
    with pytest.raises(UnsupportedMegatronError, match="VALUE is replaced by two rows"):
        Installed([row("VALUE", 8), row("VALUE", 9)])
    assert host.VALUE == 7


@pytest.mark.parametrize("target", ["missing", "Nowhere.method", "deeper.module.name"])
def test_an_optional_row_is_left_out_where_its_target_is_missing(
    host: ModuleType, target: str
) -> None:
    installed = Installed([row(target, 1, optional=True), row("VALUE", 8)])
    assert host.VALUE == 8
    assert not hasattr(host, "missing")
    installed.uninstall()
    assert host.VALUE == 7


def test_an_optional_row_with_another_signature_is_still_refused(host: ModuleType) -> None:
    assert mismatch(row("function", signature="(a)", optional=True)) is not None
    assert mismatch(row("function", signature="(a, *, b=)", optional=True)) is None


def test_names_lead_to_modules_and_classes() -> None:
    assert resolve("os.path.join") == (sys.modules["os"].path, "join")
    assert resolve("email.message.Message.get") == (
        sys.modules["email.message"].Message,
        "get",
    )


def test_a_module_that_fails_to_import_is_not_called_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_host.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        resolve("broken_host.name")


def _everything(a, /, b, c=1, *rest, d, e=2, **more):
    """All kinds of parameters."""


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (_everything, "(a, b, c=, *rest, d, e=, **more)"),
        (lambda: None, "()"),
        (lambda *, only: None, "(*, only)"),
        (Base.inherited, "(self, a)"),
    ],
)
def test_a_signature_is_what_a_caller_depends_on(
    function: Callable[..., Any], signature: str
) -> None:
    assert plain_signature(function) == signature


def open_slot(host: ModuleType) -> SimpleNamespace:
    """Make the host's function ask its slot, as a patched source does; gives the slot."""
    slot = SimpleNamespace(run=host.function)

    @functools.wraps(host.function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return slot.run(*args, **kwargs)

    run.malleus_slot = slot  # type: ignore[attr-defined]
    host.function = run  # type: ignore[attr-defined]
    return slot


def test_a_slot_is_filled_and_the_attribute_stays(host: ModuleType) -> None:
    stock = host.function
    slot = open_slot(host)
    attribute = host.function
    first = Installed([wrap("function", lambda inner: lambda *a, **k: ["first", *inner(*a, **k)])])
    second = Installed([wrap("function", lambda inner: lambda *a, **k: ["2nd", *inner(*a, **k)])])
    assert host.function is attribute
    assert host.function(1) == ["2nd", "first", 1, 2]
    second.uninstall()
    assert host.function(1) == ["first", 1, 2]
    first.uninstall()
    assert slot.run is stock
    assert host.function is attribute


def test_a_slot_is_found_behind_a_wrapper_of_somebody_else(host: ModuleType) -> None:
    slot = open_slot(host)
    theirs = functools.wraps(host.function)(lambda *a, _inner=host.function: _inner(*a))
    host.function = theirs  # type: ignore[attr-defined]
    Installed([wrap("function", lambda inner: lambda *a, **k: ["ours", *inner(*a, **k)])])
    assert host.function(1) == ["ours", 1, 2]
    assert place(f"{HOST}.function") == (slot, "run")


def test_a_slot_is_open_where_the_source_says_so(host: ModuleType) -> None:
    assert not is_open(f"{HOST}.function")
    assert not is_open(f"{HOST}.VALUE")
    assert not is_open(f"{HOST}.absent")
    open_slot(host)
    assert is_open(f"{HOST}.function")


def test_the_signature_behind_a_slot_is_checked(host: ModuleType) -> None:
    open_slot(host)
    fits = Replacement(target=f"{HOST}.function", make=len, reason="", signature="(a, *, b=)")
    assert mismatch(fits) is None
    other = Replacement(target=f"{HOST}.function", make=len, reason="", signature="(a, b)")
    assert "found (a, *, b=)" in str(mismatch(other))
