"""`malleus whatif`: how much faster a traced job could be, and what holds it up."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("trace", type=Path, metavar="TRACE.parquet")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", type=Path, metavar="PICTURE.svg", help="write heat maps here")
    parser.add_argument(
        "--perfetto", type=Path, metavar="OUT.json", help="write time lines for ui.perfetto.dev"
    )


def main(arguments: argparse.Namespace) -> int:
    """Analyse, write, print.

    Raises:
        BadInputError: no trace, a damaged one, or a file that cannot be written (exit status 2).
    """
    from malleus_megatron.errors import BadInputError
    from malleus_megatron.whatif.analysis import analyse
    from malleus_megatron.whatif.document import to_json
    from malleus_megatron.whatif.heatmap import to_svg
    from malleus_megatron.whatif.report import to_text
    from malleus_megatron.whatif.timeline import steps_shown, to_perfetto
    from malleus_megatron.whatif.trace_file import read_trace

    if arguments.plot is not None and arguments.plot.suffix.lower() != ".svg":
        raise BadInputError(f"--plot {arguments.plot}: the picture is SVG; name it so.")
    rows = read_trace(arguments.trace)
    try:
        analysis = analyse(rows)
    except BadInputError as error:
        raise BadInputError(f"{arguments.trace}: {error}") from error
    if arguments.plot is not None:
        _write("--plot", arguments.plot, [to_svg(analysis)])
    if arguments.perfetto is not None:
        shown, steps = steps_shown(analysis.what_if), len(analysis.what_if.trace.steps)
        _write("--perfetto", arguments.perfetto, to_perfetto(analysis.what_if))
        if shown < steps:
            sys.stderr.write(f"--perfetto: the first {shown} of {steps} steps are written.\n")
    if arguments.json:
        document = to_json(analysis)
        sys.stdout.write(json.dumps(document, sort_keys=True, allow_nan=False) + "\n")
    else:
        sys.stdout.write(to_text(analysis))
    return 0


def _write(flag: str, path: Path, pieces: Iterable[str]) -> None:
    from malleus_megatron.errors import BadInputError

    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise BadInputError(f"{flag} {path}: {error.strerror or error}.") from error
