"""What the driver says of this rank's GPU, read beside the training by a thread of its own.

Whatever fails here turns telemetry off, or leaves a figure out; training never hears of it.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from malleus_megatron.control.telemetry import GpuReading

INTERVAL_S = 5.0
_STALE_INTERVALS = 6
"""A reading that is older says nothing of now: the thread hangs in the driver."""
_MOST_FAILURES = 3
"""Rounds in which the driver answered nothing."""
_MAX_EVENTS = 16
_log = logging.getLogger(__name__)

type _Query = Callable[[], float]


class Telemetry:
    """Holds the newest reading. Nothing here raises or waits."""

    def __init__(self, uuid: str, *, interval_s: float = INTERVAL_S) -> None:
        """Nothing is read before `start`.

        Args:
            uuid: Of the GPU, as the driver names it.
            interval_s: Between two readings.
        """
        self._uuid = uuid
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._reading = GpuReading()
        self._read_at_s = -math.inf
        self._news: str | None = None
        self._thread = threading.Thread(target=self._run, name="malleus-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def latest(self) -> GpuReading:
        """The newest reading; empty if there is none, or none of now."""
        age_s = time.monotonic() - self._read_at_s
        return self._reading if age_s < _STALE_INTERVALS * self._interval_s else GpuReading()

    def take_news(self) -> str | None:
        """Once: why telemetry is off."""
        news, self._news = self._news, None
        return news

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that hangs in the driver is left behind."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            nvml = _Nvml(self._uuid)
        except Exception as error:  # noqa: BLE001 - no module, no driver, no such GPU: all the same
            self._off(error)
            return
        try:
            self._read_on(nvml)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not be seen in the job
            self._off(error)
        finally:
            nvml.close()

    def _read_on(self, nvml: "_Nvml") -> None:
        failures = 0
        while not self._closing.is_set():
            reading = nvml.read()
            failures = failures + 1 if nvml.answered == 0 else 0
            if failures >= _MOST_FAILURES:
                raise RuntimeError(f"the driver answers nothing any more: {nvml.last_error}")
            self._reading, self._read_at_s = reading, time.monotonic()
            self._closing.wait(self._interval_s)

    def _off(self, error: Exception) -> None:
        self._reading = GpuReading()
        self._news = (
            f"GPU telemetry is off ({type(error).__name__}: {error}); stragglers are found without "
            "it, but no reason is named."
        )
        _log.debug("telemetry is off", exc_info=error)


class _Nvml:
    """One GPU through NVML. A query that is not supported is not made again."""

    def __init__(self, uuid: str) -> None:
        """Find the GPU.

        Raises:
            Exception: there is no module, no driver, or no such GPU.
        """
        import pynvml  # noqa: PLC0415 - it may be missing, and that is no fault

        self.answered = 0
        """Queries that the last reading had an answer to."""
        self.last_error = ""
        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._queries = dict(self._all_queries())
        self._xid = 0.0
        self._events: Any = None
        self._at_start: dict[str, float] = {}
        self._watch_errors()

    def read(self) -> GpuReading:
        """Ask everything; NaN where there is no answer."""
        values: dict[str, float] = {}
        for name, query in list(self._queries.items()):
            try:
                values[name] = float(query())
            except self._nvml.NVMLError_NotSupported:
                del self._queries[name]
            except self._nvml.NVMLError as error:
                self.last_error = str(error)
        self.answered = len(values)
        for name in ("uncorrected_ecc", "corrected_ecc"):
            if name in values:
                values[name] -= self._at_start.setdefault(name, values[name])
        return replace(GpuReading(**values), xid=self._newest_xid())

    def close(self) -> None:
        """Give NVML back."""
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            _log.debug("NVML does not end", exc_info=True)

    def _all_queries(self) -> Iterator[tuple[str, _Query]]:
        nvml, gpu = self._nvml, self._gpu
        # The name before drivers spoke of events.
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        sm, volatile = nvml.NVML_CLOCK_SM, nvml.NVML_VOLATILE_ECC
        wrong, mended = (
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        )
        yield "sm_mhz", lambda: nvml.nvmlDeviceGetClockInfo(gpu, sm)
        yield "max_sm_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, sm)
        yield "clock_reasons", lambda: reasons(gpu)
        yield (
            "temperature_c",
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        )
        yield "power_w", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        yield "power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
        yield "uncorrected_ecc", lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, wrong, volatile)
        yield "corrected_ecc", lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, mended, volatile)
        # This process is one of them; its number here may be another than the driver's.
        yield (
            "other_processes",
            lambda: max(0, len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) - 1),
        )

    def _watch_errors(self) -> None:
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(
                self._gpu, nvml.nvmlEventTypeXidCriticalError, self._events
            )
        except nvml.NVMLError:
            self._events = None

    def _newest_xid(self) -> float:
        """The number of the last critical error, 0 if there was none; NaN if nobody says."""
        if self._events is None:
            return math.nan
        for _ in range(_MAX_EVENTS):
            try:
                self._xid = float(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except self._nvml.NVMLError:  # none is left, most of the time
                break
        return self._xid
