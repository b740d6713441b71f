"""One clock for all GPUs, and what the GPUs of a TP group did joined to one worker's operations."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.whatif.clocks import clock_offsets
from malleus_megatron.whatif.joining import Joined, Recorded, Recording, joined

TWO_STAGES = Plan(
    num_layers=4,
    num_microbatches=2,
    pipelines=(
        Pipeline(
            num_microbatches=2,
            stages=(Stage(gpus=(0, 1), layers=(0, 3)), Stage(gpus=(2,), layers=(3, 4))),
        ),
    ),
    standby=(3,),
)


def stamps_of(offsets_s: list[float], seed: int, rounds: int) -> list[list[tuple[float, float]]]:
    """Collectives that are left, at random times, after all have entered."""
    rng = random.Random(seed)
    stamps: list[list[tuple[float, float]]] = [[] for _ in offsets_s]
    now_s = 100.0
    for _ in range(rounds):
        entered = [now_s + rng.uniform(0, 1e-3) for _ in offsets_s]
        left = [max(entered) + rng.uniform(0, 1e-3) for _ in offsets_s]
        for own, offset_s, before_s, after_s in zip(stamps, offsets_s, entered, left, strict=True):
            own.append((before_s + offset_s, after_s + offset_s))
        now_s = max(left)
    return stamps


@given(
    others_s=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    rounds=st.integers(1, 6),
)
def test_an_offset_is_within_its_error(others_s: list[float], seed: int, rounds: int) -> None:
    true_s = [0.0, *others_s]
    for found, offset_s in zip(clock_offsets(stamps_of(true_s, seed, rounds)), true_s, strict=True):
        assert abs(found.seconds - offset_s) <= found.error_s + 1e-9
        assert found.error_s <= 2e-3 + 1e-9


def test_more_collectives_bring_clocks_nearer() -> None:
    errors_s = [
        sum(clock_offsets(stamps_of([0.0, 50.0], seed, rounds))[1].error_s for seed in range(20))
        for rounds in (1, 8)
    ]
    assert errors_s[1] < 0.7 * errors_s[0]


def test_processes_that_share_a_clock_have_no_offset() -> None:
    assert [one.seconds for one in clock_offsets(stamps_of([0.0, 0.0, 0.0], 1, 3))] == [0.0] * 3


def test_a_recording_travels_with_all_its_bits() -> None:
    recording = Recording.of_spans(
        [("f", 0.1, 0.2 + 1e-17), ("both", 1 / 3, 2 / 3), ("f", 1e5 + 1e-9, 1e5 + 1)],
        {"f": ("forward-compute",), "both": ("forward-send", "backward-recv")},
    )
    assert Recording.unpack(recording.pack()) == recording
    assert [(one.kind, one.number) for one in recording.operations] == [
        ("forward-compute", 0),
        ("forward-send", 0),
        ("backward-recv", 0),
        ("forward-compute", 1),
    ]


def recordings(*by_gpu: list[tuple[str, int, float, float]]) -> list[Recording]:
    return [Recording(operations=tuple(Recorded(*one) for one in gpu)) for gpu in by_gpu]


def test_a_tp_group_works_from_its_last_members_start_to_its_last_members_end() -> None:
    rows = joined(
        TWO_STAGES,
        recordings([("forward-compute", 0, 1.0, 2.0)], [("forward-compute", 0, 1.3, 1.9)], [], []),
    )
    assert rows == [Joined(0, 0, "forward-compute", 0, 1.3, 2.0)]


def test_a_send_ends_when_what_it_sent_has_been_received() -> None:
    """Stage 0 sends and awaits a gradient at once: that it waited 5 s longer is no transfer."""
    sender = [("forward-send", 0, 1.0, 7.0), ("backward-recv", 0, 1.0, 7.0)]
    receiver = [("forward-recv", 0, 0.5, 2.0), ("backward-send", 0, 6.0, 7.5)]
    rows = {row[:4]: row for row in joined(TWO_STAGES, recordings(sender, [], receiver, []))}
    assert rows[0, 0, "forward-send", 0][4:] == (1.0, 2.0)
    assert rows[0, 1, "backward-send", 0][4:] == (6.0, 7.0)
    assert rows[0, 1, "forward-recv", 0][4:] == (0.5, 2.0)


def test_a_standby_gpu_has_no_operations() -> None:
    assert joined(TWO_STAGES, recordings([], [], [], [("gc", 0, 1.0, 2.0)])) == []


@given(seed=st.integers(0, 999))
def test_no_two_operations_of_a_worker_overlap(seed: int) -> None:
    rng = random.Random(seed)

    def member() -> list[tuple[str, int, float, float]]:
        times = sorted(rng.uniform(0, 10) for _ in range(8))
        spans = zip(times[::2], times[1::2], strict=True)
        return [("forward-compute", number, *span) for number, span in enumerate(spans)]

    rows = joined(TWO_STAGES, recordings(member(), member(), [], []))
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert all(before.end_s <= after.start_s for before, after in pairwise(rows))


def test_another_clock_moves_all_times() -> None:
    [moved] = (one.later_by(-100.0) for one in recordings([("gc", 0, 101.0, 103.0)]))
    assert moved.operations[0][2:] == pytest.approx((1.0, 3.0))
