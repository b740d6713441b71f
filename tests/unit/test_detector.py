"""Samples to rates: known rates are put into the samples and must come out."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.detector.degrees import DegreeTimes
from malleus_megatron.detector.ends import Ends, measured_ends
from malleus_megatron.detector.rates import Rating, Seen
from malleus_megatron.detector.reference import healthy_level
from malleus_megatron.detector.samples import Sample
from malleus_megatron.detector.shifts import Sensitivity
from malleus_megatron.detector.stages import measured_stage_times
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.nominal import nominal_plan

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


WANTED = Sensitivity(threshold=1.1, window=3, large_shift=1.75, patience=8, long_window=16)


def iteration(*rates: float) -> tuple[Sample, ...]:
    return tuple(sample(gpu, rate) for gpu, rate in enumerate(rates))


def rated(
    iterations: Iterable[Sequence[Sample]],
    degrees: dict[int, int],
    times: DegreeTimes | None = None,
    start: Rating | None = None,
) -> Rating:
    """What a detector knows after some iterations."""
    rating = start or Rating(times=times or DegreeTimes())
    for number, samples in enumerate(iterations, start=1):
        seen = Seen(iteration=number, samples=samples, degrees=degrees)
        rating = rating.after(seen, WANTED)
    return rating


def alike(num_gpus: int) -> dict[int, int]:
    """All GPUs at one TP degree."""
    return dict.fromkeys(range(num_gpus), 2)


def stragglers(rating: Rating) -> tuple[int, ...]:
    return tuple(gpu for gpu, track in rating.tracks.items() if track.named is not None)


def rate(rating: Rating, gpu: int) -> float:
    return math.exp(rating.tracks[gpu].level)


@given(
    healthy=st.lists(st.floats(0.97, 1.03), min_size=2, max_size=16),
    slow=st.data(),
    order=st.randoms(use_true_random=False),
)
def test_stragglers_and_their_rates_are_found_up_to_two_for_each_healthy_gpu(
    healthy: list[float], slow: st.DataObject, order: object
) -> None:
    number = 2 * len(healthy)
    rates = healthy + slow.draw(st.lists(st.floats(1.2, 12.0), max_size=number))
    order.shuffle(rates)  # type: ignore[attr-defined]
    found = rated([iteration(*rates)] * 8, alike(len(rates)))
    assert stragglers(found) == tuple(gpu for gpu, rate in enumerate(rates) if rate > 1.1)
    assert found.ignored == ()
    for gpu in range(len(rates)):
        assert rate(found, gpu) == pytest.approx(rates[gpu], rel=0.05)


def test_however_many_are_slow_unlike_ones_are_no_reference() -> None:
    found = rated([iteration(1, 1.4, 2, 3, 4, 5, 6, 7)] * 8, alike(8))
    assert stragglers(found) == (1, 2, 3, 4, 5, 6, 7)


def test_fewer_than_three_iterations_in_a_row_are_no_shift() -> None:
    quiet, noisy = iteration(1, 1, 1, 1), iteration(1, 1, 3, 1)
    rating = rated([quiet] * 10, alike(4))
    for window in ([quiet, noisy, quiet], [quiet, noisy, noisy], [noisy, noisy, quiet, noisy]):
        assert stragglers(rated(window, alike(4), start=rating)) == ()
    found = rated([noisy] * 3, alike(4), start=rating)
    assert stragglers(found) == (2,)
    assert (found.tracks[2].since, found.tracks[2].named) == (1, 3)


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
    assert stragglers(rated([compute] * 3, alike(4))) == (2,)


@pytest.mark.parametrize("bad_s", [math.nan, -0.01, math.inf, -math.inf])
def test_a_sample_that_is_no_time_is_ignored_and_named(bad_s: float) -> None:
    bad = replace(sample(1, 5.0), layer_forward_s=bad_s)
    found = rated([iteration(1, 2, 1)] * 3 + [(sample(0), bad, sample(2))], alike(3))
    assert found.ignored == (1,)
    assert stragglers(found) == (1,)
    assert rate(found, 1) == pytest.approx(2.0)


def test_a_zero_sample_and_a_missing_gpu_are_ignored_and_named() -> None:
    zero = replace(sample(1), layer_forward_s=0.0, layer_backward_s=0.0)
    found = rated([(sample(0), zero)], alike(3))
    assert found.ignored == (1, 2)
    assert list(found.tracks) == [0]


def test_nothing_measured_is_no_rate_and_no_layer_time() -> None:
    for window in ([], [()]):
        found = rated(window, alike(2))
        assert found.tracks == {}
        with pytest.raises(BadInputError, match="No GPU has timed a layer yet"):
            found.healthy_s(2, 3)
    assert rated([()], alike(2)).ignored == (0, 1)


def test_frozen_layers_have_no_backward_and_still_a_rate() -> None:
    frozen = [
        replace(sample(gpu, rate), layer_backward_s=0.0) for gpu, rate in enumerate((1.0, 2.0))
    ]
    assert rate(rated([frozen] * 3, alike(2)), 1) == pytest.approx(2.0)


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


def at_degrees(
    times_s: dict[int, tuple[int, float]],
    times: DegreeTimes | None = None,
    start: Rating | None = None,
    *,
    iterations: int = 12,
) -> Rating:
    """What is known of GPUs given as GPU -> (TP degree, layer time)."""
    samples = [sample(gpu, time_s / LAYER_S) for gpu, (_, time_s) in times_s.items()]
    degrees = {gpu: degree for gpu, (degree, _) in times_s.items()}
    return rated([samples] * iterations, degrees, times, start)


KNOWN = DegreeTimes(learned=((2, 0.02),))
BOTH = DegreeTimes(learned=((1, 0.036), (2, 0.02)))


def test_gpus_of_unlike_degrees_are_compared_with_their_own_kind() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.036), 3: (1, 0.072)}, BOTH)
    assert [rate(found, gpu) for gpu in range(4)] == pytest.approx([1.0, 1.0, 1.0, 2.0])
    assert stragglers(found) == (3,)


def test_a_degree_with_unknown_stragglers_only_is_judged_by_what_is_expected() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.12)}, KNOWN)
    assert rate(found, 2) == pytest.approx(3.0)
    assert found.times.expected_s(1) == pytest.approx(0.04)
    prior = DegreeTimes(prior=((1, 0.15), (2, 0.1)))
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.12)}, prior)
    assert rate(found, 2) == pytest.approx(4.0)


def test_a_straggler_whose_rate_is_known_teaches_its_new_degree() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (2, 0.06)}, KNOWN)
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.108)}, start=found)
    assert rate(found, 2) == pytest.approx(3.0)
    assert found.times.expected_s(1) == pytest.approx(0.036)
    assert found.times.provisional == {1}
    # A healthy GPU knows better, if the straggler's rate had changed in between.
    found = at_degrees({0: (2, 0.02), 1: (1, 0.04), 2: (1, 0.108)}, start=found)
    assert found.times.expected_s(1) == pytest.approx(0.04)
    assert found.times.provisional == frozenset()
    assert stragglers(found) == (2,)


def test_a_guess_that_was_too_long_makes_nobody_slow_and_is_learned() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.024), 3: (1, 0.036)}, KNOWN)
    assert [rate(found, gpu) for gpu in range(4)] == pytest.approx([1.0, 1.0, 1.0, 1.5])
    assert found.times.expected_s(1) == pytest.approx(0.024)


def test_a_gpu_alone_at_its_degree_cannot_grow_slow_unseen() -> None:
    found, slow = Rating(times=BOTH), 1.0
    for number in range(1, 41):
        slow *= 1.01
        seen = Seen(
            iteration=number,
            samples=[sample(0, 0.02 / LAYER_S), sample(1, 0.036 * slow / LAYER_S)],
            degrees={0: 2, 1: 1},
        )
        found = found.after(seen, WANTED)
    assert rate(found, 1) == pytest.approx(slow, rel=0.1)
    assert stragglers(found) == (1,)


def test_when_all_gpus_take_longer_their_rates_stay_and_the_job_has_one() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02)}, BOTH)
    assert found.common == pytest.approx(1.0)
    found = at_degrees({0: (2, 0.03), 1: (2, 0.03)}, start=found)
    assert stragglers(found) == ()
    assert found.common == pytest.approx(1.5)
    assert found.healthy_s(1, 3) == pytest.approx(0.054)


def test_all_gpus_of_the_common_degree_may_be_slow() -> None:
    found = at_degrees({0: (2, 0.02), 1: (2, 0.02), 2: (1, 0.036)}, BOTH)
    found = at_degrees({0: (2, 0.04), 1: (2, 0.04), 2: (1, 0.036)}, start=found)
    assert [rate(found, gpu) for gpu in range(3)] == pytest.approx([2.0, 2.0, 1.0])


def test_a_layout_of_new_degrees_only_goes_on_where_the_job_was() -> None:
    found = at_degrees({gpu: (2, 0.03 if gpu else 0.06) for gpu in range(4)}, KNOWN)
    found = at_degrees({gpu: (4, 0.018 if gpu else 0.036) for gpu in range(4)}, start=found)
    assert [rate(found, gpu) for gpu in range(4)] == pytest.approx([2.0, 1.0, 1.0, 1.0])
    assert found.healthy_s(4, 3) == pytest.approx(0.018)


def test_larger_groups_than_were_ever_seen_are_out_of_reach() -> None:
    assert [KNOWN.is_within_reach(degree) for degree in (1, 2, 4)] == [True, True, False]
    prior = DegreeTimes(prior=((2, 0.02), (4, 0.012)))
    assert prior.is_within_reach(4)
    assert prior.expected_s(4) == pytest.approx(0.012)


def test_a_degree_is_learned_between_no_gain_and_perfect_scaling() -> None:
    plausible = [time_s / 1000 for time_s in range(1, 100) if KNOWN.is_plausible(1, time_s / 1000)]
    assert (plausible[0], plausible[-1]) == (0.017, 0.048)
    plausible = [time_s / 1000 for time_s in range(1, 100) if KNOWN.is_plausible(4, time_s / 1000)]
    assert (plausible[0], plausible[-1]) == (0.009, 0.024)


@pytest.mark.parametrize(
    ("values", "usual", "level"),
    [
        ([0.0, 0.0, 0.0, 1.0], None, 0.0),
        ([0.0, 0.0, 1.0, 1.0], None, 0.0),
        ([0.0, 1.0, 1.0, 1.0], None, 1.0),  # one that is fast among four
        ([0.0, 1.0, 1.0, 1.0], 0.0, 0.0),  # three that became slow
        ([0.0, 1.0], None, 0.0),
        ([0.0, 0.5, 1.0, 2.0], None, 0.0),
        ([0.0, 0.0, 0.7, 0.7, 0.7, 0.7], None, 0.0),
        ([1.0] * 1000 + [0.0], 0.0, 1.0),  # one of a thousand decides nothing
        ([0.01, -0.01, 0.03, 0.9], None, 0.01),
    ],
)
def test_the_reference_has_the_most_plausible_exceptions(
    values: list[float], usual: float | None, level: float
) -> None:
    assert healthy_level(values, usual, 0.1) == pytest.approx(level)


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
