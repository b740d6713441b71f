"""Parts of the simulator: the trace, the clock, what a migration moves, plans without a planner."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.cost.validity import plan_faults
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.clock import StepClock, StepSettings
from malleus_megatron.simulator.grids import nominal_plan, templates_on, uniform_on
from malleus_megatron.simulator.limits import lost_throughput, proved_step_s
from malleus_megatron.simulator.states import MigrationSettings, StateMover, StateSizes
from malleus_megatron.simulator.trace import default_num_iterations, situations
from tests.harness.problems import problem, shared_problem

SMALL = problem_from_json(
    problem(
        [4, 4, 4],
        12,
        12,
        model={"layer_time_s": {"1": 2.0, "2": 1.1}},
        parallel={"tensor_parallel_sizes": [1, 2], "num_pipelines": 2},
    )
)

entries = st.builds(
    lambda gpu, rate, start, length: InjectedRate(
        gpu=gpu,
        rate=rate,
        from_iteration=start,
        to_iteration=None if length is None else start + length,
    ),
    st.integers(0, 3),
    st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    st.integers(1, 15),
    st.none() | st.integers(1, 9),
)


@given(st.lists(entries, max_size=6), st.integers(1, 20))
def test_situations_say_what_the_injection_says_of_every_iteration(
    entries: list[InjectedRate], num_iterations: int
) -> None:
    injection = Injection(entries=tuple(entries))
    trace = situations(injection, num_iterations)
    covered = [i for each in trace for i in range(each.from_iteration, each.to_iteration)]
    assert covered == list(range(1, num_iterations + 1))
    for each in trace:
        for iteration in range(each.from_iteration, each.to_iteration):
            for gpu in range(4):
                assert each.rates[gpu] == injection.rate_at(gpu, iteration)
    assert all(a.rates != b.rates for a, b in pairwise(trace))


def test_without_a_number_of_iterations_the_last_change_is_followed_for_a_while() -> None:
    entry = InjectedRate(gpu=0, rate=2.0, from_iteration=7, to_iteration=31)
    assert default_num_iterations(Injection(entries=(entry,))) == 80
    assert default_num_iterations(Injection()) == 50


def test_equal_stages_take_what_the_plan_predicts() -> None:
    clock = StepClock(SMALL, StepSettings())
    plan = nominal_plan(SMALL)
    predicted_s = plan_costs(replace(SMALL, rates=Rates()), plan).step_time_s
    assert clock.step_s(plan, Rates()) == pytest.approx(predicted_s, rel=1e-12)
    with_sum = StepClock(SMALL, StepSettings(gradient_sum_s=2.5))
    assert with_sum.step_s(plan, Rates()) == pytest.approx(predicted_s + 2.5, rel=1e-12)


@given(st.lists(st.floats(1.0, 8.0), min_size=12, max_size=12), st.integers(0, 11))
def test_the_step_is_monotone_in_the_rates(rates: list[float], gpu: int) -> None:
    clock = StepClock(SMALL, StepSettings(transfer_s=0.1))
    plan = nominal_plan(SMALL)
    before = dict(enumerate(rates))
    after = before | {gpu: before[gpu] * 1.5}
    assert clock.step_s(plan, Rates.of(after)) >= clock.step_s(plan, Rates.of(before)) - 1e-9


def test_rates_below_the_planners_floor_count() -> None:
    floored = replace(SMALL, rate_floor=1.2)
    plan = nominal_plan(floored)
    clock = StepClock(floored, StepSettings())
    healthy_s = clock.step_s(plan, Rates())
    everyone = Rates.of(dict.fromkeys(range(12), 1.1))
    assert clock.step_s(plan, everyone) == pytest.approx(1.1 * healthy_s)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StepSettings(forward_share=1.5),
        lambda: StepSettings(transfer_s=-1.0),
        lambda: StepSettings(gradient_sum_s=float("nan")),
        lambda: MigrationSettings(bytes_per_s=0.0),
        lambda: MigrationSettings(fixed_s=-1.0),
        lambda: StateSizes.of(SMALL, layer_mib=-1.0),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(BadInputError, match=r"1\.5|-1|gradient seconds|0\.0"):
        wrong()


def two_stages(first: int, *, gpus: tuple[int, int] = (0, 1), count: int = 4) -> Plan:
    stages = (
        Stage(gpus=gpus[:1], layers=(0, first)),
        Stage(gpus=gpus[1:], layers=(first, 8)),
    )
    pipeline = Pipeline(num_microbatches=count, stages=stages)
    spare = tuple(gpu for gpu in range(4) if gpu not in gpus)
    return Plan(num_layers=8, num_microbatches=count, pipelines=(pipeline,), standby=spare)


MOVER = StateMover(
    Cluster(gpus_per_node=(2, 2)),
    MigrationSettings(bytes_per_s=100.0, fixed_s=3.0),
    StateSizes(layer_bytes=1000, embedding_bytes=10, head_bytes=20),
)


def test_a_migration_takes_its_fixed_seconds_and_the_busiest_gpus_bytes() -> None:
    cost = MOVER.cost(two_stages(4), two_stages(6))
    assert cost.moved_bytes == 2000
    assert cost.seconds == pytest.approx(3.0 + 2000 / 100)


def test_a_gpu_that_takes_over_receives_all_of_its_part() -> None:
    cost = MOVER.cost(two_stages(4), two_stages(4, gpus=(0, 3)))
    assert cost.moved_bytes == 4 * 1000 + 20
    assert cost.seconds == pytest.approx(3.0 + 4020 / 100)


def test_other_counts_cost_nothing() -> None:
    one = Plan(
        num_layers=8,
        num_microbatches=6,
        pipelines=tuple(
            Pipeline(num_microbatches=3, stages=(Stage(gpus=(gpu,), layers=(0, 8)),))
            for gpu in range(2)
        ),
    )
    assert MOVER.cost(one, one.with_counts((1, 5))).seconds == 0.0


def test_a_larger_group_shares_what_one_gpu_had() -> None:
    alone = Plan(
        num_layers=8,
        num_microbatches=1,
        pipelines=(Pipeline(num_microbatches=1, stages=(Stage(gpus=(0,), layers=(0, 8)),)),),
        standby=(1, 2, 3),
    )
    stage = Stage(gpus=(0, 1), layers=(0, 8))
    shared = replace(
        alone, pipelines=(Pipeline(num_microbatches=1, stages=(stage,)),), standby=(2, 3)
    )
    assert MOVER.cost(alone, shared).moved_bytes == (8 * 1000 + 30) // 2
    assert MOVER.cost(shared, alone).moved_bytes == (8 * 1000 + 30) // 2


def test_sizes_of_states_come_from_the_memory_model_without_activations() -> None:
    sizes = StateSizes.of(problem_from_json(shared_problem("D")))
    assert sizes.layer_bytes == (1647 - (1769 - 1647)) * 8 * 2**20
    assert sizes.embedding_bytes == 600 * 8 * 2**20
    assert StateSizes.of(SMALL) == StateSizes()
    assert StateSizes.of(SMALL, layer_mib=3.0).layer_bytes == 3 * 2**20


@pytest.mark.parametrize("name", ["A1", "A3", "B", "Cx", "D", "E", "scale-1024-1"])
def test_every_shared_problem_has_a_valid_nominal_plan(name: str) -> None:
    asked = replace(problem_from_json(shared_problem(name)), rates=Rates())
    plan = nominal_plan(asked)
    assert plan_faults(asked, plan) == []
    degrees = {len(stage.gpus) for pipeline in plan.pipelines for stage in pipeline.stages}
    assert degrees == {max(asked.tensor_parallel_sizes)}
    assert sorted(plan.all_gpus()) == list(range(asked.cluster.num_gpus))


@pytest.mark.parametrize(("num_layers", "num_stages"), [(30, 4), (46, 4), (7, 2), (3, 5)])
def test_layers_that_do_not_divide_are_all_held_and_timed(num_layers: int, num_stages: int) -> None:
    asked = problem_from_json(problem([num_stages], num_layers, 10))
    plan = nominal_plan(asked)
    layers = [stage.num_layers for stage in plan.pipelines[0].stages]
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
    step_s = StepClock(asked, StepSettings()).step_s(plan, Rates())
    assert step_s >= 10 * max(layers)


def test_a_current_plan_is_the_nominal_one_and_one_that_cannot_run_is_refused() -> None:
    plan = nominal_plan(SMALL)
    counts = plan.with_counts((5, 7))
    assert nominal_plan(replace(SMALL, current_plan=counts)) == counts
    with pytest.raises(BadInputError, match="20 micro-batches; the problem has 12"):
        nominal_plan(replace(SMALL, current_plan=plan.with_counts((10, 10))))


def test_free_of_a_number_of_pipelines_the_fastest_uniform_plan_is_nominal() -> None:
    free = replace(SMALL, num_pipelines=None)
    best_s = plan_costs(free, nominal_plan(free)).step_time_s
    for number in (1, 2, 3, 6):
        fixed = replace(SMALL, num_pipelines=number)
        assert best_s <= plan_costs(fixed, nominal_plan(fixed)).step_time_s


def test_layouts_use_the_nodes_that_are_left_and_no_other() -> None:
    for plan in (uniform_on(SMALL, [0, 2]), templates_on(SMALL, [0, 2], 2)):
        assert plan is not None
        used = {gpu for pipeline in plan.pipelines for gpu in pipeline.gpus}
        assert used == {0, 1, 2, 3, 8, 9, 10, 11}
        assert plan.standby == (4, 5, 6, 7)
        assert plan_faults(replace(SMALL, num_pipelines=None), plan) == []
    assert uniform_on(SMALL, []) is None


def test_templates_of_unlike_length_get_micro_batches_by_their_speed() -> None:
    wide = problem_from_json(
        problem(
            [2] * 5,
            24,
            50,
            model={"layer_time_s": {"2": 1.0}},
            parallel={"tensor_parallel_sizes": [2], "num_pipelines": 2},
        )
    )
    plan = templates_on(wide, range(5), 2)
    assert plan is not None
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [3, 2]
    assert plan.microbatch_counts == (30, 20)


def test_throughput_that_is_lost_is_that_of_the_best_groups() -> None:
    assert lost_throughput(SMALL, Rates()) == 1.0
    slow = Rates.of({0: 2.0})
    healthy, now = 12 / 2.0, 11 / 2.0 + 1 / 4.0
    assert lost_throughput(SMALL, slow) == pytest.approx(healthy / now)


@given(st.lists(st.floats(1.0, 6.0), min_size=4, max_size=4))
def test_the_planners_proof_is_no_weaker_than_the_closed_form(rates: list[float]) -> None:
    small = problem_from_json(problem([4], 5, 7, parallel={"num_pipelines": 2}))
    given_rates = Rates.of(dict(enumerate(rates)))
    quick_s = proved_step_s(small, given_rates, thorough=False)
    assert 0 < quick_s <= proved_step_s(small, given_rates)
