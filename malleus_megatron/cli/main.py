"""The `malleus` command. A command's module is imported only when it is chosen."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from malleus_megatron import __version__
from malleus_megatron.errors import EXIT_BAD_INPUT, MalleusError

COMMANDS = {
    "plan": "find the plan that makes the step as short as possible, and prove how short it can be",
    "explain": "what bounds the step under a plan, and what each straggler costs",
    "simulate": "play a trace of stragglers: step times under stock, malleus and other policies",
    "whatif": "how much faster a traced job could be, and which GPU or stage holds it up",
    "report": "what a job's log folder tells, as one page: plan, rates, step times, events",
    "doctor": "versions, devices, the seams in Megatron, and what would be refused",
    "demo": "train a small GPT on CPU, slow a GPU down, watch the micro-batches move",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what it prints has been written when this returns.

    Returns:
        0 done, 1 no feasible plan, 2 bad input or use, or output that cannot be written.
    """
    status = 0
    try:
        try:
            status = _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # a file's: standard output has no name
            raise
        # The interpreter flushes once more at its end; that must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # else the reader has seen enough
            reason = error.strerror or error
            sys.stderr.write(f"malleus: standard output cannot be written: {reason}.\n")
            return EXIT_BAD_INPUT
    return status


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in {"-h", "--help"}:
        sys.stdout.write(_overview())
        return 0 if words else EXIT_BAD_INPUT
    if words[0] == "--version":
        sys.stdout.write(f"malleus-megatron {__version__}\n")
        return 0
    name = words[0]
    if name not in COMMANDS:
        sys.stderr.write(f"malleus: no command {name!r}. Commands: {', '.join(COMMANDS)}.\n")
        return EXIT_BAD_INPUT
    module = importlib.import_module(f"malleus_megatron.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"malleus {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    try:
        return int(module.main(parser.parse_args(words[1:])))
    except MalleusError as error:
        sys.stderr.write(f"malleus: {error}\n")
        return error.exit_code


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: malleus COMMAND [--help] ...", "", "commands:"]
    lines += [f"  {name:{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    lines += ["", "Training: torchrun ... -m malleus_megatron.pretrain_gpt <recipe> --malleus"]
    lines += ["          torchrun ... -m malleus_megatron.run SCRIPT <recipe> --malleus", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
