"""JSON of plans and rates: the only reader and writer. Canonical bytes, and the hash of a plan."""

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.fields import (
    as_dict,
    as_float,
    as_int,
    as_list,
    check_version,
    required,
)
from malleus_megatron.plan.plan import (
    OBJECTIVES,
    Pipeline,
    Plan,
    PlanningNote,
    Prediction,
    Stage,
)
from malleus_megatron.plan.rates import Rates, check_rate

SCHEMA_VERSION = 1


def read_json(path: Path) -> Any:
    """Parse a UTF-8 JSON file.

    Raises:
        BadInputError: the file cannot be read or is not JSON; the message names file and place.
    """
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path} is not a regular file.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON: {error}.") from error


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, no NaN: equal values give equal text on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plan_id(plan: Plan) -> str:
    """`sha256:<hex>` over what the job does under the plan, without predictions and notes."""
    return "sha256:" + hashlib.sha256(canonical_json(assignment(plan)).encode()).hexdigest()


def assignment(plan: Plan) -> dict[str, Any]:
    """The plan's identity as JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "num_layers": plan.num_layers,
        "num_microbatches": plan.num_microbatches,
        "pipelines": [
            {
                "num_microbatches": pipeline.num_microbatches,
                "stages": [
                    {"gpus": list(stage.gpus), "layers": list(stage.layers)}
                    for stage in pipeline.stages
                ],
            }
            for pipeline in plan.pipelines
        ],
        "standby": list(plan.standby),
    }


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as the document plan.json."""
    document = assignment(plan) | {"objective": plan.objective}
    if plan.predicted is not None:
        document["predicted"] = _prediction_to_json(plan.predicted)
    if plan.planning is not None:
        note = {name: value for name, value in asdict(plan.planning).items() if value is not None}
        document["planning"] = note
    return document


def plan_from_json(document: Any, where: str = "plan") -> Plan:
    """Read plan.json. Unknown fields are let through.

    Raises:
        BadInputError: a missing or wrong field, an unknown version, or sums that do not fit.
    """
    body = as_dict(document, where)
    check_version(body, SCHEMA_VERSION, where)
    pipelines = as_list(required(body, "pipelines", where), f"{where}.pipelines")
    try:
        return Plan(
            num_layers=as_int(required(body, "num_layers", where), f"{where}.num_layers"),
            num_microbatches=as_int(
                required(body, "num_microbatches", where), f"{where}.num_microbatches"
            ),
            objective=body.get("objective", OBJECTIVES[0]),
            pipelines=tuple(
                _pipeline(pipeline, f"{where}.pipelines[{index}]")
                for index, pipeline in enumerate(pipelines)
            ),
            standby=_gpus(body.get("standby", []), f"{where}.standby"),
            predicted=_prediction(body.get("predicted"), f"{where}.predicted"),
            planning=_note(body.get("planning"), f"{where}.planning"),
        )
    except BadInputError as error:
        if str(error).startswith(where):
            raise
        raise BadInputError(f"{where}: {error}") from error


def read_plan(path: Path) -> Plan:
    """Read a plan.json file."""
    return plan_from_json(read_json(path), str(path))


def rates_to_json(rates: Rates) -> dict[str, float | str]:
    """GPU -> rate with JSON keys; a failed GPU is the text "inf"."""
    return {str(gpu): "inf" if math.isinf(rate) else rate for gpu, rate in rates}


def rates_from_json(document: Any, where: str = "rates") -> Rates:
    """Read the `rates` object of rates.json and problem.json: "inf" or null is a failed GPU.

    Raises:
        BadInputError: a GPU that is no number, or a rate that is text, NaN, zero or negative.
    """
    rates: dict[int, float] = {}
    for key, value in as_dict(document, where).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9) or key != str(int(key)):
            raise BadInputError(f"{where}: {key!r} is not a GPU number.")
        failed = value is None or value == "inf"
        try:
            rates[int(key)] = math.inf if failed else check_rate(int(key), value)
        except BadInputError as error:
            raise BadInputError(f"{where}: {error}") from error
    return Rates.of(rates)


def read_rates(path: Path) -> Rates:
    """Read a rates.json file."""
    body = as_dict(read_json(path), str(path))
    return rates_from_json(required(body, "rates", str(path)), str(path))


def _pipeline(document: Any, where: str) -> Pipeline:
    body = as_dict(document, where)
    stages = as_list(required(body, "stages", where), f"{where}.stages")
    return Pipeline(
        num_microbatches=as_int(
            required(body, "num_microbatches", where), f"{where}.num_microbatches"
        ),
        stages=tuple(
            _stage(stage, f"{where}.stages[{index}]") for index, stage in enumerate(stages)
        ),
    )


def _stage(document: Any, where: str) -> Stage:
    body = as_dict(document, where)
    layers = as_list(required(body, "layers", where), f"{where}.layers")
    if len(layers) != 2:
        raise BadInputError(f"{where}.layers: {layers} must be [start, end].")
    return Stage(
        gpus=_gpus(required(body, "gpus", where), f"{where}.gpus"),
        layers=(as_int(layers[0], f"{where}.layers"), as_int(layers[1], f"{where}.layers")),
    )


def _gpus(document: Any, where: str) -> tuple[int, ...]:
    return tuple(as_int(gpu, where) for gpu in as_list(document, where))


def _prediction(document: Any, where: str) -> Prediction | None:
    if document is None:
        return None
    body = as_dict(document, where)

    def number(name: str) -> float | None:
        value = body.get(name)
        return None if value is None else as_float(value, f"{where}.{name}")

    memory = body.get("memory_mib")
    return Prediction(
        step_time_s=number("step_time_s"),
        bottleneck=number("bottleneck"),
        lower_bound=number("lower_bound"),
        healthy_step_time_s=number("healthy_step_time_s"),
        memory_mib=None
        if memory is None
        else tuple(
            tuple(as_float(stage, f"{where}.memory_mib") for stage in as_list(pipeline, where))
            for pipeline in as_list(memory, where)
        ),
    )


def _prediction_to_json(predicted: Prediction) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step_time_s": predicted.step_time_s,
        "bottleneck": predicted.bottleneck,
        "lower_bound": predicted.lower_bound,
        "healthy_step_time_s": predicted.healthy_step_time_s,
    }
    if predicted.memory_mib is not None:
        values["memory_mib"] = [list(pipeline) for pipeline in predicted.memory_mib]
    return {name: value for name, value in values.items() if value is not None}


def _note(document: Any, where: str) -> PlanningNote | None:
    if document is None:
        return None
    body = as_dict(document, where)
    return PlanningNote(
        seconds=as_float(body.get("seconds", 0.0), f"{where}.seconds"),
        seed=as_int(body.get("seed", 0), f"{where}.seed"),
        problem=str(body["problem"]) if body.get("problem") else None,
    )
