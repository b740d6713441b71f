"""What a driver says, through a stand-in for pynvml: every way to fail, and what is made of it."""

import math
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from malleus_megatron.adapter.report import Reporter
from malleus_megatron.control.telemetry import GpuReading, likely_reason
from malleus_megatron.control.values import Decision
from malleus_megatron.events import EventLog
from malleus_megatron.plan.rates import Rates
from malleus_megatron.runtime.telemetry import Telemetry
from tests.harness.training import read_lines

HEALTHY = GpuReading(
    sm_mhz=1900,
    max_sm_mhz=1980,
    clock_reasons=0,
    temperature_c=60,
    power_w=500,
    power_limit_w=700,
    uncorrected_ecc=0,
    corrected_ecc=0,
    xid=0,
    other_processes=0,
)


def reading(**changes: float) -> GpuReading:
    numbers = dict(zip(GpuReading.__dataclass_fields__, HEALTHY.numbers(), strict=True))
    return GpuReading(**(numbers | changes))


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({}, None),
        (
            {"clock_reasons": 0x40, "sm_mhz": 510, "temperature_c": 93},
            "thermal slowdown, 93 C, SM clock 510 of 1980 MHz (its peers 1900)",
        ),
        (
            {"clock_reasons": 0x20 | 0x8, "sm_mhz": 510, "temperature_c": math.nan},
            "thermal slowdown, SM clock 510 of 1980 MHz (its peers 1900)",
        ),
        (
            {"clock_reasons": 0x80, "sm_mhz": 990},
            "power brake slowdown, 500 of 700 W, SM clock 990 of 1980 MHz (its peers 1900)",
        ),
        (
            {"clock_reasons": 0x8, "sm_mhz": 990, "power_w": math.nan},
            "hardware slowdown, 60 C, SM clock 990 of 1980 MHz (its peers 1900)",
        ),
        (
            {"clock_reasons": 0x4, "sm_mhz": 1200, "power_w": 299, "power_limit_w": 300},
            "power cap, 299 of 300 W, SM clock 1200 of 1980 MHz (its peers 1900)",
        ),
        ({"clock_reasons": 0x4, "power_w": 699}, None),  # capped as all are under load
        ({"sm_mhz": 1200}, "SM clock 1200 of 1980 MHz (its peers 1900)"),
        ({"sm_mhz": 345, "clock_reasons": 0x1}, None),  # it waits
        ({"other_processes": 1}, "1 other process on it"),
        ({"other_processes": 3, "xid": 79}, "Xid 79 in the driver's log; 3 other processes on it"),
        ({"uncorrected_ecc": 2}, "2 uncorrected ECC errors"),
        ({"corrected_ecc": 800}, "800 corrected ECC errors"),
        ({"corrected_ecc": 800, "other_processes": 1}, "1 other process on it"),
    ],
)
def test_the_likely_reason(mine: dict[str, float], said: str | None) -> None:
    others = [HEALTHY, HEALTHY, HEALTHY]
    assert likely_reason(1, [others[0], reading(**mine), *others[1:]]) == said


def test_peers_are_gpus_of_the_same_kind_that_do_not_wait() -> None:
    mine = reading(sm_mhz=1400, max_sm_mhz=1410)
    waiting = reading(sm_mhz=345, clock_reasons=1)
    assert likely_reason(0, [mine, HEALTHY, HEALTHY]) is None
    slow = reading(sm_mhz=1200)
    assert likely_reason(0, [slow, waiting, waiting]) is None
    assert likely_reason(0, [slow, waiting, HEALTHY]) is not None
    alike = reading(sm_mhz=510, clock_reasons=0x40)
    assert likely_reason(0, [alike, alike, alike]) is None


def test_heat_is_a_reason_without_peers_too() -> None:
    hot = reading(clock_reasons=0x40, sm_mhz=510, temperature_c=93)
    assert likely_reason(0, [hot]) == "thermal slowdown, 93 C, SM clock 510 of 1980 MHz"


def test_nothing_known_is_no_reason() -> None:
    empty = GpuReading()
    assert likely_reason(0, [empty, empty]) is None
    assert likely_reason(0, [empty, HEALTHY]) is None
    assert likely_reason(1, [empty, HEALTHY]) is None


class FakeError(Exception):
    pass


class FakeNotSupportedError(FakeError):
    pass


def fake_nvml(**changes: Any) -> types.ModuleType:
    """A pynvml whose one GPU is healthy, but for the functions in `changes`."""
    module = types.ModuleType("pynvml")
    events = iter(())
    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda gpu, kind: 1900,
        "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x40,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 93,
        "nvmlDeviceGetPowerUsage": lambda gpu: 500_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
        "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: 7,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [1, 2],
        "nvmlEventSetCreate": object,
        "nvmlEventSetFree": lambda events: None,
        "nvmlDeviceRegisterEvents": lambda gpu, kinds, events: None,
        "nvmlEventSetWait_v2": lambda _, timeout: next(events, None) or failing(),
    }
    constants = (
        *("NVML_CLOCK_SM", "NVML_VOLATILE_ECC", "NVML_TEMPERATURE_GPU"),
        *("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        "nvmlEventTypeXidCriticalError",
    )
    values = dict.fromkeys(constants, 1) | functions | changes
    for name, value in values.items():
        setattr(module, name, value)
    module.NVMLError = FakeError  # type: ignore[attr-defined]
    module.NVMLError_NotSupported = FakeNotSupportedError  # type: ignore[attr-defined]
    return module


def failing(*_: Any) -> Any:
    raise FakeError("Unknown Error")


def not_supported(*_: Any) -> Any:
    raise FakeNotSupportedError("Not Supported")


def no_driver() -> None:
    raise FakeError("Driver Not Loaded")


PATIENCE_S = 20.0


def wait_for[T](look: Callable[[], T], until: Callable[[T], bool]) -> T:
    """Look again and again, as a busy machine may take its time."""
    end = time.monotonic() + PATIENCE_S
    while not until(found := look()):
        assert time.monotonic() < end, f"last seen: {found}"
        time.sleep(0.002)
    return found


def is_read(found: GpuReading) -> bool:
    return any(not math.isnan(number) for number in found.numbers())


def observed(
    monkeypatch: pytest.MonkeyPatch,
    module: types.ModuleType,
    until: Callable[[GpuReading], bool] = is_read,
) -> GpuReading:
    """What a thread has read when it is enough; nothing has gone wrong then."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    telemetry = Telemetry("GPU-1", interval_s=0.05)
    telemetry.start()
    found = wait_for(telemetry.latest, until)
    assert telemetry.take_news() is None
    telemetry.close(PATIENCE_S)
    assert not telemetry._thread.is_alive()
    return found


def news_of(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> str:
    """Why a thread has given up."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    telemetry = Telemetry("GPU-1", interval_s=0.01)
    telemetry.start()
    news = wait_for(telemetry.take_news, lambda news: news is not None)
    assert not is_read(telemetry.latest())
    assert telemetry.take_news() is None
    telemetry.close(PATIENCE_S)
    assert not telemetry._thread.is_alive()
    assert news is not None
    return news


def test_a_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ecc = iter(range(7, 1000))
    xids = iter([types.SimpleNamespace(eventData=31), types.SimpleNamespace(eventData=79)])
    found = observed(
        monkeypatch,
        fake_nvml(
            nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: next(ecc),
            nvmlEventSetWait_v2=lambda _, timeout: next(xids, None) or failing(),
        ),
        # Since the start, not since the driver's: the first reading has none.
        until=lambda found: found.corrected_ecc > 0,
    )
    assert found == reading(
        clock_reasons=0x40,
        temperature_c=93,
        other_processes=1,
        xid=79,
        corrected_ecc=found.corrected_ecc,
        uncorrected_ecc=found.uncorrected_ecc,
    )


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "ModuleNotFoundError"),
        (types.ModuleType("pynvml"), "AttributeError"),
        (fake_nvml(nvmlInit=no_driver), "Driver Not Loaded"),
        (fake_nvml(nvmlDeviceGetHandleByUUID=failing), "Unknown Error"),
    ],
    ids=["no module", "another module", "no driver", "no such GPU"],
)
def test_without_nvml_telemetry_is_off_with_one_line(
    module: types.ModuleType | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = news_of(monkeypatch, module)
    assert news.startswith("GPU telemetry is off (")
    assert said in news
    assert "\n" not in news


QUERIES = {
    "nvmlDeviceGetClockInfo": {"sm_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"max_sm_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"clock_reasons"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetTotalEccErrors": {"uncorrected_ecc", "corrected_ecc"},
    "nvmlDeviceGetComputeRunningProcesses": {"other_processes"},
    "nvmlEventSetCreate": {"xid"},
    "nvmlDeviceRegisterEvents": {"xid"},
}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("failure", [failing, not_supported])
def test_a_query_that_fails_leaves_out_its_own_figure(
    name: str, failure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def query(*_: Any) -> Any:
        asked.append(name)
        return failure()

    rounds: list[int] = []

    def always_there(*_: Any) -> int:
        rounds.append(1)
        return 1

    other = (
        "nvmlDeviceGetClockInfo" if name != "nvmlDeviceGetClockInfo" else "nvmlDeviceGetPowerUsage"
    )
    found = observed(
        monkeypatch,
        fake_nvml(**{other: always_there, name: query}),
        until=lambda _: len(rounds) > 2,
    )
    missing = {
        part
        for part, number in zip(GpuReading.__dataclass_fields__, found.numbers(), strict=True)
        if math.isnan(number)
    }
    assert missing == QUERIES[name]
    once = failure is not_supported or QUERIES[name] == {"xid"}
    assert (len(asked) == len(QUERIES[name])) == once


def test_a_driver_that_stops_answering_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in QUERIES if name.startswith("nvmlDeviceGet")]
    news = news_of(monkeypatch, fake_nvml(**dict.fromkeys(names, failing)))
    assert "answers nothing any more: Unknown Error" in news


def test_a_driver_that_hangs_neither_holds_the_job_nor_leaves_an_old_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    first = iter([93])

    def hang(*_: Any) -> int:
        return next(first, None) or int(go_on.wait(20))

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetTemperature=hang))
    telemetry = Telemetry("GPU-1", interval_s=0.2)
    telemetry.start()
    assert wait_for(telemetry.latest, is_read).temperature_c == 93
    wait_for(telemetry.latest, lambda found: not is_read(found))
    telemetry.close(timeout_s=0.1)
    assert telemetry._thread.is_alive()
    go_on.set()
    telemetry._thread.join(PATIENCE_S)


class Sidecar:
    """Answers once."""

    def __init__(self, decision: Decision) -> None:
        self.decision: Decision | None = decision

    def take_warnings(self) -> tuple[str, ...]:
        return ()

    def take_news(self) -> tuple[str, ...]:
        return ()

    def tell(self, event: dict[str, Any]) -> None:
        self.told = event

    def take_reply(self) -> Decision | None:
        decision, self.decision = self.decision, None
        return decision


def test_a_straggler_is_told_with_its_reason(tmp_path: Any) -> None:
    said: list[str] = []
    decision = Decision(iteration=4, rates=Rates.of({1: 2.57, 2: 1.5}), stragglers=(1, 2))
    sidecar: Any = Sidecar(decision)
    reporter = Reporter(events=EventLog(tmp_path), say=said.append, sidecar=sidecar)
    assert not reporter.asks_readings
    reporter.take_offer()
    assert reporter.asks_readings
    hot = reading(clock_reasons=0x40, sm_mhz=510, temperature_c=93)
    reporter.stragglers([HEALTHY, hot, HEALTHY, HEALTHY], "GPU telemetry is off (why)")
    assert not reporter.asks_readings
    assert said == [
        "GPU telemetry is off (why)",
        "GPU 1 is a straggler: rate 2.57; likely: thermal slowdown, 93 C, SM clock 510 of 1980 MHz "
        "(its peers 1900)",
        "GPU 2 is a straggler: rate 1.50",
    ]
    events = read_lines(tmp_path / "events.jsonl")
    told = [(e["gpu"], e["rate"], e["reason"]) for e in events if e["event"] == "straggler"]
    assert told == [
        (1, 2.57, "thermal slowdown, 93 C, SM clock 510 of 1980 MHz (its peers 1900)"),
        (2, 1.5, None),
    ]
