"""Which devices torch sees."""

import torch


def device_names() -> list[str]:
    """Names of the GPUs; empty where training would run in CPU mode."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
