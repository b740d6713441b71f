"""A job with a stand-in for the package wandb: what is logged goes to the file WANDB_LINES."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from malleus_megatron import pretrain_gpt


def log(figures: dict[str, Any], step: int) -> None:
    ours = {name: float(value) for name, value in figures.items() if name.startswith("malleus/")}
    if ours:
        with Path(os.environ["WANDB_LINES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **ours}) + "\n")


def main() -> None:
    wandb: Any = ModuleType("wandb")
    wandb.init = wandb.finish = lambda **_: None
    wandb.run = SimpleNamespace()
    wandb.config = {}
    wandb.log = log
    sys.modules["wandb"] = wandb
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
