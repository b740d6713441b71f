"""Spans on a real GPU: device time on the host's clock, and no waiting inside. `make gpu-check`."""

import time

import pytest
import torch

from malleus_megatron.runtime.operation_trace import OperationTrace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 200_000_000
"""Of the busy kernel: tens of milliseconds."""


def test_a_span_is_what_the_device_took_and_the_host_runs_ahead() -> None:
    trace = OperationTrace(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    before_s = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - before_s
    for _ in range(2):  # the second time with marks that were used before
        trace.begin()
        begun_s = time.perf_counter()
        for name in ("a", "b"):
            trace.start(name)
            torch.cuda._sleep(CYCLES)
            trace.stop(name)
        trace.end()
        queued_s = time.perf_counter() - begun_s
        a, b, _ = trace.read("gc")
        assert queued_s < 0.5 * took_s
        assert a[2] - a[1] == pytest.approx(took_s, rel=0.2)
        assert b[2] - b[1] == pytest.approx(took_s, rel=0.2)
        assert abs(a[1] - begun_s) < 0.1 * took_s
        assert a[2] <= b[1] + 1e-6
