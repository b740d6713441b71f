"""Run any script that calls `megatron.training.pretrain`, unchanged.

    torchrun --nproc-per-node 8 -m malleus_megatron.run their_pretrain.py <their flags> [--malleus]

Without a GPU the script trains on the CPU; see docs/cpu-mode.md.
"""

import runpy
import sys
from pathlib import Path

from malleus_megatron.adapter import start
from malleus_megatron.errors import BadInputError

USAGE = "python -m malleus_megatron.run SCRIPT [flags of the script] [--malleus …]"


def main() -> None:
    """Take the script's name off the command line, prepare, and run it as `__main__`."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        from malleus_megatron.adapter.help_text import print_help

        print_help(USAGE)
        return
    with start.one_message():
        script = _take_script()
        started = start.prepare()
        start.install(started)
    sys.argv[0] = str(script)
    sys.path[0] = str(script.parent)
    with start.one_message(every_rank=True):
        runpy.run_path(str(script), run_name="__main__")


def _take_script() -> Path:
    """Remove the script from sys.argv.

    Raises:
        BadInputError: no script, or one that is not a file.
    """
    if len(sys.argv) < 2:
        raise BadInputError(f"No script. Usage: {USAGE}")
    if sys.argv[1].startswith("-"):
        raise BadInputError(f"The script comes first, before {sys.argv[1]}. Usage: {USAGE}")
    script = Path(sys.argv.pop(1))
    if not script.is_file():
        raise BadInputError(f"{script}: no such script (looked in {Path.cwd()}).")
    return script


if __name__ == "__main__":
    main()
