"""Why a GPU may be slow: what its driver says, compared with its peers. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median

ABSENT = math.nan

IDLE = 0x1
POWER_CAP = 0x4
HARDWARE_SLOWDOWN = 0x8
THERMAL = 0x20 | 0x40
POWER_BRAKE = 0x80
"""Bits of NVML's clock event reasons; thermal ones by software and by hardware."""

_CLEARLY = 0.95
"""A clock below this part of the peers' is lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What the driver says of one GPU; NaN: it does not say."""

    sm_mhz: float = ABSENT
    max_sm_mhz: float = ABSENT
    clock_reasons: float = ABSENT
    """Bits: what holds the clock down."""
    temperature_c: float = ABSENT
    power_w: float = ABSENT
    power_limit_w: float = ABSENT
    uncorrected_ecc: float = ABSENT
    """Memory errors since the job began."""
    corrected_ecc: float = ABSENT
    xid: float = ABSENT
    """The last critical error's number since the job began; 0: none."""
    other_processes: float = ABSENT

    def numbers(self) -> list[float]:
        """In the order of the fields, to be exchanged."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "GpuReading":
        """From `numbers`."""
        names = (part.name for part in fields(cls))
        return cls(**dict(zip(names, numbers, strict=True)))

    def has(self, reasons: int) -> bool:
        """Whether one of these bits is set."""
        return not math.isnan(self.clock_reasons) and bool(int(self.clock_reasons) & reasons)


def likely_reason(gpu: int, readings: Sequence[GpuReading]) -> str | None:
    """What sets a straggler apart, the gravest first; None if nothing does.

    Args:
        gpu: The straggler.
        readings: Of all GPUs, by number. Peers are those with the same highest clock.
    """
    mine = readings[gpu]
    peers = [
        other
        for number, other in enumerate(readings)
        if number != gpu and other.max_sm_mhz == mine.max_sm_mhz
    ]
    found = [*_errors(mine), *_slowdowns(mine, peers), *_company(mine, peers)]
    if not found:
        found = [*_corrected(mine, peers)]
    return "; ".join(found) or None


def _errors(mine: GpuReading) -> Iterator[str]:
    if mine.xid > 0:
        yield f"Xid {mine.xid:.0f} in the driver's log"
    if mine.uncorrected_ecc > 0:
        yield f"{mine.uncorrected_ecc:.0f} uncorrected ECC errors"


def _slowdowns(mine: GpuReading, peers: Sequence[GpuReading]) -> Iterator[str]:
    """A clock that is held down, or is down; not where the peers' is as low."""
    theirs = _median([peer.sm_mhz for peer in peers if not peer.has(IDLE)])
    if not math.isnan(theirs) and not mine.sm_mhz < _CLEARLY * theirs:
        return
    clock = _clock(mine, theirs)
    if mine.has(THERMAL):
        yield f"thermal slowdown{_figure(mine.temperature_c, ' C')}{clock}"
    elif mine.has(POWER_BRAKE):
        yield f"power brake slowdown{_power(mine)}{clock}"
    elif mine.has(HARDWARE_SLOWDOWN):
        yield f"hardware slowdown{_figure(mine.temperature_c, ' C')}{_power(mine)}{clock}"
    elif mine.has(POWER_CAP) and not math.isnan(theirs):
        yield f"power cap{_power(mine)}{clock}"
    elif not mine.has(IDLE) and not math.isnan(theirs):
        yield clock.removeprefix(", ")


def _company(mine: GpuReading, peers: Sequence[GpuReading]) -> Iterator[str]:
    theirs = _median([peer.other_processes for peer in peers])
    usual = 0.0 if math.isnan(theirs) else theirs
    if mine.other_processes > usual:
        number = int(mine.other_processes)
        yield f"{number} other process{'es' if number > 1 else ''} on it"


def _corrected(mine: GpuReading, peers: Sequence[GpuReading]) -> Iterator[str]:
    theirs = _median([peer.corrected_ecc for peer in peers])
    if mine.corrected_ecc > 0 and not mine.corrected_ecc <= 10 * theirs:
        yield f"{mine.corrected_ecc:.0f} corrected ECC errors"


def _clock(mine: GpuReading, theirs: float) -> str:
    if math.isnan(mine.sm_mhz):
        return ""
    most = "" if math.isnan(mine.max_sm_mhz) else f" of {mine.max_sm_mhz:.0f}"
    peers = "" if math.isnan(theirs) else f" (its peers {theirs:.0f})"
    return f", SM clock {mine.sm_mhz:.0f}{most} MHz{peers}"


def _power(mine: GpuReading) -> str:
    if math.isnan(mine.power_w):
        return ""
    most = "" if math.isnan(mine.power_limit_w) else f" of {mine.power_limit_w:.0f}"
    return f", {mine.power_w:.0f}{most} W"


def _figure(value: float, unit: str) -> str:
    return "" if math.isnan(value) else f", {value:.0f}{unit}"


def _median(values: Sequence[float]) -> float:
    """Of those that are known; NaN if none is."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else ABSENT
