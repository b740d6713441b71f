"""The played 1F1B schedule against a naive event queue, Megatron's calls spelled out one by one."""

import heapq
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.cost.pipeline import pipeline_time_s
from malleus_megatron.cost.stage import num_inflight
from malleus_megatron.simulator.schedule import Operation, num_warmup, play, stage_operations

stages_s = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)
counts = st.integers(1, 14)
shares = st.floats(0.05, 0.95)
transfers_s = st.sampled_from([0.0, 0.01, 0.5, 3.0])

Message = tuple[str, int, int]
"""Kind, the stage before the boundary that it crosses, micro-batch."""
Call = tuple[str, tuple[Message, ...], float]
"""Name, messages, seconds of computing."""


@dataclass(frozen=True)
class Calls:
    """What a stage can call."""

    stage: int
    last: int

    def comm(self, *messages: Message) -> Call:
        return "comm", tuple(m for m in messages if 0 <= m[1] < self.last), 0.0

    def recv_f(self, i: int) -> Message:
        return "forward", self.stage - 1, i

    def send_f(self, i: int) -> Message:
        return "forward", self.stage, i

    def recv_b(self, i: int) -> Message:
        return "backward", self.stage, i

    def send_b(self, i: int) -> Message:
        return "backward", self.stage - 1, i


def megatron_calls(stage: int, num_stages: int, count: int, f_s: float, b_s: float) -> list[Call]:
    """The body of forward_backward_pipelining_without_interleaving, as a list."""
    to = Calls(stage, num_stages - 1)
    forward: Call = ("compute", (), f_s)
    backward: Call = ("compute", (), b_s)
    warmup = min(num_stages - stage - 1, count)
    remaining = count - warmup
    calls: list[Call] = []
    for i in range(warmup):
        calls += [to.comm(to.recv_f(i)), forward, to.comm(to.send_f(i))]
    if remaining > 0:
        calls.append(to.comm(to.recv_f(warmup)))
    for k in range(remaining):
        calls += [forward, to.comm(to.send_f(k + warmup), to.recv_b(k)), backward]
        if k == remaining - 1:
            calls.append(to.comm(to.send_b(k)))
        else:
            calls.append(to.comm(to.send_b(k), to.recv_f(k + warmup + 1)))
    for i in range(warmup):
        calls += [to.comm(to.recv_b(remaining + i)), backward, to.comm(to.send_b(remaining + i))]
    return calls


@dataclass
class EventQueue:
    """Stages wake each other; every message waits for both ends."""

    calls: list[list[Call]]
    transfer_s: float
    events: list[tuple[float, int]] = field(default_factory=list)
    there: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    passed_s: dict[tuple[str, int, int], float] = field(default_factory=dict)
    end_s: float = 0.0

    def run(self) -> float:
        at = [0] * len(self.calls)
        busy_until_s = [0.0] * len(self.calls)
        self.events = [(0.0, stage) for stage in range(len(self.calls))]
        while self.events:
            now_s, stage = heapq.heappop(self.events)
            if now_s < busy_until_s[stage]:
                continue
            if at[stage] == len(self.calls[stage]):
                self.end_s = max(self.end_s, now_s)
                continue
            kind, messages, seconds = self.calls[stage][at[stage]]
            if kind == "compute":
                at[stage] += 1
                busy_until_s[stage] = now_s + seconds
                heapq.heappush(self.events, (now_s + seconds, stage))
            elif self._is_over(stage, messages, now_s):
                at[stage] += 1
                heapq.heappush(self.events, (now_s, stage))
        assert at == [len(calls) for calls in self.calls], "deadlock"
        return self.end_s

    def _is_over(
        self, stage: int, messages: tuple[tuple[str, int, int], ...], now_s: float
    ) -> bool:
        """True if all have passed; else the stage is woken again when the next one passes."""
        for message in messages:
            ends = self.there.setdefault(message, [])
            if stage not in ends:
                ends.append(stage)
                if len(ends) == 2:
                    self.passed_s[message] = now_s + self.transfer_s
                    for end in ends:
                        heapq.heappush(self.events, (now_s + self.transfer_s, end))
        return all(self.passed_s.get(message, now_s + 1) <= now_s for message in messages)


def naive_s(times: list[float], count: int, share: float, transfer_s: float) -> float:
    calls = [
        megatron_calls(stage, len(times), count, time_s * share, time_s * (1 - share))
        for stage, time_s in enumerate(times)
    ]
    return EventQueue(calls, transfer_s).run()


@given(stages_s, counts, shares, transfers_s)
def test_it_is_what_an_event_queue_of_megatrons_calls_takes(
    times: list[float], count: int, share: float, transfer_s: float
) -> None:
    played = play(times, count, forward_share=share, transfer_s=transfer_s)
    assert played.end_s == pytest.approx(naive_s(times, count, share, transfer_s), rel=1e-9)


@given(st.integers(1, 64), st.integers(1, 6), counts)
def test_equal_stages_take_fill_and_drain_and_nothing_else(
    time: int, num_stages: int, count: int
) -> None:
    """Times are sums of powers of two, so nothing is rounded."""
    times = [time / 8] * num_stages
    assert play(times, count, forward_share=0.25).end_s == pipeline_time_s(times, count)
    assert play(times, count, forward_share=0.25).end_s == (num_stages - 1 + count) * time / 8


@given(stages_s, counts, shares)
def test_the_closed_form_is_above_and_the_busiest_stage_below(
    times: list[float], count: int, share: float
) -> None:
    end_s = play(times, count, forward_share=share).end_s
    assert end_s <= pipeline_time_s(times, count) * (1 + 1e-9)
    assert end_s >= count * max(times) * (1 - 1e-9)
    assert end_s >= sum(times) * (1 - 1e-9)


@given(stages_s, counts, shares, transfers_s, st.data())
def test_a_slower_stage_or_wire_never_makes_a_step_shorter(
    times: list[float], count: int, share: float, transfer_s: float, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, len(times) - 1))
    slower = [*times]
    slower[stage] *= data.draw(st.floats(1.0, 20.0))
    before_s = play(times, count, forward_share=share, transfer_s=transfer_s).end_s
    after_s = play(slower, count, forward_share=share, transfer_s=transfer_s * 1.5).end_s
    assert after_s >= before_s * (1 - 1e-9)


@given(st.integers(1, 8), counts, st.data())
def test_every_micro_batch_is_computed_once_each_way_with_no_more_in_flight_than_memory_knows(
    num_stages: int, count: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, num_stages - 1))
    operations = stage_operations(stage, num_stages, count)
    assert sorted(operations) == sorted(
        [(True, i) for i in range(count)] + [(False, i) for i in range(count)]
    )
    warmup = num_warmup(stage, num_stages, count)
    assert [operation.is_forward for operation in operations[:warmup]] == [True] * warmup
    in_flight, most = 0, 0
    for operation in operations:
        in_flight += 1 if operation.is_forward else -1
        most = max(most, in_flight)
    assert most == num_inflight(stage=stage, num_stages=num_stages, num_microbatches=count)


@given(stages_s, counts, shares, transfers_s)
def test_nothing_starts_before_what_it_needs(
    times: list[float], count: int, share: float, transfer_s: float
) -> None:
    last = len(times) - 1
    starts = play(times, count, forward_share=share, transfer_s=transfer_s).starts_s
    start_of = [
        dict(zip(stage_operations(stage, last + 1, count), starts[stage], strict=True))
        for stage in range(last + 1)
    ]
    slack_s = 1e-9
    for stage in range(last + 1):
        for operation, start_s in start_of[stage].items():
            forward, i = operation
            neighbour = stage - 1 if forward else stage + 1
            if 0 <= neighbour <= last:
                part = share if forward else 1 - share
                ready_s = start_of[neighbour][operation] + part * times[neighbour] + transfer_s
                assert start_s >= ready_s - slack_s
            if not forward:
                assert (
                    start_s >= start_of[stage][Operation(True, i)] + share * times[stage] - slack_s
                )
        assert all(a <= b + slack_s for a, b in pairwise(starts[stage]))


def test_a_transfer_costs_a_middle_stage_two_calls_a_micro_batch() -> None:
    """Neither call overlaps with computing: one to each neighbour."""
    short, long = (play([3.0] * 3, n, forward_share=1 / 3, transfer_s=0.5) for n in (20, 21))
    assert long.end_s - short.end_s == pytest.approx(3.0 + 2 * 0.5)
