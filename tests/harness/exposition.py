"""A reader of the Prometheus text format that lets nothing pass that the format does not allow."""

import math
import re

type Labels = tuple[tuple[str, str], ...]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL})(?:,{_LABEL})*)\}})? (\S+)")
_VALUE = re.compile(r"[+-]?Inf|NaN|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_ESCAPED = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


def read_exposition(text: str) -> dict[str, dict[Labels, float]]:
    """Values by metric and labels.

    Raises:
        AssertionError: a line that is none of the format, a sample without its help and type right
            before it, a metric or a set of labels that comes twice.
    """
    assert text.endswith("\n")
    found: dict[str, dict[Labels, float]] = {}
    helped = typed = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert helped not in found, line
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert kind in {"counter", "gauge"}, line
            assert typed == helped, line
            assert (kind == "counter") == typed.endswith("_total"), line
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            name, labels = match[1], match[2] or ""
            assert name == typed, line
            assert _VALUE.fullmatch(match[7]), line
            pairs = tuple(
                (key, re.sub(r'\\[\\n"]', lambda part: _ESCAPED[part[0]], value))
                for key, value in re.findall(_LABEL, labels)
            )
            assert pairs not in found.setdefault(name, {}), line
            found[name][pairs] = math.inf if match[7] == "+Inf" else float(match[7])
    return found
