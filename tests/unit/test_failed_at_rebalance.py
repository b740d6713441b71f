"""A job that knows a GPU as failed and can only move micro-batches goes on, and says why."""

import math
from dataclasses import replace

from malleus_megatron.config import Level
from malleus_megatron.control.values import Decision
from tests.unit.detected_job import DetectedJob, grid, noisy


def decision_without(job: DetectedJob, gpu: int) -> Decision:
    """On an iteration in which this GPU timed nothing; a probe on standby has failed."""
    seen = job.observation({})
    samples = tuple(sample for sample in seen.samples if sample.gpu != gpu)
    probes = tuple((g, math.inf if g == gpu else rate) for g, rate in seen.probes)
    job.decisions.append(job.controller.observe(replace(seen, samples=samples, probes=probes)))
    return job.decisions[-1]


def test_a_failed_gpu_in_the_layout_is_a_warning() -> None:
    job = DetectedJob(grid(), level=Level.reshape, unit_s=8.0, spread=noisy(3, 0.01))
    job.run(8, {})
    job.run(20, {1: 12.53})
    assert job.plan.standby == (1,)
    for _ in range(20):
        decision = decision_without(job, 1)
    assert decision.rates[1] == math.inf
    job.job = replace(job.job, level=Level.rebalance, present=None)
    job.plan = job.nominal
    job.controller.relaid(job.job)
    warnings = {decision_without(job, 1).warning for _ in range(20)}
    assert any("No other micro-batches can be planned" in warning for warning in warnings)
