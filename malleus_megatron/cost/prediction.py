"""What a plan costs under a problem: stage times, step time, bottleneck, memory."""

from dataclasses import dataclass

from malleus_megatron.cost.memory import plan_memory_mib
from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.cost.stage import extra_layers, layer_time_s, layers_by_microbatches
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem

STEP_TIME = "step-time"
BOTTLENECK = "bottleneck"
OBJECTIVES = (STEP_TIME, BOTTLENECK)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Costs by pipeline and stage, and of the step."""

    stage_times_s: tuple[tuple[float, ...], ...]
    memory_mib: tuple[tuple[float, ...], ...] | None
    step_time_s: float
    bottleneck: float

    def value(self, objective: str) -> float:
        """The figure that the objective minimises."""
        return self.step_time_s if objective == STEP_TIME else self.bottleneck


def plan_costs(problem: Problem, plan: Plan) -> PlanCosts:
    """Price a plan at the rates that count.

    Raises:
        BadInputError: the plan names a GPU or a TP size that the problem does not have.
    """
    rates = problem.counted_rates()
    _check_fit(problem, plan)
    y_s = [
        [
            layer_time_s(problem.model, len(stage.gpus), max(rates[gpu] for gpu in stage.gpus))
            for stage in pipeline.stages
        ]
        for pipeline in plan.pipelines
    ]
    times = tuple(
        tuple(
            (
                stage.num_layers
                + extra_layers(
                    problem.model, first=index == 0, last=index == len(pipeline.stages) - 1
                )
            )
            * y
            for index, (stage, y) in enumerate(zip(pipeline.stages, ys, strict=True))
        )
        for pipeline, ys in zip(plan.pipelines, y_s, strict=True)
    )
    steady = [
        ([s.num_layers * y for s, y in zip(pipeline.stages, ys, strict=True)], count)
        for pipeline, ys, count in zip(plan.pipelines, y_s, plan.microbatch_counts, strict=True)
    ]
    return PlanCosts(
        stage_times_s=times,
        memory_mib=None
        if problem.model.memory is None
        else plan_memory_mib(problem.model.memory, plan),
        step_time_s=step_time_s(times, plan.microbatch_counts),
        bottleneck=layers_by_microbatches(steady) / problem.model.largest_degree_time_s,
    )


def _check_fit(problem: Problem, plan: Plan) -> None:
    num_gpus = problem.cluster.num_gpus
    for gpu in plan.all_gpus():
        if gpu >= num_gpus:
            raise BadInputError(f"The plan names GPU {gpu}; the problem has 0..{num_gpus - 1}.")
    known = dict(problem.model.layer_time_s)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if len(stage.gpus) not in known:
                raise BadInputError(
                    f"The plan has a TP group of {len(stage.gpus)} GPUs; "
                    f"model.layer_time_s has {sorted(known)}."
                )
