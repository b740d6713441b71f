"""The Prometheus text format, version 0.0.4: what to write and how to write it safely."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

type Sample = tuple[dict[str, object], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric: its name, what it means, and a value for each set of labels."""

    name: str
    kind: str
    """gauge or counter."""
    text: str
    samples: Sequence[Sample]


def gauge(name: str, text: str, value: float | None) -> Family:
    """One number that goes up and down; None: not known now."""
    samples: list[Sample] = [] if value is None else [({}, value)]
    return Family(name=name, kind="gauge", text=text, samples=samples)


def counter(name: str, text: str, value: float) -> Family:
    """One number that only grows."""
    return Family(name=name, kind="counter", text=text, samples=[({}, value)])


def expose(families: Sequence[Family]) -> str:
    """All families that have a value, each with its help and its type."""
    return "".join(line + "\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {family.name} {text}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
        pairs = ",".join(f'{name}="{_label(content)}"' for name, content in labels.items())
        yield (
            f"{family.name}{{{pairs}}} {_number(value)}"
            if pairs
            else (f"{family.name} {_number(value)}")
        )


def _label(content: object) -> str:
    return str(content).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
