"""Named spans on the host's clock; garbage collection counts by itself."""

import gc
import time

import pytest
import torch

from malleus_megatron.runtime.operation_trace import OperationTrace


@pytest.fixture
def trace() -> OperationTrace:
    return OperationTrace(torch.device("cpu"))


def test_spans_lie_on_the_hosts_clock(trace: OperationTrace) -> None:
    before_s = time.perf_counter()
    trace.begin()
    trace.start("a")
    time.sleep(0.01)
    trace.stop("a")
    trace.start("b")
    trace.stop("b")
    trace.end()
    after_s = time.perf_counter()
    [a, b, _] = trace.read("gc")
    assert [a[0], b[0]] == ["a", "b"]
    assert before_s - 1e-4 <= a[1] < a[2] <= b[1] <= b[2] <= after_s + 1e-4
    assert a[2] - a[1] >= 0.009


def test_a_span_that_was_never_started_or_never_stopped_is_none(trace: OperationTrace) -> None:
    trace.begin()
    trace.stop("a")
    trace.start("b")
    trace.end()
    assert [span[0] for span in trace.read("gc")] == ["gc"]


def test_each_recording_starts_anew(trace: OperationTrace) -> None:
    for name in ("a", "b"):
        trace.begin()
        trace.start(name)
        trace.stop(name)
        trace.end()
        assert [span[0] for span in trace.read("gc")] == [name, "gc"]


class _Circle:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0.02)


def test_a_collection_is_taken_out_of_the_span_around_it(trace: OperationTrace) -> None:
    gc.collect()
    _Circle()
    trace.begin()
    trace.start("a")
    began_s = time.perf_counter()
    gc.collect()
    took_s = time.perf_counter() - began_s
    trace.stop("a")
    trace.end()
    [a, pause] = trace.read("gc")
    assert pause[2] - pause[1] >= 0.02
    assert a[2] - a[1] < took_s - 0.015


def test_nothing_is_left_behind(trace: OperationTrace) -> None:
    callbacks = list(gc.callbacks)
    trace.end()
    trace.begin()
    assert len(gc.callbacks) == len(callbacks) + 1
    trace.end()
    trace.end()
    assert gc.callbacks == callbacks
