"""Samples of an iteration before: a device is behind, and job and detector are not misled."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.rows import BoundaryRow
from malleus_megatron.config import Level
from malleus_megatron.control.controller import Controller
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Observation
from malleus_megatron.events import EventLog
from tests.unit.sidecar_cases import JOB, PLAN, SLOW, observation

GPUS = sorted(PLAN.all_gpus())


class Mailbox:
    """A sidecar's client that keeps what it is given."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []

    def post(self, one: Observation) -> None:
        self.observations.append(one)

    def tell(self, event: dict[str, Any]) -> None:
        """Events are no part of this."""


def rows_of(ended: int, lags: Mapping[int, int | None]) -> list[BoundaryRow]:
    """Of an iteration that has ended; each GPU's sample is older by its lag, or None: no news."""
    rows = []
    for sample in observation(ended).samples:
        row = BoundaryRow(iteration=ended, step_time_s=1.0, loss=1.0, has_loss=1.0)
        lag = lags.get(sample.gpu, 0)
        if lag is not None:
            row = row.with_sample(replace(sample, iteration=ended - lag))
        rows.append(row)
    return rows


def test_an_observation_is_of_the_iteration_that_has_ended(tmp_path: Path) -> None:
    """Rank 0 has no news, then is behind, then is not: no iteration comes twice."""
    mailbox: Any = Mailbox()
    reporter = Reporter(events=EventLog(tmp_path), say=lambda line: None, sidecar=mailbox)
    current = CurrentPlan(PLAN, Level.rebalance, None)
    for ended, lag in ((5, None), (6, 1), (7, 1), (8, 0)):
        reporter.iteration(rows_of(ended, {0: lag}), current)
    assert [one.iteration for one in mailbox.observations] == [5, 6, 7, 8]
    assert [one.samples[0].iteration for one in mailbox.observations] == [5, 5, 6, 8]
    controller = Controller(JOB, Policy())
    for one in mailbox.observations:
        assert controller.observe(one).iteration == one.iteration
    assert len(controller._window) == Policy().window, "it has not started over"


def behind(
    iteration: int, rates_at: Mapping[int, Mapping[int, float]], lags: Mapping[int, int]
) -> Observation:
    """What is seen when these GPUs' samples are of so many iterations before."""
    at = {lag: observation(iteration - lag, rates_at.get(iteration - lag)) for lag in (0, 1, 2)}
    samples = tuple(at[lags.get(gpu, 0)].samples[gpu] for gpu in GPUS)
    return replace(at[0], samples=samples)


@pytest.mark.parametrize("lags", [{0: 1}, {0: 2, 3: 1}, dict.fromkeys(GPUS, 1)])
def test_the_slow_gpu_is_named_and_offered_for_whoever_is_behind(lags: dict[int, int]) -> None:
    ((slow, rate),) = SLOW.items()
    rates_at = dict.fromkeys(range(10, 40), SLOW)
    controller = Controller(JOB, Policy())
    named, offered = [], []
    for iteration in range(3, 30):
        decision = controller.observe(behind(iteration, rates_at, lags))
        assert set(decision.stragglers) <= {slow}
        named += [iteration] * bool(decision.stragglers)
        offered += [iteration] * (decision.offer is not None)
    late = lags.get(slow, 0)
    assert named[0] == 10 + late + Policy().window - 1
    assert offered[0] == named[0] + Policy().patience - 1
    assert dict(decision.rates)[slow] == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("lags", [{0: 1}, {0: 2, 3: 1}])
def test_when_all_are_slow_together_for_a_while_nobody_is_named(lags: dict[int, int]) -> None:
    """At both ends of such a time the late ones look fast, or slow, for as long as they lag."""
    rates_at = {iteration: dict.fromkeys(GPUS, 2.0) for iteration in range(12, 18)}
    controller = Controller(JOB, Policy())
    for iteration in range(3, 40):
        decision = controller.observe(behind(iteration, rates_at, lags))
        assert decision.stragglers == ()
        assert decision.offer is None
