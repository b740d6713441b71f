"""What befalls a job, drawn from a seed: stragglers, and faults of the sidecar, plans and the log.

Values only. `Fault.iteration` is when a fault begins at the earliest; who makes it happen is in
`conductor` (the sidecar's process), `proxy` (its answers) and `job` (inside of the training).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.nominal import nominal_plan
from tests.harness.recipes import random_job_plan
from tests.harness.training import Grid

DEGREES = (1, 2, 4)
PACE = {
    "layer_forward_s": {"1": 0.006, "2": 0.003, "4": 0.002},
    "layer_backward_s": {"1": 0.012, "2": 0.006, "4": 0.004},
}
SETTINGS = {
    "threshold": (1.15, 1.3, 1.5),
    "window": (2, 3),
    "patience": (1, 2),
    "long_patience": (2, 4),
    "long_window": (4, 8),
    "min_gain": (0.01, 0.03, 0.1),
    "sure_gain": (0.1, 0.25),
    "offer_timeout_iterations": (2, 5),
}
"""Quicker than the defaults, so that a short job is re-planned often."""

ENDED = r"The sidecar has ended \("
REFUSED_PLAN = "A plan was not taken: "

SIDECAR_FAULTS = {
    "kill": (ENDED, r"cannot be used: "),
    "shutdown": (ENDED, r"cannot be used: "),
    "stop": (r"did not answer within", r"cannot be used: "),
    "stop and kill": (ENDED, r"cannot be used: |did not answer within"),
}
"""Of the process -> what the job may say, once, if the process is its own, or another's."""

ANSWER_FAULTS = {
    "status 500": r"answered 500",
    "errors that differ": r"answered 503",
    "truncated": r"is not JSON",
    "no JSON": r"is not JSON",
    "NaN": r"is not JSON",
    "wrong version": r"schema_version 9 is not known",
    "wrong types": r"expected a whole number",
    "huge": r"answered more than",
    "no answer": r"cannot be used",
    "slow body": r"did not answer within",
    "slow headers": r"did not answer within|cannot be used",
    "foreign job": r"answered 400",
    "other world": r"The plan is for 16 GPUs",
    "a GPU twice": r"GPU",
    "a layer left out": r"layer",
}

PLAN_FAULTS = {
    "other model": REFUSED_PLAN + r"The plan is for 12 layers",
    "odd TP degree": REFUSED_PLAN + r".*TP degree \d",
    "too many pipelines": REFUSED_PLAN + r"The plan has \d+ pipelines; the step has",
}

LOG_FAULTS = {
    "log is full": r"Events are no longer written",
    "plans is a file": r"Plans are no longer kept",
}

FAILING_SWITCH = "failing switch"
VALID_PLAN = "valid plan"
SILENT = (VALID_PLAN, "settings", "bad settings", "foreign samples")
"""Changes and meddling that are no fault of the job's, so it has nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that happens."""

    kind: str
    iteration: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """All that happens in one job."""

    seed: int
    grid: Grid
    iterations: int
    own_sidecar: bool
    """Whether rank 0 starts the sidecar; else somebody else runs it, at a URL."""
    settings: Mapping[str, float]
    injection: Sequence[Mapping[str, Any]]
    faults: Sequence[Fault]

    def rate_at(self, iteration: int) -> float:
        """The largest injected rate."""
        rates = [
            float(entry["rate"])
            for entry in self.injection
            if entry["from_iteration"] <= iteration < entry["to_iteration"]
        ]
        return max([1.0, *rates])


def warning_of(fault: Fault, *, own_sidecar: bool) -> str | None:
    """What the job may say of a fault, once; None if nothing."""
    if fault.kind in SIDECAR_FAULTS:
        return SIDECAR_FAULTS[fault.kind][0 if own_sidecar else 1]
    if fault.kind == FAILING_SWITCH:
        return REFUSED_PLAN + ".*failed on rank"
    return (ANSWER_FAULTS | PLAN_FAULTS | LOG_FAULTS).get(fault.kind)


def draw(seed: int, grid: Grid, iterations: int) -> Script:
    """Draw a job's script; the same seed gives the same one."""
    rng = random.Random(seed)
    faults = [_fault(rng, kind, grid, iterations) for kind in _kinds(rng, grid, iterations)]
    switches = [fault for fault in faults if fault.kind == FAILING_SWITCH]
    # A switch that can fail needs a plan to switch to.
    faults += [
        replace(_fault(rng, VALID_PLAN, grid, iterations), iteration=fault.iteration)
        for fault in switches
    ]
    return Script(
        seed=seed,
        grid=grid,
        iterations=iterations,
        own_sidecar=rng.random() < 0.7,
        settings={name: rng.choice(values) for name, values in SETTINGS.items()},
        injection=_injection(rng, grid, iterations),
        faults=sorted(faults, key=lambda fault: fault.iteration),
    )


def _kinds(rng: random.Random, grid: Grid, iterations: int) -> list[str]:
    """One of each group at least, about one fault in ten iterations."""
    plan_faults = list(PLAN_FAULTS)
    if grid.world <= grid.num_microbatches:
        plan_faults.remove("too many pipelines")
    kinds = [
        "kill",
        rng.choice(list(ANSWER_FAULTS)),
        rng.choice(plan_faults),
        FAILING_SWITCH,
        VALID_PLAN,
    ]
    others = [*ANSWER_FAULTS, *plan_faults, *SIDECAR_FAULTS, *SILENT, FAILING_SWITCH]
    kinds += [rng.choice(others) for _ in range(iterations // 12)]
    if rng.random() < 0.4:
        kinds.append(rng.choice(list(LOG_FAULTS)))
    return kinds


def _fault(rng: random.Random, kind: str, grid: Grid, iterations: int) -> Fault:
    values: dict[str, Any] = {}
    if kind == FAILING_SWITCH:
        values = {"step": rng.randrange(14), "rank": rng.randrange(grid.world)}
    elif kind in {"stop", "slow body", "slow headers"}:
        values = {"seconds": rng.uniform(1, 25)}
    elif kind == "stop and kill":
        values = {"seconds": rng.uniform(1, 8)}  # sooner than anyone can tell that it hangs
    elif kind == "settings":
        name = rng.choice(list(SETTINGS))
        values = {"settings": {name: rng.choice(SETTINGS[name])}}
    elif kind == "bad settings":
        values = {"settings": rng.choice([{"window": 0}, {"threshold": "x"}, {"nothing": 1}])}
    elif kind == VALID_PLAN:
        values = {"offer": plan_to_json(random_job_plan(rng, grid, DEGREES))}
    elif kind in OFFERS:
        values = {"offer": OFFERS[kind](rng, grid)}
    if kind in ANSWER_FAULTS and kind not in OFFERS:
        values["answers"] = rng.randint(1, 4)
    return Fault(kind=kind, iteration=rng.randint(4, iterations - 4), values=values)


def _other_model(rng: random.Random, grid: Grid) -> dict[str, Any]:
    return plan_to_json(random_job_plan(rng, replace(grid, num_layers=12), DEGREES))


def _other_world(rng: random.Random, grid: Grid) -> dict[str, Any]:
    return plan_to_json(
        nominal_plan(
            num_layers=grid.num_layers,
            num_microbatches=grid.num_microbatches,
            tensor_parallel_size=4,
            pipeline_parallel_size=2,
            data_parallel_size=2,
        )
    )


def _whole_pipelines(
    grid: Grid, groups: Sequence[Sequence[int]], standby: Sequence[int] = ()
) -> dict[str, Any]:
    """Each TP group is a pipeline of one stage; a micro-batch each."""
    stages = [[{"gpus": list(group), "layers": [0, grid.num_layers]}] for group in groups]
    return {
        "schema_version": 1,
        "num_layers": grid.num_layers,
        "num_microbatches": len(groups),
        "objective": "step-time",
        "pipelines": [{"num_microbatches": 1, "stages": stage} for stage in stages],
        "standby": list(standby),
    }


def _odd_tp_degree(rng: random.Random, grid: Grid) -> dict[str, Any]:
    """No width of a model can be shared out over 3 or 7 GPUs."""
    return _whole_pipelines(grid, [range(grid.world - 1)], standby=[grid.world - 1])


def _too_many_pipelines(rng: random.Random, grid: Grid) -> dict[str, Any]:
    return _whole_pipelines(grid, [[gpu] for gpu in range(grid.world)])


def _gpu_twice(rng: random.Random, grid: Grid) -> dict[str, Any]:
    plan = _whole_pipelines(grid, [range(grid.world)])
    plan["pipelines"][0]["stages"][0]["gpus"][0] = grid.world - 1
    return plan


def _layer_left_out(rng: random.Random, grid: Grid) -> dict[str, Any]:
    plan = _whole_pipelines(grid, [range(grid.world)])
    plan["pipelines"][0]["stages"][0]["layers"] = [1, grid.num_layers]
    return plan


OFFERS = {
    "other model": _other_model,
    "other world": _other_world,
    "odd TP degree": _odd_tp_degree,
    "too many pipelines": _too_many_pipelines,
    "a GPU twice": _gpu_twice,
    "a layer left out": _layer_left_out,
}


def _injection(rng: random.Random, grid: Grid, iterations: int) -> list[dict[str, Any]]:
    """Single GPUs, whole TP groups, GPUs that come and go, and standstills; they may overlap."""
    entries: list[dict[str, Any]] = []
    for _ in range(max(3, iterations // 20)):
        start = rng.randint(2, iterations)
        rate = round(rng.choice([rng.uniform(1.3, 4), rng.uniform(4, 13)]), 2)
        length = rng.randint(5, max(6, iterations // 4))
        gpu = rng.randrange(grid.world)
        shape = rng.choice(["gpu", "gpu", "TP group", "flapping", "standstill"])
        if shape == "TP group":
            first = gpu - gpu % grid.tp
            group = range(first, first + grid.tp)
            entries += [_span(member, rate, start, length) for member in group]
        elif shape == "flapping":
            period = rng.randint(1, 6)
            starts = [start + 2 * period * number for number in range(4)]
            entries += [_span(gpu, rate, again, period) for again in starts]
        elif shape == "standstill":
            entries.append(_span(gpu, rng.choice([100.0, 300.0]), start, rng.randint(1, 2)))
        else:
            entries.append(_span(gpu, rate, start, length))
    return entries


def _span(gpu: int, rate: float, start: int, length: int) -> dict[str, Any]:
    return {"gpu": gpu, "rate": rate, "from_iteration": start, "to_iteration": start + length}
