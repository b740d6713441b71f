"""HTML and SVG as text that cannot be broken out of: what is not markup is escaped."""

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "link", "input", "br"})


class Markup(str):
    """Text that is markup already and goes into the page as it is."""

    __slots__ = ()


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """One element. Plain text in it is escaped; attributes that are None are left out.

    Args:
        name: Of the element.
        content: Markup or text; None is left out.
        attributes: `class_` is class, `text_anchor` is text-anchor. True: without a value.
    """
    words = "".join(
        f" {_name(key)}" + ("" if value is True else f'="{escape(_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{words}>")
    return Markup(f"<{name}{words}>{join(content)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Markup and text one after the other; text is escaped."""
    return Markup(
        between.join(
            part if isinstance(part, Markup) else escape(_text(part))
            for part in parts
            if part is not None
        )
    )


def document(width: int, height: int, parts: Iterable[Markup], **attributes: object) -> str:
    """A whole SVG file of fixed size, one element a line."""
    svg = tag(
        "svg",
        Markup("\n"),
        join(parts, "\n"),
        Markup("\n"),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        **attributes,
    )
    return svg + "\n"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _text(value: object) -> str:
    """Coordinates to a hundredth: more is not seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
