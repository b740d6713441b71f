"""Tensors move between plans bit for bit, in rounds of bounded size."""

import random
import zlib

import pytest
import torch
import torch.distributed as dist

from malleus_megatron.migration.holdings import Holding
from malleus_megatron.migration.rounds import cut_into_rounds
from malleus_megatron.migration.transfers import plan_transfers
from malleus_megatron.runtime import transport
from malleus_megatron.runtime.transport import BUFFERS_A_ROUND, carry_out, copy_own
from tests.harness.decoder import STATES, Decoder, random_plan
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

MODEL = Decoder(num_layers=6, states=tuple(STATES))
MAX_BYTES = 300
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def truth(holding: Holding) -> torch.Tensor:
    """The bits that this box has, whoever holds it."""
    generator = torch.Generator().manual_seed(zlib.crc32(holding.key.encode()))
    whole = torch.randn(holding.global_shape, generator=generator)
    box = holding.box
    cut = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
    local = whole[cut].to(DTYPES[holding.element_bytes]).contiguous()
    return local.view([size for size in box.shape if size > 1] or [1])


def move_through_plans(seed: int, num_plans: int, direct_bytes: int) -> list[str]:
    """Go from plan to plan; what is wrong after each step on this rank."""
    transport.DIRECT_BYTES = direct_bytes
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(seed)
    plans = [random_plan(rng, num_gpus=world, num_layers=6) for _ in range(num_plans)]
    node_of = {gpu: gpu // 2 for gpu in range(world)}
    held = MODEL.holdings(plans[0])
    old = {holding.name: truth(holding) for holding in held.get(rank, [])}
    wrong: list[str] = []
    for plan in plans[1:]:
        needed = MODEL.holdings(plan)
        mine = needed.get(rank, [])
        new = {h.name: torch.full_like(truth(h), float("nan")) for h in mine}
        moves = plan_transfers(held, needed, node_of)
        copy_own([copy for copy in moves.copies if copy.source_gpu == rank], old, new)
        carried = carry_out(cut_into_rounds(moves.transfers, MAX_BYTES), rank, old=old, new=new)
        wrong += [h.name for h in mine if not torch.equal(new[h.name], truth(h))]
        if carried.received_bytes != moves.received_bytes().get(rank, 0):
            wrong.append(f"received {carried.received_bytes} bytes")
        messages_and_gaps = BUFFERS_A_ROUND * (MAX_BYTES + 64 * world)
        if carried.peak_buffer_bytes > messages_and_gaps:
            wrong.append(f"{carried.peak_buffer_bytes} bytes in buffers")
        held, old = needed, new
    return wrong


@pytest.mark.parametrize(
    ("world", "seed", "direct_bytes"), [(4, 1, 0), (4, 2, 64), (8, 3, MAX_BYTES + 1)]
)
def test_every_tensor_is_whole_after_every_switch(
    world: int, seed: int, direct_bytes: int
) -> None:
    """All boxes as messages of their own; the larger ones; none."""
    assert run_ranks(world, move_through_plans, seed, 12, direct_bytes) == [[]] * world
