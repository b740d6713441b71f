"""Turn the text files of a folder into a dataset that Megatron trains on.

python scripts/prepare_data.py FOLDER OUT --pattern '*.py' writes OUT.bin and OUT.idx, one document
a file and one token a byte, and prints the flags that train on them.
"""

import argparse
import json
import shlex
import sys
import warnings
from pathlib import Path

from malleus_megatron.adapter.text_data import check_split, prepare_text_data
from malleus_megatron.errors import MalleusError


def main() -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args()
    # Megatron says at import, line after line, which optional packages are missing.
    warnings.filterwarnings("ignore", module="megatron")
    try:
        if options.split is not None:
            check_split(options.split)
        summary = prepare_text_data(
            options.folder,
            options.out,
            patterns=options.pattern or ("*",),
            limit_bytes=options.limit_bytes,
            overwrite=options.overwrite,
            progress=sys.stderr.isatty(),
        )
        flags = summary.megatron_flags(options.split)
    except MalleusError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(summary.to_json() | {"megatron_flags": flags}, indent=2))
    else:
        print(summary)
        print(shlex.join(flags))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="searched at any depth")
    parser.add_argument("out", type=Path, metavar="OUT", help="path without .bin and .idx")
    parser.add_argument(
        "--pattern", action="extend", nargs="+", default=[], help="take these files only"
    )
    parser.add_argument(
        "--split", help="shares of training, validation and test, checked; default 90,5,5"
    )
    parser.add_argument(
        "--limit-bytes", type=int, metavar="N", help="stop before the text is larger than this"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace OUT and Megatron's cache in OUT/cache (not one under --data-cache-path)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


if __name__ == "__main__":
    sys.exit(main())
