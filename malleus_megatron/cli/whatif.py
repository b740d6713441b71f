"""`malleus whatif`: how much faster a traced job could be, and what holds it up."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malleus_megatron.cli.outputs import check_ending

if TYPE_CHECKING:
    from malleus_megatron.cli.own_trace import OwnTrace
    from malleus_megatron.whatif.rows import Rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE.parquet",
        help="a file, or the folder trace of a job's --malleus-log-dir",
    )
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
    from malleus_megatron.cli.own_trace import read_own
    from malleus_megatron.errors import BadInputError
    from malleus_megatron.whatif.trace_file import read_trace
    from malleus_megatron.whatif.trace_folder import other_generations, trace_files
    from malleus_megatron.whatif.uneven import is_uneven

    check_ending("--plot", arguments.plot, (".svg",))
    files = trace_files(arguments.trace)
    others = other_generations(arguments.trace, files)
    if others:
        sys.stderr.write(
            f"{files[0].parent.name} is looked at, {len(files)} steps; there are also "
            f"{', '.join(others)}: name the folder of one.\n"
        )
    rows = read_trace(arguments.trace)
    own = read_own(files)
    try:
        if own is None or not is_uneven(own.plan):
            document, text = _even(arguments, rows, own)
        else:
            document, text = _uneven(arguments, rows, own)
    except BadInputError as error:
        raise BadInputError(f"{arguments.trace}: {error}") from error
    if arguments.json:
        sys.stdout.write(json.dumps(document, sort_keys=True, allow_nan=False) + "\n")
    else:
        sys.stdout.write(text)
    return 0


def _even(
    arguments: argparse.Namespace, rows: "Rows", own: "OwnTrace | None"
) -> tuple[dict[str, Any], str]:
    """The published method, for pipelines that are alike."""
    from malleus_megatron.cli.own_trace import outlook_of, outlook_to_json, outlook_to_text
    from malleus_megatron.whatif.analysis import analyse
    from malleus_megatron.whatif.document import to_json
    from malleus_megatron.whatif.heatmap import to_svg
    from malleus_megatron.whatif.report import to_text
    from malleus_megatron.whatif.timeline import steps_shown, to_perfetto

    analysis = analyse(rows)
    if arguments.plot is not None:
        _write("--plot", arguments.plot, [to_svg(analysis)], arguments.trace)
    if arguments.perfetto is not None:
        shown, steps = steps_shown(analysis.what_if), len(analysis.what_if.trace.steps)
        _write("--perfetto", arguments.perfetto, to_perfetto(analysis.what_if), arguments.trace)
        if shown < steps:
            sys.stderr.write(f"--perfetto: the first {shown} of {steps} steps are written.\n")
    document, text = to_json(analysis), to_text(analysis)
    found, measured_s = outlook_of(own, analysis), document["measured_step_time_s"]
    assert found is not None, "workers are known"
    document["replan"] = outlook_to_json(found, measured_s)
    return document, text + outlook_to_text(found, measured_s)


def _uneven(
    arguments: argparse.Namespace, rows: "Rows", own: "OwnTrace"
) -> tuple[dict[str, Any], str]:
    """Pipeline by pipeline, for a plan of ours whose pipelines are not alike."""
    from malleus_megatron.cli.own_trace import outlook_of, outlook_to_json, outlook_to_text
    from malleus_megatron.errors import BadInputError
    from malleus_megatron.whatif.uneven import analyse_uneven
    from malleus_megatron.whatif.uneven_report import uneven_to_json, uneven_to_text

    for flag in ("plot", "perfetto"):
        if getattr(arguments, flag) is not None:
            raise BadInputError(f"--{flag} draws pipelines that are alike; this plan is uneven.")
    analysis = analyse_uneven(rows, own.plan, own.worker_rates())
    document, text = uneven_to_json(analysis), uneven_to_text(analysis)
    found = outlook_of(own, None)
    document["replan"] = None
    if found is not None:
        document["replan"] = outlook_to_json(found, analysis.measured_step_time_s)
        text += outlook_to_text(found, analysis.measured_step_time_s)
    return document, text


def _write(flag: str, path: Path, pieces: Iterable[str], trace: Path) -> None:
    from malleus_megatron.errors import BadInputError

    if path.exists() and path.samefile(trace):
        raise BadInputError(f"{flag} {path} is the trace itself, which would be lost.")
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise BadInputError(f"{flag} {path}: {error.strerror or error}.") from error
