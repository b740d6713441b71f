"""injection.json: which GPUs are slowed down, by how much, and in which iterations."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import read_json
from malleus_megatron.plan.fields import as_dict, as_int, as_list, only_known, required
from malleus_megatron.plan.rates import HEALTHY, check_rate

LOWEST_RATE = 0.01
HIGHEST_RATE = 1000.0
"""Beyond these an experiment shows nothing, and its first step may last for days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedRate:
    """One GPU's straggling rate over a span of iterations."""

    gpu: int
    rate: float
    from_iteration: int
    """The first one; iterations count from 1."""
    to_iteration: int | None = None
    """The first one after the span; None: to the end of the job."""

    def __post_init__(self) -> None:
        """Refuse a rate that is no positive finite number, and spans that hold no iteration."""
        check_rate(self.gpu, self.rate)
        if math.isinf(self.rate):
            raise BadInputError(
                f"GPU {self.gpu}: rate inf cannot be injected; it would stop the job."
            )
        if not LOWEST_RATE <= self.rate <= HIGHEST_RATE:
            raise BadInputError(
                f"GPU {self.gpu}: rate {self.rate} cannot be injected; from {LOWEST_RATE} to "
                f"{HIGHEST_RATE} can."
            )
        if self.gpu < 0:
            raise BadInputError(f"GPU {self.gpu}: numbers start at 0.")
        if self.from_iteration < 1:
            raise BadInputError(
                f"GPU {self.gpu}: from_iteration {self.from_iteration}; iterations count from 1."
            )
        if self.to_iteration is not None and self.to_iteration <= self.from_iteration:
            raise BadInputError(
                f"GPU {self.gpu}: to_iteration {self.to_iteration} must be above from_iteration "
                f"{self.from_iteration}; the span is half open."
            )

    def holds_in(self, iteration: int) -> bool:
        """True if the iteration is in the span."""
        return self.from_iteration <= iteration and (
            self.to_iteration is None or iteration < self.to_iteration
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """All injected rates of a job."""

    entries: tuple[InjectedRate, ...] = ()

    def rate_at(self, gpu: int, iteration: int) -> float:
        """The GPU's injected rate in an iteration; 1 outside of all spans.

        Where spans overlap the largest rate holds: saying a thing twice changes nothing.
        """
        rates = [
            entry.rate for entry in self.entries if entry.gpu == gpu and entry.holds_in(iteration)
        ]
        return max(rates, default=HEALTHY)

    def rates_of(self, gpu: int) -> tuple[float, ...]:
        """Every rate that is injected into a GPU at some time."""
        return tuple(entry.rate for entry in self.entries if entry.gpu == gpu)

    def check_gpus(self, world_size: int) -> None:
        """Refuse entries for GPUs that the job does not have.

        Raises:
            BadInputError: the message names the GPU and the job's size.
        """
        for entry in self.entries:
            if entry.gpu >= world_size:
                raise BadInputError(
                    f"The injection names GPU {entry.gpu}; the job has {world_size} GPUs "
                    f"(0..{world_size - 1})."
                )


def injection_from_json(document: Any, where: str = "injection") -> Injection:
    """Read injection.json.

    Raises:
        BadInputError: a missing, wrong or unknown field; the message names the entry and the value.
    """
    entries = as_list(document, where)
    return Injection(
        entries=tuple(_entry(entry, f"{where}[{index}]") for index, entry in enumerate(entries))
    )


def read_injection(path: Path) -> Injection:
    """Read an injection.json file."""
    return injection_from_json(read_json(path), str(path))


def _entry(document: Any, where: str) -> InjectedRate:
    body = as_dict(document, where)
    only_known(body, [field.name for field in fields(InjectedRate)], where)
    gpu = as_int(required(body, "gpu", where), f"{where}.gpu")
    start = as_int(required(body, "from_iteration", where), f"{where}.from_iteration")
    end = body.get("to_iteration")
    try:
        return InjectedRate(
            gpu=gpu,
            rate=check_rate(gpu, required(body, "rate", where)),
            from_iteration=start,
            to_iteration=None if end is None else as_int(end, f"{where}.to_iteration"),
        )
    except BadInputError as error:
        if str(error).startswith(where):
            raise
        raise BadInputError(f"{where}: {error}") from error
