"""Whole simulations: what each policy makes of a trace."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_megatron.control.policy import Policy
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.clock import StepClock, StepSettings
from malleus_megatron.simulator.grids import nominal_plan
from malleus_megatron.simulator.policies import (
    POLICIES,
    Settings,
    Simulation,
    World,
    simulate,
)
from malleus_megatron.simulator.replay import Run, replay
from malleus_megatron.simulator.states import MigrationSettings, StateSizes
from malleus_megatron.simulator.trace import situations
from tests.harness.problems import problem, shared_problem

STEERED = ("malleus", "stock", "rebalance", "equal-tp", "templates", "restart")
DETECTION = Policy().window + Policy().patience
"""Iterations from a large shift of a rate to the new layout: to name it, patience, the switch."""
SLACK = 1.02
"""The worst of 540 random jobs was 1.013: 1F1B hid a part of the fill that the closed form has."""


def job(nodes: tuple[int, ...] = (4, 4), num_layers: int = 8, pipelines: int | None = 2) -> Problem:
    return problem_from_json(
        problem(
            list(nodes),
            num_layers,
            16,
            model={"layer_time_s": {"1": 2.0, "2": 1.1, "4": 0.6}, "head_time_s": 0.3},
            parallel={"tensor_parallel_sizes": [1, 2], "num_pipelines": pipelines},
        )
    )


def slow(gpu: int, rate: float, start: int = 6, end: int | None = None) -> InjectedRate:
    return InjectedRate(gpu=gpu, rate=rate, from_iteration=start, to_iteration=end)


def played(
    asked: Problem,
    *entries: InjectedRate,
    num_iterations: int = 60,
    names: Iterable[str] = POLICIES,
    **changes: object,
) -> Simulation:
    return simulate(
        asked,
        Injection(entries=entries),
        num_iterations=num_iterations,
        names=names,
        settings=replace(Settings(), **changes),  # type: ignore[arg-type]
    )


def by_name(simulation: Simulation) -> dict[str, Run]:
    return {run.policy: run for run in simulation.runs}


def step_times(run: Run) -> list[float]:
    """Of every iteration, pauses left out."""
    return [
        span.step_time_s - span.pause_s
        for span in run.spans
        for _ in range(span.from_iteration, span.to_iteration)
    ]


def test_a_healthy_job_is_the_same_under_every_policy() -> None:
    simulation = played(job())
    for run in simulation.runs:
        assert run.changes == ()
        if run.policy != "bound":
            assert run.mean_step_s == pytest.approx(simulation.healthy_step_s)
            assert run.total_s == pytest.approx(60 * simulation.healthy_step_s)
    assert by_name(simulation)["bound"].total_s <= by_name(simulation)["stock"].total_s


def test_stock_takes_what_the_nominal_plan_takes_at_the_rates_of_each_iteration() -> None:
    asked = job()
    (run,) = played(asked, slow(1, 3.0, 6, 20), slow(6, 2.0, 15), names=["stock"]).runs
    clock, plan = StepClock(asked, StepSettings()), nominal_plan(asked)
    injection = Injection(entries=(slow(1, 3.0, 6, 20), slow(6, 2.0, 15)))
    for iteration, time_s in enumerate(step_times(run), start=1):
        rates = Rates.of({gpu: injection.rate_at(gpu, iteration) for gpu in range(8)})
        assert time_s == pytest.approx(clock.step_s(plan, rates))


def test_malleus_moves_around_a_straggler_and_back_when_it_recovers() -> None:
    simulation = played(job(), slow(1, 4.0, 6, 60), num_iterations=120)
    run = by_name(simulation)["malleus"]
    assert run.changes[0].iteration == 6 + DETECTION
    times_s = step_times(run)
    healthy_s = simulation.healthy_step_s
    assert times_s[:5] == pytest.approx([healthy_s] * 5)
    assert times_s[6] > 2 * healthy_s
    assert times_s[40] < 1.35 * healthy_s
    assert times_s[-1] == pytest.approx(healthy_s)
    assert run.changes[-1].plan.same_layout(nominal_plan(job()))
    assert run.total_s < by_name(simulation)["stock"].total_s


def test_a_gpu_that_is_faster_than_the_others_moves_nothing() -> None:
    simulation = played(job(), slow(1, 0.8, 1), num_iterations=100, names=["malleus"])
    assert simulation.runs[0].changes == ()


@pytest.mark.parametrize("rate", [1.2, 1.3])
def test_a_small_rate_is_planned_for(rate: float) -> None:
    simulation = played(job(), slow(1, rate), num_iterations=60, names=["malleus"])
    (change,) = simulation.runs[0].changes
    assert change.plan.predicted is not None
    assert change.plan.predicted.step_time_s == pytest.approx(
        step_times(simulation.runs[0])[-1], rel=SLACK - 1
    )


def test_a_standby_gpu_is_probed_and_taken_back() -> None:
    simulation = played(job(), slow(1, 30.0, 6, 60), num_iterations=120, names=["malleus"])
    (run,) = simulation.runs
    assert any(1 in change.plan.standby for change in run.changes)
    assert run.changes[-1].plan.standby == ()
    assert run.changes[-1].iteration > 60


@settings(max_examples=15)
@given(
    st.dictionaries(st.integers(0, 7), st.floats(1.0, 12.0), max_size=4),
    st.sampled_from([(4, 4), (2, 2, 2, 2)]),
)
def test_under_lasting_stragglers_no_controlled_policy_loses_more_than_its_migrations(
    rates: dict[int, float], nodes: tuple[int, ...]
) -> None:
    """And none is below the bound.

    Plans are chosen by the closed form, without stragglers below the threshold: `SLACK`.
    """
    simulation = played(
        job(nodes),
        *(slow(gpu, rate) for gpu, rate in rates.items()),
        names=["malleus", "equal-tp", "rebalance", "stock", "bound"],
        migration=MigrationSettings(fixed_s=1.0),
    )
    runs = by_name(simulation)
    for name in ("malleus", "equal-tp", "rebalance"):
        assert runs[name].total_s <= runs["stock"].total_s * SLACK + runs[name].pauses_s
    floor_s = step_times(runs["bound"])
    for run in simulation.runs:
        pairs = zip(step_times(run), floor_s, strict=True)
        assert all(time_s >= bound_s * (1 - 1e-9) for time_s, bound_s in pairs)


def test_only_micro_batches_move_under_rebalance_and_no_degree_under_equal_tp() -> None:
    runs = by_name(played(job(), slow(1, 4.0), names=["rebalance", "equal-tp", "malleus"]))
    nominal = nominal_plan(job())
    assert runs["rebalance"].changes
    for change in runs["rebalance"].changes:
        assert change.plan.same_layout(nominal)
        assert change.pause_s == 0.0
    assert runs["equal-tp"].changes
    for change in runs["equal-tp"].changes:
        stages = [stage for pipeline in change.plan.pipelines for stage in pipeline.stages]
        assert {len(stage.gpus) for stage in stages} == {2}
    assert runs["malleus"].total_s < runs["equal-tp"].total_s < runs["rebalance"].total_s


@pytest.mark.parametrize("name", ["restart", "templates"])
def test_a_node_with_a_bad_straggler_is_given_up_and_taken_back(name: str) -> None:
    simulation = played(
        job((2, 2, 2, 2)),
        slow(2, 8.0, 6, 40),
        names=["stock", name],
        restart_s=17.0,
        migration=MigrationSettings(fixed_s=5.0),
    )
    run = by_name(simulation)[name]
    away, back = run.changes
    assert (away.iteration, back.iteration) == (6 + DETECTION, 40 + DETECTION)
    assert away.plan.standby == (2, 3)
    assert back.plan == nominal_plan(job((2, 2, 2, 2)))
    assert [change.pause_s for change in run.changes] == [17.0 if name == "restart" else 5.0] * 2
    assert run.pauses_s == sum(span.pause_s for span in run.spans)
    assert run.total_s < by_name(simulation)["stock"].total_s


def test_a_node_is_kept_where_giving_it_up_costs_more() -> None:
    simulation = played(job(), slow(2, 1.3), names=["restart", "templates"])
    assert [run.changes for run in simulation.runs] == [(), ()]


@pytest.mark.parametrize("name", STEERED)
def test_leaving_out_iterations_in_which_nothing_can_happen_changes_nothing(name: str) -> None:
    class Awake:
        """A job that is never said to be settled."""

        def __init__(self, inner) -> None:
            self.inner = inner

        is_settled = False

        @property
        def plan(self):
            return self.inner.plan

        def after(self, iteration, rates):
            return self.inner.after(iteration, rates)

    trace = situations(
        Injection(entries=(slow(1, 4.0, 6, 70), slow(5, 1.4, 80, 140), slow(7, 9.0, 90, 95))), 220
    )
    world = World(job(), Settings())
    quick = replay(name, world.job(name), trace, world.clock.step_s)
    slowly = replay(name, Awake(world.job(name)), trace, world.clock.step_s)
    assert quick == slowly


def test_equal_input_gives_equal_results() -> None:
    entries = (slow(1, 4.0, 6, 30), slow(5, 2.0, 20))
    assert played(job(), *entries) == played(job(), *entries)


def test_spans_cover_every_iteration_once_and_add_up() -> None:
    simulation = played(job(), slow(1, 4.0, 6, 30), slow(5, 2.0, 20))
    for run in simulation.runs:
        assert run.spans[0].from_iteration == 1
        assert run.spans[-1].to_iteration == 61
        assert all(a.to_iteration == b.from_iteration for a, b in pairwise(run.spans))
        assert run.total_s == pytest.approx(sum(step_times(run)) + run.pauses_s)


def test_migrations_cost_what_their_bytes_and_seconds_are_set_to() -> None:
    free, dear = (
        played(
            job(),
            slow(1, 4.0),
            names=["malleus"],
            states=StateSizes(layer_bytes=10**9),
            migration=MigrationSettings(fixed_s=fixed_s, bytes_per_s=rate),
        ).runs[0]
        for fixed_s, rate in ((0.0, 1e18), (4.0, 1e9))
    )
    assert [c.plan for c in free.changes] == [c.plan for c in dear.changes]
    moves = [change for change in dear.changes if change.moved_bytes]
    assert moves
    assert all(change.pause_s > 4.0 for change in moves)
    assert free.pauses_s == pytest.approx(0.0, abs=1e-6)


def test_the_slowest_gpu_sets_the_capacity_line_by_what_it_lacks() -> None:
    simulation = played(job(), slow(1, 2.0, 1), names=["capacity"], num_iterations=1)
    healthy, now = 8 / 2.0, 7 / 2.0 + 1 / 4.0
    assert simulation.runs[0].total_s == pytest.approx(simulation.healthy_step_s * healthy / now)


@pytest.mark.parametrize("name", ["A1", "A3", "B", "D1"])
def test_on_shared_problems_malleus_beats_every_other_policy(name: str) -> None:
    """Rates below the planner's floor are left out, as the problem says."""
    document = shared_problem(name)
    asked = problem_from_json(document)
    rates = {int(gpu): rate for gpu, rate in document["rates"].items()}
    entries = [slow(gpu, rate, 11) for gpu, rate in rates.items() if rate >= asked.rate_floor]
    simulation = played(asked, *entries, names=[*STEERED, "bound"], num_iterations=200)
    totals = {run.policy: run.total_s for run in simulation.runs}
    assert sorted(totals, key=totals.__getitem__)[:2] == ["bound", "malleus"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"names": ["malleus", "oracle"]}, "'oracle' is unknown; known: malleus, stock"),
        ({"names": []}, "No policy"),
        ({"num_iterations": 0}, "iterations: 0"),
        ({"restart_s": -3.0}, "restart seconds: -3"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_numbers(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        played(job(), slow(1, 2.0), **changes)  # type: ignore[arg-type]


def test_a_trace_of_another_cluster_is_refused() -> None:
    with pytest.raises(BadInputError, match="names GPU 8; the job has 8 GPUs"):
        played(job(), slow(8, 2.0))
