"""Samples to rates: known rates are put into the samples and must come out."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.detector.degrees import DegreeTimes
from malleus_megatron.detector.ends import Ends, measured_ends
from malleus_megatron.detector.rates import RateEstimate, estimate_rates
from malleus_megatron.detector.samples import Sample
from malleus_megatron.detector.smoothing import Window
from malleus_megatron.detector.stages import healthy_stage_times, measured_stage_times
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.rates import Rates

LAYER_S = 0.03


def sample(gpu: int, rate: float = 1.0, *, layers: int = 4, extra_s: float = 0.0) -> Sample:
    """A GPU whose stage has some layers and `extra_s` of healthy work beside them."""
    layer_s, stage_s = LAYER_S * rate, (LAYER_S * layers + extra_s) * rate
    return Sample(
        gpu=gpu,
        iteration=1,
        layer_forward_s=layer_s / 3,
        layer_backward_s=layer_s * 2 / 3,
        stage_forward_s=stage_s / 3,
        stage_backward_s=stage_s * 2 / 3,
        num_layers=layers,
        num_microbatches=4,
    )


def rates_of(window: Window, num_gpus: int) -> RateEstimate:
    """The estimate of a job whose GPUs are all at one TP degree, seen for the first time."""
    return estimate_rates(window, dict.fromkeys(range(num_gpus), 2), DegreeTimes(), threshold=1.2)


def iteration(*rates: float) -> tuple[Sample, ...]:
    return tuple(sample(gpu, rate) for gpu, rate in enumerate(rates))


@given(
    healthy=st.lists(st.floats(0.95, 1.05), min_size=1, max_size=16),
    slow=st.lists(st.floats(1.4, 12.0), max_size=15),
    order=st.randoms(use_true_random=False),
)
def test_stragglers_and_their_rates_are_found_however_many_there_are(
    healthy: list[float], slow: list[float], order: object
) -> None:
    rates = healthy + slow
    order.shuffle(rates)  # type: ignore[attr-defined]
    found = rates_of([iteration(*rates)] * 3, len(rates))
    assert found.stragglers == tuple(gpu for gpu, rate in enumerate(rates) if rate > 1.2)
    assert found.ignored == ()
    for gpu, rate in found.rates:
        assert rate == pytest.approx(rates[gpu], rel=0.06)


def test_one_noisy_iteration_is_not_a_shift_and_two_of_three_are() -> None:
    quiet, noisy = iteration(1, 1, 1, 1), iteration(1, 1, 3, 1)
    for window in ([quiet, noisy, quiet], [quiet, quiet, noisy], [quiet, noisy]):
        assert rates_of(window, 4).stragglers == ()
    assert rates_of([quiet, noisy, noisy], 4).stragglers == (2,)


def test_only_compute_time_decides() -> None:
    """Step times are equal on all ranks since collectives equalise them; 200 ms are on rank 2."""
    step_times_s = (0.2930, 0.2922, 0.2930, 0.2931)
    assert max(step_times_s) / min(step_times_s) < 1.01
    compute = [sample(gpu, layers=1) for gpu in range(4)]
    compute[2] = replace(
        compute[2],
        layer_backward_s=compute[2].layer_backward_s + 0.2,
        stage_backward_s=compute[2].stage_backward_s + 0.2,
    )
    assert rates_of([compute] * 3, 4).stragglers == (2,)


def test_a_stage_that_is_heavy_by_design_is_not_slow() -> None:
    samples = [sample(0, extra_s=0.5), sample(1), sample(2), sample(3, extra_s=0.2)]
    found = rates_of([samples] * 3, 4)
    assert found.stragglers == ()
    assert dict(found.rates) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})


@pytest.mark.parametrize("bad_s", [math.nan, -0.01, math.inf, -math.inf])
def test_a_sample_that_is_no_time_is_ignored_and_named(bad_s: float) -> None:
    bad = replace(sample(1, 5.0), layer_forward_s=bad_s)
    window = [iteration(1, 2, 1), iteration(1, 2, 1), (sample(0), bad, sample(2))]
    found = rates_of(window, 3)
    assert found.ignored == (1,)
    assert found.stragglers == (1,)
    assert found.rates[1] == pytest.approx(2.0)


def test_a_zero_sample_and_a_missing_gpu_are_ignored_and_named() -> None:
    zero = replace(sample(1), layer_forward_s=0.0, layer_backward_s=0.0)
    found = rates_of([(sample(0), zero)], 3)
    assert found.ignored == (1, 2)
    assert dict(found.rates) == {0: 1.0}


def test_nothing_measured_is_no_rate() -> None:
    for window in ([], [()]):
        found = rates_of(window, 2)
        assert (tuple(found.rates), found.stragglers, found.ignored) == ((), (), (0, 1))


def test_frozen_layers_have_no_backward_and_still_a_rate() -> None:
    frozen = [
        replace(sample(gpu, rate), layer_backward_s=0.0) for gpu, rate in enumerate((1.0, 2.0))
    ]
    assert rates_of([frozen], 2).rates[1] == pytest.approx(2.0)


def test_a_stage_costs_what_its_slowest_gpu_takes() -> None:
    plan = nominal_plan(
        num_layers=8,
        num_microbatches=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
    )
    rates = [1.0] * 8
    rates[plan.pipelines[1].stages[0].gpus[1]] = 3.0
    window = [iteration(*rates)] * 3
    stage_s = LAYER_S * 4
    measured = measured_stage_times(window, plan)
    assert measured is not None
    assert measured[0] == pytest.approx((stage_s, stage_s))
    assert measured[1] == pytest.approx((3 * stage_s, stage_s))
    healthy = healthy_stage_times(window, plan, Rates.of(dict(enumerate(rates))))
    assert healthy is not None
    assert healthy[1] == pytest.approx((stage_s, stage_s))


def test_a_stage_without_any_measurement_leaves_the_cost_unknown() -> None:
    plan = nominal_plan(
        num_layers=2,
        num_microbatches=2,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        data_parallel_size=1,
    )
    assert measured_stage_times([[sample(0)]], plan) is None
    assert measured_stage_times([[sample(0)], [sample(1)]], plan) is not None


def at_degrees(times_s: dict[int, tuple[int, float]], times: DegreeTimes) -> RateEstimate:
    """The estimate of GPUs given as GPU -> (TP degree, layer time)."""
    samples = [sample(gpu, time_s / LAYER_S) for gpu, (_, time_s) in times_s.items()]
    degrees = {gpu: degree for gpu, (degree, _) in times_s.items()}
    return estimate_rates([samples], degrees, times, threshold=1.2)


KNOWN = DegreeTimes(learned=((2, 0.02),))


def test_gpus_of_unlike_degrees_are_compared_with_their_own_kind() -> None:
    times = DegreeTimes(learned=((1, 0.036), (2, 0.02)))
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.036), 3: (1, 0.072)}, times)
    assert dict(found.rates) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0})
    assert found.stragglers == (3,)


def test_a_degree_with_stragglers_only_is_judged_by_what_is_expected() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.12)}, KNOWN)
    assert found.rates[2] == pytest.approx(3.0)
    assert not found.times.knows(1)
    prior = DegreeTimes(learned=((2, 0.02),), prior=((1, 0.15), (2, 0.1)))
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.12)}, prior)
    assert found.rates[2] == pytest.approx(4.0)


def test_a_guess_that_was_too_long_makes_nobody_slow_and_is_learned() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.024), 3: (1, 0.036)}, KNOWN)
    assert dict(found.rates) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5})
    assert found.times.expected_s(1) == pytest.approx(0.024)


def test_a_gpu_alone_at_its_degree_cannot_grow_slow_unseen() -> None:
    times, rate = DegreeTimes(learned=((1, 0.036), (2, 0.02))), 1.0
    for _ in range(20):
        rate *= 1.05
        found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.036 * rate)}, times)
        times = found.times
    assert found.rates[2] == pytest.approx(rate)
    assert found.stragglers == (2,)


def test_when_all_gpus_take_longer_the_learned_times_move_along() -> None:
    times = DegreeTimes(learned=((1, 0.036), (2, 0.02)))
    found = at_degrees({0: (2, 0.03), 1: (2, 0.03)}, times)
    assert found.stragglers == ()
    assert found.times.expected_s(1) == pytest.approx(0.054)


def test_all_gpus_of_the_common_degree_may_be_slow() -> None:
    times = DegreeTimes(learned=((1, 0.036), (2, 0.02)))
    found = at_degrees({0: (2, 0.04), 1: (2, 0.04), 2: (1, 0.036)}, times)
    assert dict(found.rates) == pytest.approx({0: 2.0, 1: 2.0, 2: 1.0})


def test_larger_groups_than_were_ever_seen_are_out_of_reach() -> None:
    assert [KNOWN.is_within_reach(degree) for degree in (1, 2, 4)] == [True, True, False]
    prior = replace(KNOWN, prior=((2, 0.1), (4, 0.06)))
    assert prior.is_within_reach(4)
    assert prior.expected_s(4) == pytest.approx(0.012)


def test_embedding_and_head_are_what_the_end_stages_take_beside_their_layers() -> None:
    plan = nominal_plan(
        num_layers=8,
        num_microbatches=4,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        data_parallel_size=1,
    )
    window = [[sample(0, 3.0, extra_s=LAYER_S / 2), sample(1, extra_s=LAYER_S)]]
    ends = measured_ends(window, plan, Ends())
    assert (ends.embedding_layers, ends.head_layers) == pytest.approx((0.5, 1.0))

    whole = nominal_plan(
        num_layers=4,
        num_microbatches=4,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
    )
    both = [[sample(0, extra_s=LAYER_S * 1.75)]]
    joined = measured_ends(both, whole, ends)
    assert (joined.embedding_layers, joined.head_layers) == pytest.approx((0.5, 1.25))
    assert measured_ends([], plan, ends) == ends
