"""A job under a policy, as the replay sees it."""

from dataclasses import dataclass
from typing import Protocol

from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Another plan, and what it costs to get there."""

    plan: Plan
    pause_s: float
    """How much longer the first step under the new plan takes."""
    moved_bytes: int = 0


class Job(Protocol):
    """Goes through the iterations one by one and may change its plan between two of them."""

    @property
    def plan(self) -> Plan:
        """In force in the next iteration."""
        ...

    @property
    def is_settled(self) -> bool:
        """True if nothing more will change while the rates stay as they are."""
        ...

    def after(self, iteration: int, rates: Rates) -> Change | None:
        """What follows an iteration that ran at these rates.

        Iterations in which a settled job saw nothing new may be left out.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StockJob:
    """Stays under its plan, come what may."""

    plan: Plan
    is_settled: bool = True

    def after(self, iteration: int, rates: Rates) -> Change | None:  # noqa: ARG002
        """Nothing follows."""
        return None
