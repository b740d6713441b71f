"""A job in which all that GPU 0 sends to another stage comes $SLOW_LINK_S seconds late."""

import functools
import os
import time
from typing import Any

import torch.distributed as dist

from malleus_megatron import pretrain_gpt


def main() -> None:
    original = dist.isend

    @functools.wraps(original)
    def isend(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(float(os.environ["SLOW_LINK_S"]))
        return original(*args, **kwargs)

    # A batch of transfers takes torch's own function alone, which it looks up where it stands.
    dist.isend = dist.distributed_c10d.isend = isend
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
