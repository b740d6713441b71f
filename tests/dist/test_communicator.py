"""Activations and gradients arrive as they were sent, whatever the TP degrees of two stages."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS, BATCH, HIDDEN = 8, 2, 3


def two_stages(first: tuple[int, ...], second: tuple[int, ...]) -> Plan:
    stages = (Stage(gpus=first, layers=(0, 1)), Stage(gpus=second, layers=(1, 2)))
    return Plan(
        num_layers=2,
        num_microbatches=3,
        pipelines=(Pipeline(num_microbatches=3, stages=stages),),
    )


def whole(micro_batch: int, sign: int) -> torch.Tensor:
    """Every element says which micro-batch, row, sample and channel it is."""
    numbers = torch.arange(ROWS * BATCH * HIDDEN, dtype=torch.float32)
    return sign * (1000.0 * (micro_batch + 1) + numbers).view(ROWS, BATCH, HIDDEN)


def run_1f1b(
    first: tuple[int, ...], second: tuple[int, ...], sequence_parallel: bool
) -> list[str]:
    """Three micro-batches in 1F1B order; what arrived wrong on this rank."""
    from malleus_megatron.adapter.communicator import StageCommunicator
    from malleus_megatron.plan.seats import seat_of

    seat = seat_of(two_stages(first, second), dist.get_rank())
    if seat is None:
        return []
    shared = sequence_parallel and seat.tp_degree > 1
    share = ROWS // seat.tp_degree if shared else ROWS
    mine = slice(seat.tp_rank * share, (seat.tp_rank + 1) * share) if shared else slice(None)
    ours = StageCommunicator(
        seat,
        config=SimpleNamespace(pipeline_dtype=torch.float32),
        device=torch.device("cpu"),
        seq_length=ROWS,
        sequence_parallel=sequence_parallel,
    )
    shapes = [(share, BATCH, HIDDEN)]
    wrong: list[str] = []

    def check(what: str, tensors: list[torch.Tensor | None], expected: torch.Tensor) -> None:
        if tensors[0] is None or not torch.equal(tensors[0].detach(), expected[mine]):
            wrong.append(f"{what}: {tensors}")

    if seat.is_first:
        ours.send_forward([whole(0, 1)[mine]], False)
        for k in (1, 2):
            got = ours.send_forward_recv_backward([whole(k, 1)[mine]], shapes, False)
            check(f"gradient {k - 1}", got, whole(k - 1, -1))
        check("gradient 2", ours.recv_backward(shapes, False), whole(2, -1))
    else:
        got = ours.recv_forward(shapes, False)
        for k in range(3):
            check(f"input {k}", got, whole(k, 1))
            assert got[0] is not None
            assert got[0].requires_grad
            if k < 2:
                got = ours.send_backward_recv_forward([whole(k, -1)[mine]], shapes, False)
            else:
                ours.send_backward([whole(k, -1)[mine]], False)
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0,), (1,)),
        ((0, 1), (2, 3)),
        ((0,), (1, 2)),
        ((2, 3), (0,)),
        ((0, 1, 2, 3), (4, 5)),
        ((5,), (0, 1, 2, 3)),
        ((1, 0), (3, 2)),
    ],
)
def test_every_row_arrives(
    first: tuple[int, ...], second: tuple[int, ...], sequence_parallel: bool
) -> None:
    world = 1 + max(*first, *second)
    assert run_ranks(world, run_1f1b, first, second, sequence_parallel) == [[]] * world
