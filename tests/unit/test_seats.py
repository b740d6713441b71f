"""Seats, and the rows that pass between stages of any TP degrees."""

import itertools
from collections import Counter

import pytest
from hypothesis import given

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.seats import (
    Flow,
    Seat,
    backward_pieces,
    forward_pieces,
    seat_of,
    seats,
)
from tests.harness.plans import plans

SEQ_LENGTH = 24
PAIRS = list(itertools.product((1, 2, 4, 8), repeat=2))


def two_stages(first: int, second: int, *, turned: bool) -> Plan:
    gpus = list(range(first + second))
    if turned:
        gpus.reverse()
    stages = (
        Stage(gpus=tuple(gpus[:first]), layers=(0, 1)),
        Stage(gpus=tuple(gpus[first:]), layers=(1, 2)),
    )
    return Plan(
        num_layers=2,
        num_microbatches=1,
        pipelines=(Pipeline(num_microbatches=1, stages=stages),),
    )


@given(plans())
def test_every_gpu_has_the_seat_that_the_plan_gives_it(plan: Plan) -> None:
    found = seats(plan)
    assert set(found) == {gpu for pipeline in plan.pipelines for gpu in pipeline.gpus}
    for gpu, seat in found.items():
        assert seat.pipeline is not None
        stages = plan.pipelines[seat.pipeline].stages
        stage = stages[seat.stage]
        assert seat_of(plan, gpu) == seat
        assert seat.gpu == gpu == stage.gpus[seat.tp_rank]
        assert (seat.tp_gpus, seat.layers, seat.tp_degree) == (
            stage.gpus,
            stage.layers,
            len(stage.gpus),
        )
        assert seat.num_stages == len(stages)
        assert seat.previous_gpus == (() if seat.is_first else stages[seat.stage - 1].gpus)
        assert seat.next_gpus == (() if seat.is_last else stages[seat.stage + 1].gpus)
    assert all(seat_of(plan, gpu) is None for gpu in plan.standby)


def rows_held(seat: Seat, sequence_parallel: bool) -> range:
    if not sequence_parallel:
        return range(SEQ_LENGTH)
    rows = SEQ_LENGTH // seat.tp_degree
    return range(seat.tp_rank * rows, (seat.tp_rank + 1) * rows)


@pytest.mark.parametrize("direction", [forward_pieces, backward_pieces])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_receiver_gets_its_rows_once_and_both_ends_agree(
    direction, turned: bool, sequence_parallel: bool, first: int, second: int
) -> None:
    found = seats(two_stages(first, second, turned=turned))
    flows: dict[int, Flow] = {
        gpu: direction(seat, SEQ_LENGTH, sequence_parallel=sequence_parallel)
        for gpu, seat in found.items()
    }
    for gpu, flow in flows.items():
        seat = found[gpu]
        rows = rows_held(seat, sequence_parallel)
        receives = seat.is_last if direction is forward_pieces else seat.is_first
        got = Counter(row for piece in flow.receives for row in range(piece.start, piece.end))
        assert got == (Counter(range(len(rows))) if receives else Counter())
        assert not (flow.sends if receives else flow.receives)
        for peer, seat_of_peer in found.items():
            sent = [rows[p.start : p.end] for p in flow.sends if p.peer == peer]
            theirs = rows_held(seat_of_peer, sequence_parallel)
            taken = [theirs[p.start : p.end] for p in flows[peer].receives if p.peer == gpu]
            assert sent == taken


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_without_sequence_parallelism_one_copy_flows_to_each_receiver(
    first: int, second: int
) -> None:
    found = seats(two_stages(first, second, turned=False))
    for seat in found.values():
        forward = forward_pieces(seat, SEQ_LENGTH, sequence_parallel=False)
        backward = backward_pieces(seat, SEQ_LENGTH, sequence_parallel=False)
        if seat.is_last:
            assert [p.peer for p in forward.receives] == [seat.previous_gpus[seat.tp_rank % first]]
        else:
            assert [p.peer for p in backward.receives] == [seat.next_gpus[seat.tp_rank % second]]


def test_a_sequence_that_cannot_be_shared_is_refused() -> None:
    seat = seats(two_stages(2, 4, turned=False))[0]
    with pytest.raises(BadInputError, match="10 rows cannot be shared equally .* TP degree 4"):
        forward_pieces(seat, 10, sequence_parallel=True)
    assert forward_pieces(seat, 10, sequence_parallel=False).sends
