"""`malleus report`: what a job's log folder tells, as one HTML file that needs no network."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from malleus_megatron.cli.outputs import check_ending, write_output

if TYPE_CHECKING:
    from malleus_megatron.pages.log_folder import Log
    from malleus_megatron.pages.story import Story


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("folder", type=Path, metavar="LOGDIR", help="a job's --malleus-log-dir")
    parser.add_argument(
        "--out", type=Path, metavar="REPORT.html", help="default: report.html in LOGDIR"
    )
    parser.add_argument(
        "--run", type=int, metavar="N", help="of several runs in the folder, from 1 (default: last)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the page's numbers as one JSON document"
    )


def main(arguments: argparse.Namespace) -> int:
    """Read, write the page, say what it says.

    Raises:
        BadInputError: no such folder, no events in it, no such run, or a page that cannot be
            written (exit status 2).
    """
    from malleus_megatron.events import json_line
    from malleus_megatron.pages.log_folder import plans_of, read_log
    from malleus_megatron.pages.story import story_to_json, tell

    check_ending("--out", arguments.out, (".html", ".htm"))
    folder = arguments.folder
    log = read_log(folder)
    run = _run(arguments.run, log)
    history = log.runs[run - 1]
    story = tell(history, plans_of(folder, history))
    if arguments.json:
        document = {"run": run, "runs": _runs(log), "notes": log.notes} | story_to_json(story)
        sys.stdout.write(json_line(document))
        if arguments.out is None:
            return 0
    out = arguments.out or folder / "report.html"
    write_output("--out", out, _page(folder, log, run, story))
    if not arguments.json:
        sys.stdout.write(f"{story.headline}\nWritten: {out}\n")
    return 0


def write_report(folder: Path, out: Path) -> None:
    """The page of a log folder's last run.

    Raises:
        BadInputError: no events in the folder, or a page that cannot be written.
    """
    from malleus_megatron.pages.log_folder import plans_of, read_log
    from malleus_megatron.pages.story import tell

    log = read_log(folder)
    history = log.runs[-1]
    write_output(
        "--out", out, _page(folder, log, len(log.runs), tell(history, plans_of(folder, history)))
    )


def _page(folder: Path, log: "Log", run: int, story: "Story") -> str:
    from malleus_megatron.pages.page import Frame, make_page

    name = folder.resolve().name
    frame = Frame(
        title=f"Malleus report: {name}",
        source=f"Malleus report of {name}"
        + (f", run {run} of {len(log.runs)}" if len(log.runs) > 1 else ""),
        notes=[f"events.jsonl, {note}" for note in log.notes],
        runs=[str(line["summary"]) for line in _runs(log)] if len(log.runs) > 1 else (),
    )
    return make_page(story, frame)


def _run(asked: int | None, log: "Log") -> int:
    """The number of the run to show, from 1.

    Raises:
        BadInputError: there is no such run.
    """
    from malleus_megatron.errors import BadInputError

    count = len(log.runs)
    if asked is not None and not 1 <= asked <= count:
        raise BadInputError(f"--run {asked}: the folder holds {count} run{'s' * (count != 1)}.")
    return count if asked is None else asked


def _runs(log: "Log") -> list[dict[str, object]]:
    """What each run came to, in short."""
    lines: list[dict[str, object]] = []
    for number, run in enumerate(log.runs, start=1):
        first = run.steps[0].iteration if run.steps else None
        changes = len(run.of_kind("plan"))
        span = "no iteration" if first is None else f"iterations {first} to {run.last_iteration}"
        lines.append(
            {
                "run": number,
                "first_iteration": first,
                "last_iteration": run.last_iteration,
                "num_plans": changes,
                "summary": f"run {number}: {span}, {changes} plans",
            }
        )
    return lines
