"""`--help` of the entry points: Megatron's flags and ours, in one list."""

import argparse
from collections.abc import Callable
from typing import Any

from malleus_megatron.config import add_flags
from malleus_megatron.runtime.patching import Replacement


class LenientFormatter(argparse.HelpFormatter):
    """Prints a help text as it stands where its percent signs are no format (as one of 0.19's)."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


def add_our_flags(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Megatron's `add_megatron_arguments`, then ours."""

    def add_arguments(parser: Any) -> Any:
        parser.formatter_class = LenientFormatter
        return add_flags(original(parser))

    return add_arguments


HELP_ROW = Replacement(
    target="megatron.training.arguments.add_megatron_arguments",
    make=add_our_flags,
    reason="--help lists our flags beside Megatron's; in place only while it prints",
    signature="(parser)",
)


def print_help(usage: str) -> None:
    """Print all flags, ours last."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    add_our_flags(add_megatron_arguments)(parser).print_help()
