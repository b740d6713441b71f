"""The hash of a tensor is the same on a real GPU as on the CPU. `make gpu-check`."""

import pytest
import torch

from malleus_megatron.runtime.fingerprint import CHUNK_WORDS, fingerprints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_EXTRA_BYTES = 64 * 2**20


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_both_devices_give_the_same_hash(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = (100 * torch.rand(7, 1000, 999, generator=generator)).to(dtype)
    views = [whole, whole[1:2, 5:900, 3:], whole[0, 0, 0], whole.view(-1)[: CHUNK_WORDS + 1]]
    on_gpu = whole.cuda()
    same = [on_gpu, on_gpu[1:2, 5:900, 3:], on_gpu[0, 0, 0], on_gpu.view(-1)[: CHUNK_WORDS + 1]]
    assert fingerprints(same) == fingerprints(views)


def test_a_large_tensor_needs_little_room() -> None:
    tensor = torch.zeros(2**15, 2**14 + 2, device="cuda", dtype=torch.bfloat16)[:, 1:-1]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fingerprints([tensor])
    assert torch.cuda.max_memory_allocated() - before < MAX_EXTRA_BYTES
