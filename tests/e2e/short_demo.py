"""`malleus` as ever, but its demo ends with the first re-plan: that takes a minute, not five."""

import sys
from dataclasses import replace

from malleus_megatron.cli import demo
from malleus_megatron.cli.main import main

demo.SCRIPT = replace(demo.SCRIPT, changes=demo.SCRIPT.changes[:1], num_iterations=16)

if __name__ == "__main__":
    sys.exit(main())
