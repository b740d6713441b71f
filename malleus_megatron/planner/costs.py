"""A problem and an objective as the few numbers that the search works with."""

import math
from dataclasses import dataclass

from malleus_megatron.cost.prediction import STEP_TIME
from malleus_megatron.cost.stage import ends_mib, extra_layers, max_layers
from malleus_megatron.plan.problem import ModelMemory, Problem

ROUNDING = 1e-9
"""Relative room for sums of floats where a whole number of layers or micro-batches is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCosts:
    """Both objectives in one form: fill * sum_j t_j + (m - fill) * max_j t_j.

    A stage takes t_j = (l_j + e_j) y_j.

    Step time is fill = 1. The published objective is fill = 0 with e_j = 0. All in seconds.
    """

    num_layers: int
    num_microbatches: int
    fill: int
    first_extra: float
    """Embedding, in layers (e_j of a first stage)."""
    last_extra: float
    """Head, in layers (e_j of a last stage)."""
    time_by_degree: tuple[tuple[int, float], ...]
    unit_s: float
    """A value in seconds, divided by this, is the objective's value."""
    problem: Problem
    memory: ModelMemory | None
    """Of the problem, in one pipeline."""

    @classmethod
    def of(cls, problem: Problem, objective: str) -> "SearchCosts":
        """Take the numbers from a problem."""
        model = problem.model
        timed = objective == STEP_TIME
        return cls(
            num_layers=model.num_layers,
            num_microbatches=problem.num_microbatches,
            fill=int(timed),
            first_extra=extra_layers(model, first=True, last=False) if timed else 0.0,
            last_extra=extra_layers(model, first=False, last=True) if timed else 0.0,
            time_by_degree=model.layer_time_s,
            unit_s=1.0 if timed else model.largest_degree_time_s,
            problem=problem,
            memory=problem.memory,
        )

    @property
    def has_extras(self) -> bool:
        """True if embedding or head take time, so that it matters who is first and last."""
        return self.first_extra > 0 or self.last_extra > 0

    @property
    def limits_memory(self) -> bool:
        """True if a GPU's memory is limited."""
        return self.problem.cluster.memory_mib is not None

    def max_layers(self, degree: int, inflight: int, *, first: bool, last: bool) -> int:
        """Most layers that fit a stage's GPUs: the memory rule of a problem, solved for layers."""
        memory, limit = self.memory, self.problem.cluster.memory_mib
        if limit is None or memory is None:
            return self.num_layers
        layers = max_layers(
            memory,
            (limit - memory.reserve_mib) * (1 + ROUNDING / 10),
            degree,
            inflight=inflight,
            ends_mib=ends_mib(memory, first=first, last=last),
        )
        return max(0, min(self.num_layers, layers))

    def value(self, fill_s: float, slowest_s: float, num_microbatches: int) -> float:
        """A pipeline's value in seconds."""
        return self.fill * fill_s + (num_microbatches - self.fill) * slowest_s

    def capacity(self, fill_s: float, slowest_s: float, limit_s: float) -> int:
        """Most micro-batches whose value keeps to the limit."""
        room = (limit_s - self.fill * fill_s) / slowest_s
        return math.floor(room * (1 + ROUNDING / 10)) + self.fill if room >= 0 else 0
