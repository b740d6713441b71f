"""What collectives inside a layer take; a slow member of a TP group is told from the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.config import Level
from malleus_megatron.detector.collectives import Collectives
from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.plan import Plan
from tests.unit.detected_job import LAYER_S, DetectedJob, grid, staged

COLLECTIVES_S = 0.01
UNEVEN = staged(((4, 5), (2, 3)), ((1, 4), (1, 4)))


def sample(gpu: int, collectives_s: float) -> Sample:
    return Sample(
        gpu=gpu,
        iteration=1,
        layer_forward_s=0.01,
        layer_backward_s=0.02,
        stage_forward_s=0.04,
        stage_backward_s=0.08,
        num_layers=4,
        num_microbatches=8,
        layer_collectives_s=collectives_s,
    )


def seen(layout: Plan, *collectives_s: float) -> Collectives:
    samples = [sample(gpu, time_s) for gpu, time_s in enumerate(collectives_s)]
    return Collectives().after(samples, layout, 4)


def test_the_least_of_a_group_is_its_transfer_and_the_lower_median_that_of_a_degree() -> None:
    found = seen(grid(2), 0.5, 0.02, 0.03, 0.03, 0.04, 0.9, 7.0, 8.0)
    assert found.seen == {2: (0.03,)}


def test_each_degree_has_its_own_and_a_gpu_alone_has_none() -> None:
    found = seen(UNEVEN, 0.3, 0.2, 0.4, 0.5, 0.1, 0.6, 0.7, 0.8)
    assert (found.at(1), found.at(2), found.at(4)) == (0.0, 0.1, 0.2)
    assert found.at(8) == found.at(4), "the nearest degree stands in for one that was never seen"


def test_without_timed_collectives_there_are_none() -> None:
    assert Collectives().at(2) == 0.0
    assert seen(grid(2), *[0.0] * 8).at(2) == 0.0
    assert Collectives().after([], grid(2), 4).at(2) == 0.0


def test_the_last_iterations_count_and_a_degree_that_is_gone_keeps_its_time() -> None:
    found = Collectives()
    for time_s in (9.0, 9.0, 1.0, 2.0, 3.0):
        found = found.after([sample(gpu, time_s) for gpu in range(8)], grid(2), 3)
    assert found.at(2) == 2.0
    later = found.after([sample(gpu, 5.0) for gpu in range(8)], grid(4, dp=1), 3)
    assert (later.at(2), later.at(4)) == (2.0, 5.0)


@given(
    times=st.lists(st.floats(0.001, 10.0), min_size=8, max_size=8),
    order=st.permutations(range(4)),
)
def test_the_order_of_groups_changes_nothing(times: list[float], order: list[int]) -> None:
    turned = [times[2 * group + member] for group in order for member in range(2)]
    assert seen(grid(2), *times) == seen(grid(2), *turned)


@pytest.mark.parametrize("rate", [1.2, 1.5, 2.57, 5.42, 12.53])
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (4, 1)])
def test_of_a_tp_group_whose_members_wait_the_slow_one_alone_is_named(
    rate: float, tp: int, dp: int
) -> None:
    job = DetectedJob(grid(tp, dp=dp), collectives_s=COLLECTIVES_S)
    job.run(5)
    decision = job.run(16, {1: rate})
    assert decision.stragglers == (1,)
    assert decision.rates[1] == pytest.approx(rate, rel=0.05)
    assert job.ever_named == {1}


def test_a_step_is_predicted_with_its_collectives() -> None:
    job = DetectedJob(grid(2), level=Level.rebalance, collectives_s=COLLECTIVES_S)
    healthy = job.run(4)
    layer_s = LAYER_S[2] + COLLECTIVES_S
    assert healthy.step_time_s == pytest.approx((8 + 1) * 4 * layer_s)


def test_plans_are_priced_with_the_collectives_of_their_degrees() -> None:
    """A plan of single GPUs has none: what it saves there counts for it."""
    job = DetectedJob(grid(2), level=Level.reshape, collectives_s=COLLECTIVES_S)
    job.run(4)
    known = job.controller._known
    assert known.healthy_s(2) == pytest.approx(LAYER_S[2] + COLLECTIVES_S)
    assert known.healthy_s(1) == pytest.approx(2 * LAYER_S[2])
    before = job.iteration
    job.run(14, {1: 5.42})
    assert job.changes
    assert job.changes[0] - before <= 7
    predicted = next(d.offer.predicted for d in job.decisions if d.offer is not None)
    assert predicted is not None
    assert job.decisions[-1].step_time_s == pytest.approx(predicted.step_time_s, rel=0.1)
