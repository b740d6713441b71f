"""On a GPU: the allocator's word for a step, and what the driver says of the device."""

import math
import time

import pytest
import torch

from malleus_megatron.runtime.memory import CudaMeter
from malleus_megatron.runtime.telemetry import Telemetry

pytestmark = pytest.mark.gpu

MIB = 2**20


def test_the_meter_sees_what_is_allocated() -> None:
    torch.zeros(1, device="cuda")
    meter = CudaMeter()
    meter.restart()
    base, outside = meter.now_bytes(), meter.outside_bytes()
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    more = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    del more
    assert meter.now_bytes() - base == 64 * MIB
    assert meter.peak_bytes() - base == 96 * MIB
    assert abs(meter.outside_bytes() - outside) < 64 * MIB
    assert outside > 50 * MIB  # the context at least
    del kept
    meter.restart()
    assert meter.peak_bytes() - base < 64 * MIB


def test_the_driver_answers() -> None:
    device = torch.cuda.get_device_properties(0)
    telemetry = Telemetry(f"GPU-{device.uuid}", interval_s=0.5)
    telemetry.start()
    end = time.monotonic() + 20
    while math.isnan(telemetry.latest().temperature_c) and time.monotonic() < end:
        news = telemetry.take_news()
        assert news is None, news
        time.sleep(0.05)
    found = telemetry.latest()
    assert 10 < found.temperature_c < 120
    assert 0 < found.sm_mhz <= found.max_sm_mhz
    assert not math.isnan(found.clock_reasons)
    telemetry.close()
