"""One GPU turns slow while another heals: two plans, and the second does not wait for anew."""

import pytest

from malleus_megatron.config import Level
from malleus_megatron.plan.nominal import nominal_plan
from tests.unit import detected_job
from tests.unit.detected_job import DetectedJob

NOMINAL = nominal_plan(
    num_layers=16,
    num_microbatches=32,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    data_parallel_size=2,
)


@pytest.mark.parametrize("earlier", range(4))
def test_what_was_certain_before_the_new_stages_were_timed_counts_then(
    monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    """The recovery is certain just before or after the first plan; by then it had lasted."""
    monkeypatch.setattr(detected_job, "LAYER_S", {1: 0.125, 2: 0.066, 4: 0.0366})
    job = DetectedJob(NOMINAL, level=Level.reshape)
    job.run(6)
    job.run(12, {2: 12.53})
    job.run(earlier, {2: 2.57})
    before = job.iteration
    job.run(17, {2: 2.57, 5: 5.42})
    changes = [changed - before for changed in job.changes if changed > before]
    assert len(changes) == 2
    assert changes[0] <= 6
    assert changes[1] <= 10
