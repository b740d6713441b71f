"""A job whose checkpoint writers are slow, or die: $WRITER is "slow", or "dies in iter_0000004".

Slow: what training does next is done before the first byte is written.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from malleus_megatron import pretrain_gpt

write = FileSystemWriterAsync.write_preloaded_data


def written(
    transforms: Any, local_proc_idx: int, write_bucket: Any, *rest: Any, **more: Any
) -> Any:
    asked = os.environ["WRITER"].split()
    if asked[0] == "slow":
        time.sleep(1.5)
    elif asked[-1] in str(write_bucket[0]) and os.environ["RANK"] == "1":
        Path(write_bucket[0]).write_bytes(b"half of")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(transforms, local_proc_idx, write_bucket, *rest, **more)


if __name__ == "__main__":
    FileSystemWriterAsync.write_preloaded_data = staticmethod(written)
    pretrain_gpt.main()
