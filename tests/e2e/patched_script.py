"""A user's job that looks at the seams after training: whose function stands where, and what ran.

It leaves in $SEAMS of each seam of the table: the file that the attribute's code is from, whether
the source's slot holds another function than Megatron's own, and how many times it was called.
"""

import json
import os
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import user_script

from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.seams import seam_rows
from malleus_megatron.config import MalleusConfig
from malleus_megatron.runtime.patching import place, resolve


def main() -> None:
    targets = [row.target for row in seam_rows(Plugin(MalleusConfig()))]
    calls = dict.fromkeys(targets, 0)
    for target in targets:
        count_calls(target, calls)
    user_script.main()
    if os.environ["RANK"] == "0":
        seen = {target: [*stands_at(target), calls[target]] for target in targets}
        Path(os.environ["SEAMS"]).write_text(json.dumps(seen), encoding="utf-8")


def count_calls(target: str, calls: dict[str, int]) -> None:
    """Count inside the slot, around whatever the plugin has put there."""
    slot, _ = place(target)
    assert isinstance(slot, SimpleNamespace), target
    inner = slot.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[target] += 1
        return inner(*args, **kwargs)

    counted.fills = inner  # type: ignore[attr-defined]
    slot.run = counted


def stands_at(target: str) -> tuple[str, str]:
    """The files of the attribute's code and of the function in its slot."""
    owner, name = resolve(target)
    attribute = vars(owner)[name]
    return file_of(attribute), file_of(attribute.malleus_slot.run.fills)


def file_of(function: FunctionType) -> str:
    return Path(function.__code__.co_filename).name


if __name__ == "__main__":
    main()
