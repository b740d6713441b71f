"""Level reshape against a simulated job: true rates and layer times are known, and plans move."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.controller import Controller
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, Freedom, JobDescription, Observation
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError, InfeasiblePlanError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.degrees import ModelWidths, check_degrees
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Pipeline, Plan, Stage, check_world
from malleus_megatron.plan.problem import ModelMemory, Problem
from malleus_megatron.planner.search import make_plan

LAYER_S = {1: 0.036, 2: 0.02, 4: 0.012, 8: 0.008}
"""A healthy GPU's layer; smaller groups take less than perfect scaling says."""
EMBEDDING, HEAD = 0.2, 0.6
"""In layers."""
WIDTHS = ModelWidths(
    num_attention_heads=4, num_query_groups=4, ffn_hidden_size=64, padded_vocab_size=128
)


def grid(dp: int = 1, *, pp: int = 2, tp: int = 2) -> Plan:
    return nominal_plan(
        num_layers=8,
        num_microbatches=8 * dp,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )


def freedom(num_gpus: int, *, sizes: tuple[int, ...] = (1, 2, 4)) -> Freedom:
    return Freedom(cluster=Cluster(gpus_per_node=(num_gpus,)), tensor_parallel_sizes=sizes)


@dataclass
class SimulatedJob:
    """Runs iterations under its layout; takes an offer one iteration late and says so."""

    nominal: Plan
    level: Level = Level.reshape
    policy: Policy = field(default_factory=Policy)
    noise: Callable[[], float] = lambda: 1.0
    probes_standby: bool = True
    takes_offers: bool = True
    sizes: tuple[int, ...] = (1, 2, 4)
    switch_s: float | None = None
    layer_s: dict[int, float] = field(default_factory=lambda: dict(LAYER_S))
    make: Callable[[Problem], Plan] = make_plan
    plannings: int = field(init=False, default=0)
    plan: Plan = field(init=False)
    decisions: list[Decision] = field(init=False, default_factory=list)
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.nominal
        num_gpus = len(list(self.nominal.all_gpus()))
        self.job = JobDescription(
            nominal=self.nominal,
            level=self.level,
            freedom=freedom(num_gpus, sizes=self.sizes),
            switch_s=self.switch_s,
        )
        self.controller = Controller(
            self.job, self.policy, clock=lambda: 0.0, make=self._counting_make
        )

    def _counting_make(self, problem: Problem) -> Plan:
        self.plannings += 1
        return self.make(problem)

    @property
    def offers(self) -> list[Plan]:
        return [decision.offer for decision in self.decisions if decision.offer is not None]

    def run(self, iterations: int, rates: dict[int, float] | None = None) -> Decision:
        """Train with these rates and return what the last iteration showed."""
        for _ in range(iterations):
            waiting = self.decisions[-1].offer if self.decisions else None
            self.decisions.append(self.controller.observe(self.observation(rates or {})))
            if waiting is not None and self.takes_offers:
                self.switch(waiting)
        return self.decisions[-1]

    def switch(self, plan: Plan) -> None:
        self.plan = plan
        self.controller.relaid(replace(self.job, present=plan))

    def observation(self, rates: dict[int, float]) -> Observation:
        samples = []
        for pipeline in self.plan.pipelines:
            for index, stage in enumerate(pipeline.stages):
                ends = EMBEDDING * (index == 0) + HEAD * (stage is pipeline.stages[-1])
                for gpu in stage.gpus if stage.num_layers else ():  # else the clock times nothing
                    layer_s = self.layer_s[len(stage.gpus)] * rates.get(gpu, 1.0) * self.noise()
                    samples.append(self.sample(gpu, layer_s, stage.num_layers, ends))
        probes = [(gpu, rates.get(gpu, 1.0)) for gpu in self.plan.standby]
        return Observation(
            iteration=len(self.decisions) + 1,
            generation=len(self.offers),
            plan_id=plan_id(self.plan),
            microbatch_counts=self.plan.microbatch_counts,
            samples=tuple(samples),
            probes=tuple(probes) if self.probes_standby else (),
        )

    def sample(self, gpu: int, layer_s: float, num_layers: int, ends: float) -> Sample:
        stage_s = layer_s * (num_layers + ends)
        return Sample(
            gpu=gpu,
            iteration=len(self.decisions) + 1,
            layer_forward_s=layer_s / 3,
            layer_backward_s=layer_s * 2 / 3,
            stage_forward_s=stage_s / 3,
            stage_backward_s=stage_s * 2 / 3,
            num_layers=num_layers,
            num_microbatches=4,
        )

    def true_step_s(self, plan: Plan, rates: dict[int, float]) -> float:
        """What an iteration under the plan really takes."""
        return step_time_s(
            [
                [
                    self.layer_s[len(stage.gpus)]
                    * max(rates.get(gpu, 1.0) for gpu in stage.gpus)
                    * (
                        stage.num_layers
                        + EMBEDDING * (index == 0)
                        + HEAD * (stage is pipeline.stages[-1])
                    )
                    for index, stage in enumerate(pipeline.stages)
                ]
                for pipeline in plan.pipelines
            ],
            plan.microbatch_counts,
        )


def standing(plan: Plan, gpu: int) -> tuple[int, int]:
    """TP degree and layers of a GPU; zeros on standby."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if gpu in stage.gpus:
                return len(stage.gpus), stage.num_layers
    return 0, 0


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_straggler_in_a_tp_group_is_cut_out_or_lightened(dp: int, slow: int) -> None:
    job = SimulatedJob(grid(dp))
    rates = {slow: 3.0}
    job.run(5)
    assert job.offers == []
    before_s = job.true_step_s(job.nominal, rates)
    job.run(30, rates)

    policy = Policy()
    first = next(decision for decision in job.decisions if decision.offer is not None)
    assert first.iteration == 5 + 2 + max(policy.patience, policy.window) - 1
    offer = first.offer
    assert offer is not None
    check_world(offer, 4 * dp)
    check_degrees(offer, WIDTHS)
    assert len(offer.pipelines) == dp
    assert all(
        list(stage.gpus) == sorted(stage.gpus) for p in offer.pipelines for stage in p.stages
    )
    degree, layers = standing(offer, slow)
    assert degree < 2
    assert layers < 4
    assert offer.predicted is not None
    assert offer.predicted.step_time_s is not None
    assert offer.predicted.step_time_s < 0.75 * before_s
    assert offer.predicted.step_time_s == pytest.approx(job.true_step_s(offer, rates), rel=0.1)
    assert offer.predicted.healthy_step_time_s == pytest.approx(
        job.true_step_s(job.nominal, {}), rel=0.01
    )
    assert "taken" in str(job.controller.offers.last_outcome)


def test_a_switch_must_save_within_the_horizon_what_it_takes() -> None:
    rates = {1: 3.0}
    free = SimulatedJob(grid(), switch_s=0.0)
    free.run(30, rates)
    first = free.offers[0]
    saved_s = free.true_step_s(free.nominal, rates) - free.true_step_s(first, rates)
    horizon = free.policy.horizon
    cheap = SimulatedJob(grid(), switch_s=0.8 * saved_s * horizon)
    cheap.run(30, rates)
    dear = SimulatedJob(grid(), switch_s=1.2 * saved_s * horizon)
    dear.run(60, rates)
    assert cheap.offers[0].same_layout(first)
    assert dear.offers == []
    patient = SimulatedJob(
        grid(), switch_s=1.2 * saved_s * horizon, policy=Policy(horizon=2 * horizon)
    )
    patient.run(30, rates)
    assert patient.offers[0].same_layout(first)


def test_where_moving_state_does_not_pay_micro_batches_move() -> None:
    job = SimulatedJob(grid(2), switch_s=1e6)
    job.run(40, {0: 3.0})
    assert job.offers
    assert all(offer.same_layout(job.nominal) for offer in job.offers)
    assert job.offers[-1].microbatch_counts[0] < job.offers[-1].microbatch_counts[1]
    job.run(60)
    assert job.offers[-1] == replace(
        job.nominal, predicted=job.offers[-1].predicted, planning=job.offers[-1].planning
    )


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("rate", [1.5, 2.0, 3.0, 10.0])
def test_under_the_new_layout_nothing_more_is_offered(dp: int, rate: float) -> None:
    job = SimulatedJob(grid(dp))
    job.run(60, {1: rate})
    assert job.offers
    seen = len(job.offers)
    assert seen <= 2
    job.run(100, {1: rate})
    assert len(job.offers) == seen
    assert job.decisions[-1].stragglers == (1,)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("rate", [1.5, 3.0])
def test_a_gpu_that_recovers_brings_the_nominal_plan_back(dp: int, rate: float) -> None:
    job = SimulatedJob(grid(dp))
    job.run(40, {1: rate})
    assert job.plan != job.nominal
    job.run(30)
    assert job.plan == job.nominal
    assert job.decisions[-1].stragglers == ()
    seen = len(job.offers)
    job.run(60)
    assert len(job.offers) == seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dp", [1, 2])
def test_noise_moves_nothing(dp: int, seed: int) -> None:
    draw = random.Random(seed)
    job = SimulatedJob(grid(dp), noise=lambda: draw.uniform(0.9, 1.1))
    job.run(200)
    assert job.offers == []
    assert job.plannings == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dp", [1, 2])
def test_with_noise_a_straggler_is_settled_in_two_moves_at_most(dp: int, seed: int) -> None:
    draw = random.Random(seed)
    job = SimulatedJob(grid(dp), noise=lambda: draw.uniform(0.95, 1.05))
    job.run(200, {2: 3.0})
    assert 1 <= len(job.offers) <= 2
    predicted = job.offers[-1].predicted
    assert predicted is not None
    assert predicted.step_time_s == pytest.approx(job.true_step_s(job.plan, {2: 3.0}), rel=0.1)


def test_a_standby_gpu_keeps_its_rate_until_a_probe_says_otherwise() -> None:
    job = SimulatedJob(grid(), probes_standby=False)
    job.run(20, {1: 12.0})
    assert job.plan.standby == (1,)
    last = job.run(30)
    assert last.rates[1] == pytest.approx(12.0)
    assert last.stragglers == (1,)
    assert last.ignored == ()
    assert job.plan.standby == (1,)
    job.probes_standby = True
    job.run(30)
    assert job.plan == job.nominal


def test_rates_and_stragglers_are_known_while_the_window_fills_anew() -> None:
    job = SimulatedJob(grid())
    job.run(6, {1: 12.0})
    switched = len(job.decisions)
    while not job.plan.standby:
        job.run(1, {1: 12.0})
        switched = len(job.decisions)
    first = job.run(1, {1: 12.0})
    assert len(job.decisions) == switched + 1
    assert first.stragglers == (1,)
    assert first.rates[1] == pytest.approx(12.0)
    assert first.step_time_s is None


def test_the_planner_is_asked_only_when_something_has_moved() -> None:
    job = SimulatedJob(grid(), layer_s=LAYER_S | {1: 2 * LAYER_S[2]})
    job.run(10)
    assert job.plannings == 0
    job.run(30, {1: 1.5})
    assert job.plannings == 1
    job.run(20, {1: 1.6})
    assert job.plannings == 1
    job.run(20, {1: 4.0})
    assert job.plannings == 2


def test_another_batch_size_is_planned_anew() -> None:
    job = SimulatedJob(grid(2), takes_offers=False)
    job.run(4, {1: 3.0})
    job.plan = job.plan.with_counts((16, 16))
    job.run(10, {1: 3.0})
    assert job.plannings == 2
    assert job.offers[-1].num_microbatches == 32


def test_with_known_layer_times_the_first_plan_is_right() -> None:
    prior = tuple((degree, 3 * time_s) for degree, time_s in sorted(LAYER_S.items()))
    job = SimulatedJob(grid())
    job.job = replace(job.job, freedom=replace(freedom(4), layer_time_s=prior))
    job.controller = Controller(job.job, job.policy, clock=lambda: 0.0)
    job.run(60, {1: 3.0})
    (offer,) = job.offers
    assert offer.predicted is not None
    assert offer.predicted.step_time_s == pytest.approx(job.true_step_s(offer, {1: 3.0}))


def test_a_planner_without_a_plan_gives_a_reason_and_micro_batches_still_move() -> None:
    def fails(problem: Problem) -> Plan:
        raise InfeasiblePlanError(f"{problem.num_pipelines} pipelines do not fit.")

    job = SimulatedJob(grid(2), make=fails)
    last = job.run(30, {0: 3.0})
    assert "There is no plan of another layout: None pipelines do not fit." in last.warning
    assert job.plannings == 2  # with as many pipelines as the recipe, then with any number
    (offer,) = job.offers
    assert offer.same_layout(job.nominal)
    assert offer.microbatch_counts[0] < offer.microbatch_counts[1]


def test_where_the_recipes_pipelines_do_not_fit_fewer_are_taken() -> None:
    """With two failed GPUs of four and groups of two, one pipeline is left of two."""
    job = SimulatedJob(grid(2, pp=1), sizes=(2,))
    job.switch(without_first_pipeline(job.nominal))
    last = job.run(20, {0: float("inf")})
    assert last.stragglers == (0,)
    assert last.warning == ""
    assert job.offers == []
    assert job.plannings == 2


def without_first_pipeline(plan: Plan) -> Plan:
    """The plan with the GPUs of its first pipeline on standby."""
    first, *others = plan.pipelines
    return replace(
        plan,
        pipelines=tuple(others),
        standby=first.gpus,
        num_microbatches=sum(pipeline.num_microbatches for pipeline in others),
    )


def test_without_any_layer_timing_the_layout_stays_and_a_reason_is_given() -> None:
    job = SimulatedJob(grid(2))
    job.switch(make_plan_with_straggler(job))
    for iteration in range(1, 12):
        seen = job.observation({})
        silent = tuple(replace(s, layer_forward_s=float("nan")) for s in seen.samples)
        decision = job.controller.observe(replace(seen, iteration=iteration, samples=silent))
    assert "No GPU has timed a layer yet" in decision.warning
    assert decision.offer is None


def make_plan_with_straggler(job: SimulatedJob) -> Plan:
    """The layout that a job of this recipe takes when GPU 1 takes three times as long."""
    other = SimulatedJob(job.nominal)
    other.run(20, {1: 3.0})
    return other.plan


def test_a_restarted_controller_finds_the_rates_of_an_uneven_layout() -> None:
    """Nothing was learned: GPUs at the commonest degree are compared alone, others by a guess."""
    job = SimulatedJob(grid(2))
    job.switch(make_plan_with_straggler(job))
    degrees = {standing(job.plan, gpu)[0] for gpu in range(8)}
    assert {1, 2} <= degrees
    last = job.run(5, {6: 2.5})
    assert last.stragglers == (6,)
    assert last.rates[6] == pytest.approx(2.5, rel=0.15)


def test_a_refused_layout_rests_and_micro_batches_move_meanwhile() -> None:
    job = SimulatedJob(grid(2), takes_offers=False, policy=Policy(offer_timeout_iterations=30))
    job.run(5, {1: 3.0})
    (refused,) = job.offers
    assert not refused.same_layout(job.nominal)
    job.controller.reject(plan_id(refused), "out of memory")
    job.run(20, {1: 3.0})
    assert len(job.offers) == 2
    assert job.offers[1].same_layout(job.nominal)
    assert job.offers[1].microbatch_counts != job.nominal.microbatch_counts


def test_a_layout_that_is_refused_again_rests_longer_each_time() -> None:
    """One that runs out of memory on the way costs the job a pause with every attempt."""
    job = SimulatedJob(grid(2), takes_offers=False, policy=Policy(offer_timeout_iterations=5))
    refused_at: list[int] = []
    for _ in range(90):
        decision = job.run(1, {1: 3.0})
        if decision.offer is not None and not decision.offer.same_layout(job.nominal):
            refused_at.append(decision.iteration)
            job.controller.reject(plan_id(decision.offer), "out of memory")
    pauses = [after - before for before, after in itertools.pairwise(refused_at)]
    assert len(pauses) >= 3
    for number, pause in enumerate(pauses):
        assert pause >= 5 * 2**number


def test_memory_limits_what_is_offered() -> None:
    """With room for five layers at degree 2 no GPU can hold more than two layers alone."""
    memory = ModelMemory(reference_tp=2, layer_mib_by_inflight=(10.0,))
    job = SimulatedJob(grid())
    limited = replace(
        freedom(4), cluster=Cluster(gpus_per_node=(4,), memory_mib=50.0), memory=memory
    )
    job.job = replace(job.job, freedom=limited)
    job.controller = Controller(job.job, job.policy, clock=lambda: 0.0)
    job.run(20, {1: 3.0})
    assert job.offers
    assert all(_fullest_mib(offer, 10.0) <= 50.0 for offer in job.offers)


def test_what_is_learned_of_memory_is_planned_with() -> None:
    """A plan that was fine by the model of before is not kept when a layer turns out larger."""
    small = ModelMemory(reference_tp=2, layer_mib_by_inflight=(5.0,))
    roomy = replace(freedom(4), cluster=Cluster(gpus_per_node=(4,), memory_mib=50.0), memory=small)
    job = SimulatedJob(grid(), takes_offers=False)
    job.job = replace(job.job, freedom=roomy)
    job.controller = Controller(job.job, job.policy, clock=lambda: 0.0)
    job.run(8, {1: 3.0})
    assert _fullest_mib(job.offers[0], 10.0) > 50.0
    large = replace(small, layer_mib_by_inflight=(10.0,))
    job.controller.relaid(replace(job.job, freedom=replace(roomy, memory=large)))
    before = len(job.offers)
    job.run(30, {1: 3.0})
    assert job.offers[before:]
    for offer in job.offers[before:]:
        assert _fullest_mib(offer, 10.0) <= 50.0


def _fullest_mib(plan: Plan, layer_mib: float) -> float:
    """Of a GPU, where a layer has so much at degree 2."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return max(layer_mib * stage.num_layers * 2 / len(stage.gpus) for stage in stages)


def test_a_stage_without_layers_is_no_reason_to_stop_planning() -> None:
    """A plan of the user's may have one; its GPU times no layer, and nothing is wrong with it."""
    job = SimulatedJob(grid())
    job.run(4)
    stages = (
        Stage(gpus=(0,), layers=(0, 0)),
        Stage(gpus=(1,), layers=(0, 4)),
        Stage(gpus=(2, 3), layers=(4, 8)),
    )
    job.switch(replace(job.plan, pipelines=(Pipeline(num_microbatches=8, stages=stages),)))
    job.run(6, {2: 3.0})
    assert {decision.ignored for decision in job.decisions} == {()}
    assert job.offers
    assert standing(job.plan, 2)[1] < 4


@pytest.mark.parametrize("level", [Level.observe, Level.rebalance])
def test_below_reshape_the_layout_stays_whatever_the_job_could_do(level: Level) -> None:
    job = SimulatedJob(grid(2), level=level)
    job.run(30, {0: 3.0})
    assert job.plannings == 0
    assert all(offer.same_layout(job.nominal) for offer in job.offers)
    assert bool(job.offers) == (level is Level.rebalance)


def test_reshape_without_freedom_moves_micro_batches_only() -> None:
    job = SimulatedJob(grid(2))
    job.job = replace(job.job, freedom=None)
    job.controller = Controller(job.job, job.policy, clock=lambda: 0.0, make=make_plan)
    job.run(20, {0: 3.0})
    assert [offer.same_layout(job.nominal) for offer in job.offers] == [True]


def test_same_observations_same_decisions() -> None:
    def decisions() -> list[Decision]:
        draw = random.Random(3)
        job = SimulatedJob(grid(2), noise=lambda: draw.uniform(0.95, 1.05))
        job.run(30, {1: 3.0})
        job.run(30)
        return job.decisions

    first, second = decisions(), decisions()
    assert first == second
    assert [d.offer and d.offer.predicted for d in first] == [
        d.offer and d.offer.predicted for d in second
    ]


def test_a_degree_that_only_stragglers_use_does_not_look_healthy() -> None:
    """The straggler stands alone at degree 1 and is still known as one after the switch."""
    job = SimulatedJob(grid(), sizes=(1, 2))
    job.run(30, {1: 2.0})
    assert standing(job.plan, 1)[0] == 1
    last = job.run(20, {1: 2.0})
    assert last.stragglers == (1,)
    assert last.rates[1] == pytest.approx(2.0, rel=0.15)


def test_a_change_of_level_keeps_what_was_seen_and_another_recipe_is_refused() -> None:
    job = SimulatedJob(grid(2), takes_offers=False)
    job.run(4, {1: 3.0})
    job.controller.relaid(replace(job.job, level=Level.observe))
    last = job.run(1, {1: 3.0})
    assert last.stragglers == (1,)
    assert last.step_time_s is not None
    with pytest.raises(BadInputError, match="another job"):
        job.controller.relaid(JobDescription(nominal=grid(1), level=Level.reshape))


def test_a_description_that_contradicts_itself_is_refused() -> None:
    job = SimulatedJob(grid()).job
    with pytest.raises(BadInputError, match="The cluster has 8 GPUs; the job has 4"):
        replace(job, freedom=freedom(8))
    with pytest.raises(BadInputError, match="The plan is for 8 GPUs"):
        replace(job, present=grid(2))
    with pytest.raises(BadInputError, match=r"tensor_parallel_sizes: \[2, 1\]"):
        freedom(4, sizes=(2, 1))
    with pytest.raises(BadInputError, match="layer_time_s"):
        replace(freedom(4), layer_time_s=((1, 0.0),))
    with pytest.raises(BadInputError, match="the model's memory is not"):
        replace(freedom(4), cluster=Cluster(gpus_per_node=(4,), memory_mib=1.0))
