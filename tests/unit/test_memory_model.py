"""The memory model of a job: what is fitted is never below what was seen, and grows with it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_megatron.control.memory import JobMemory, MemoryLimit
from malleus_megatron.control.memory_model import (
    GpuMemory,
    MeasuredPlan,
    ModelSizes,
    fitted_model,
    static_model,
)
from malleus_megatron.cost.memory import StageMib, plan_memory_mib
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import ModelMemory
from malleus_megatron.plan.render import in_mib
from tests.harness.plans import plan_of, plans

SIZES = ModelSizes(
    layer_mib=40.0,
    embedding_mib=30.0,
    head_mib=20.0,
    layer_shared_mib=24.0,
    layer_update_mib=2.0,
    embedding_shared_mib=18.0,
    head_shared_mib=12.0,
    replicated_mib=2.0,
)


def used(
    plan: Plan, *, sharing: int, activation: float = 3.0, working: float = 5.0, outside: float = 7.0
) -> MeasuredPlan:
    """What GPUs of a job of these sizes would measure, if the model were the truth."""
    truth = replace(
        static_model(SIZES),
        layer_update_mib=0.0,
    )
    held = plan_memory_mib(truth, plan, sharing=sharing)
    gpus = [GpuMemory.of([outside, outside, 0.0, 0.0, 0.0])] * len(list(plan.all_gpus()))
    for pipeline, sizes in zip(plan.pipelines, held, strict=True):
        count = len(pipeline.stages)
        for index, (stage, held_mib) in enumerate(zip(pipeline.stages, sizes, strict=True)):
            tp_degree, layers = len(stage.gpus), stage.num_layers
            saved = layers * (activation / tp_degree + SIZES.replicated_mib)
            head = 11.0 / tp_degree * (index == count - 1)
            inflight = min(count - index, pipeline.num_microbatches)
            peak = outside + held_mib + inflight * saved + head + working / tp_degree
            for gpu in stage.gpus:
                gpus[gpu] = GpuMemory.of([peak, outside, held_mib, saved, head])
    return MeasuredPlan(plan=plan, gpus=tuple(gpus), sharing=sharing)


NOMINAL = plan_of((8, [((0, 1), 4), ((2, 3), 4)]), (8, [((4, 5), 4), ((6, 7), 4)]))
OTHER = plan_of((8, [((0,), 2), ((1, 2, 3), 6)]), (8, [((4, 5, 6, 7), 8)]))


def test_what_one_plan_shows_predicts_another() -> None:
    """Where the model is the truth: exactly, at other degrees too."""
    measured = used(NOMINAL, sharing=2)
    model = fitted_model(SIZES, [measured])
    assert_same(plan_memory_mib(model, NOMINAL), measured.peaks_mib())
    longer = plan_of((8, [((0, 1), 1), ((2, 3), 7)]), (8, [((4, 5), 6), ((6, 7), 2)]))
    assert_same(plan_memory_mib(model, longer), used(longer, sharing=2).peaks_mib())
    assert_same(plan_memory_mib(model, OTHER), used(OTHER, sharing=2).peaks_mib())


def assert_same(said: StageMib, true: StageMib) -> None:
    assert [pytest.approx(pipeline) for pipeline in true] == list(said)


def test_state_that_the_recipe_keeps_whole_is_shared_under_plans() -> None:
    """A recipe without the distributed optimizer says nothing wrong of plans."""
    whole = used(NOMINAL, sharing=1)
    model = fitted_model(SIZES, [whole])
    assert_same(plan_memory_mib(model, OTHER), used(OTHER, sharing=2).peaks_mib())
    assert_same(plan_memory_mib(model, NOMINAL, sharing=1), whole.peaks_mib())


def test_fewer_pipelines_hold_larger_shares() -> None:
    model = fitted_model(SIZES, [used(NOMINAL, sharing=2)])
    one = plan_of((8, [((0, 1), 4), ((2, 3), 4)]))
    (first, _), _ = plan_memory_mib(model, NOMINAL)
    ((alone, _),) = plan_memory_mib(model, one)
    state = (4 * SIZES.layer_shared_mib + SIZES.embedding_shared_mib) / 2
    assert alone - first == pytest.approx(state / 2)


def test_the_update_counts_where_activations_are_fewer() -> None:
    memory = ModelMemory(
        reference_tp=1, layer_mib_by_inflight=(12.0, 14.0), layer_shared_mib=6.0, layer_update_mib=9
    )
    alone, among_two = memory.among(1), memory.among(2)
    assert [alone.layer_mib(count) for count in range(1, 7)] == [25.0, 25.0, 25.0, 25.0, 26.0, 28.0]
    assert [among_two.layer_mib(count) for count in range(1, 5)] == [17.5, 17.5, 19.0, 21.0]
    still = replace(memory, layer_mib_by_inflight=(12.0,)).among(1)
    assert still.layer_mib(1) == still.layer_mib(9) == 12.0 + 9.0 + 6.0


sizes_mib = st.floats(0, 1e4)


@st.composite
def measurements(draw: st.DrawFn) -> list[MeasuredPlan]:
    """Anything that ranks could say, under any plans."""
    found = []
    for plan in draw(st.lists(plans(), min_size=1, max_size=3)):
        gpus = []
        for _ in plan.all_gpus():
            outside, held, saved, head, more = (draw(sizes_mib) for _ in range(5))
            gpus.append(GpuMemory.of([outside + held + more, outside, held, saved, head]))
        sharing = draw(st.sampled_from([1, len(plan.pipelines)]))
        found.append(MeasuredPlan(plan=plan, gpus=tuple(gpus), sharing=sharing))
    return found


def below(said: float, seen: float) -> bool:
    return said < seen - 1e-6 * max(1.0, seen)


@settings(max_examples=40, deadline=None)
@given(measurements())
def test_the_model_is_never_below_what_it_was_fitted_on(measured: list[MeasuredPlan]) -> None:
    model = fitted_model(SIZES, measured)
    for one in measured:
        said = plan_memory_mib(model, one.plan, sharing=one.sharing)
        for needs, peaks in zip(said, one.peaks_mib(), strict=True):
            assert not any(below(*pair) for pair in zip(needs, peaks, strict=True))


@settings(max_examples=40, deadline=None)
@given(measurements(), plans(), sizes_mib)
def test_what_lies_outside_of_the_job_counts_on_every_gpu(
    measured: list[MeasuredPlan], plan: Plan, more: float
) -> None:
    raised = [
        replace(
            one,
            gpus=tuple(
                replace(used, peak_mib=used.peak_mib + more, outside_mib=used.outside_mib + more)
                for used in one.gpus
            ),
        )
        for one in measured
    ]
    before, after = (fitted_model(SIZES, seen) for seen in (measured, raised))
    for old, new in zip(plan_memory_mib(before, plan), plan_memory_mib(after, plan), strict=True):
        assert new == pytest.approx([need + more for need in old], rel=1e-6, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(measurements(), st.integers(1, 12), st.integers(1, 12), st.integers(1, 8))
def test_more_layers_more_micro_batches_fewer_gpus_need_more(
    measured: list[MeasuredPlan], layers: int, counts: int, degree: int
) -> None:
    model = fitted_model(SIZES, measured)

    def need(layers: int, counts: int, degree: int) -> float:
        gpus = tuple(range(degree))
        plan = plan_of((counts, [(gpus, layers), ((90,), 1), ((91,), 1)]))
        return plan_memory_mib(model, plan)[0][0]

    least = need(layers, counts, degree)
    assert not below(need(layers + 1, counts, degree), least)
    assert not below(need(layers, counts + 1, degree), least)
    assert not below(least, need(layers, counts, degree + 1))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([math.nan, 0, 0, 0, 0], "Memory of GPU 1: peak_mib nan; need 0 to"),
        ([math.inf, 0, 0, 0, 0], "peak_mib inf"),
        ([10, 0, 5, -1, 0], "saved_mib -1"),
        ([10, 4, 7, 0, 0], "a peak of 10.0 MiB, but 11.0 MiB are in use all the time"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(numbers: list[float], said: str) -> None:
    memory = job_memory(1000.0)
    good = used(NOMINAL, sharing=2).gpus
    memory.learn(NOMINAL, good)
    before = memory.model
    with pytest.raises(BadInputError, match=said):
        memory.learn(NOMINAL, (good[0], GpuMemory.of(numbers), *good[2:]))
    assert memory.model == before


def test_memory_of_another_number_of_gpus_is_refused() -> None:
    with pytest.raises(BadInputError, match="Memory of 7 GPUs; the plan has 8"):
        job_memory(1000.0).learn(NOMINAL, used(NOMINAL, sharing=2).gpus[1:])


def job_memory(memory_mib: float, reserve_mib: float = 0.0) -> JobMemory:
    limit = MemoryLimit(memory_mib=memory_mib, reserve_mib=reserve_mib, source="--malleus-memory")
    return JobMemory(SIZES, limit, NOMINAL, nominal_shares=True)


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers() -> None:
    memory = job_memory(400.0, reserve_mib=20.0)
    memory.check(OTHER)
    heavy = plan_of((8, [((0,), 7), ((1,), 1)]), (8, [((2,), 4), ((3, 4, 5, 6, 7), 4)]))
    with pytest.raises(BadInputError) as static:
        memory.check(heavy)
    assert str(static.value).startswith(
        "The plan does not fit into 400 MiB less 20 MiB kept free (--malleus-memory). Pipeline 0, "
        "stage 0: 7 layers on 1 GPUs [0] need 410 MiB a GPU; 380 MiB may be used. Activations, "
        "not measured yet, come on top."
    )
    memory.learn(NOMINAL, used(NOMINAL, sharing=2).gpus)
    with pytest.raises(
        BadInputError, match=r"\[0\] need 485 MiB a GPU; 380 MiB may be used\. Give"
    ):
        memory.check(heavy)


def test_limits_are_told_with_the_digits_that_were_given() -> None:
    with pytest.raises(BadInputError, match=r"into 1\.5 MiB .* need 510 MiB a GPU; 1\.5 MiB may"):
        job_memory(1.5).check(plan_of((8, [((0,), 7), ((1,), 1)])))
    assert job_memory(1.5).less_words() == "1.35 MiB, say; now 1.5 MiB (--malleus-memory)"
    assert in_mib(81251.94) == "81251.9"
    assert in_mib(1234567.8) == "1234568"


def test_the_recipe_itself_is_never_refused() -> None:
    memory = job_memory(10.0)
    gpus = used(NOMINAL, sharing=2).gpus
    memory.learn(NOMINAL, gpus)
    memory.check(NOMINAL)
    peak = max(one.peak_mib for one in gpus)
    said = memory.overfull(gpus)
    assert said is not None
    assert f"used {peak:.6g} MiB" in said
    assert job_memory(peak + 1).overfull(gpus) is None


def test_small_changes_are_no_news() -> None:
    memory = job_memory(1000.0)
    assert memory.learn(NOMINAL, used(NOMINAL, sharing=2).gpus)
    assert not memory.learn(NOMINAL, used(NOMINAL, sharing=2, activation=3.01).gpus)
    assert memory.learn(NOMINAL, used(NOMINAL, sharing=2, activation=4.0).gpus)
