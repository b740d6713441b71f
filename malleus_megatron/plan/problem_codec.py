"""JSON of problems: the only reader of problem.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.codec import SCHEMA_VERSION, plan_from_json, rates_from_json, read_json
from malleus_megatron.plan.fields import (
    as_dict,
    as_float,
    as_int,
    as_list,
    check_version,
    required,
)
from malleus_megatron.plan.problem import MEMORY_PARTS, Model, ModelMemory, Problem
from malleus_megatron.plan.rates import HEALTHY, Rates


def read_problem(path: Path) -> Problem:
    """Read a problem.json file."""
    return problem_from_json(read_json(path), str(path))


def problem_from_json(document: Any, where: str = "problem") -> Problem:
    """Read problem.json. Unknown fields are let through.

    Raises:
        BadInputError: a missing or wrong field, an unknown version, or fields that contradict
            each other; the message names the field and the value.
    """
    body = as_dict(document, where)
    check_version(body, SCHEMA_VERSION, where)
    try:
        return _problem(body)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from error


def _problem(body: dict[str, Any]) -> Problem:
    cluster = as_dict(required(body, "cluster", "problem"), "cluster")
    batch = as_dict(required(body, "batch", "problem"), "batch")
    parallel = as_dict(required(body, "parallel", "problem"), "parallel")
    sizes = as_list(
        required(parallel, "tensor_parallel_sizes", "parallel"), "parallel.tensor_parallel_sizes"
    )
    current = body.get("current_plan")
    return Problem(
        cluster=Cluster(
            gpus_per_node=tuple(
                as_int(size, "cluster.gpus_per_node")
                for size in as_list(
                    required(cluster, "gpus_per_node", "cluster"), "cluster.gpus_per_node"
                )
            ),
            memory_mib=_optional(cluster, "memory_mib", "cluster", as_float),
        ),
        model=_model(as_dict(required(body, "model", "problem"), "model")),
        num_microbatches=as_int(
            required(batch, "num_microbatches", "batch"), "batch.num_microbatches"
        ),
        tensor_parallel_sizes=tuple(
            sorted({as_int(size, "parallel.tensor_parallel_sizes") for size in sizes})
        ),
        num_pipelines=_optional(parallel, "num_pipelines", "parallel", as_int),
        rate_floor=as_float(body.get("rate_floor", HEALTHY), "rate_floor"),
        rates=Rates() if body.get("rates") is None else rates_from_json(body["rates"], "rates"),
        current_plan=None if current is None else plan_from_json(current, "current_plan"),
    )


def _model(body: dict[str, Any]) -> Model:
    times = as_dict(required(body, "layer_time_s", "model"), "model.layer_time_s")
    memory = body.get("memory")
    return Model(
        num_layers=as_int(required(body, "num_layers", "model"), "model.num_layers"),
        layer_time_s=tuple(
            sorted(
                (_degree(key), as_float(value, f"model.layer_time_s[{key!r}]"))
                for key, value in times.items()
            )
        ),
        embedding_time_s=as_float(body.get("embedding_time_s", 0.0), "model.embedding_time_s"),
        head_time_s=as_float(body.get("head_time_s", 0.0), "model.head_time_s"),
        memory=None if memory is None else _memory(as_dict(memory, "model.memory")),
    )


def _memory(body: dict[str, Any]) -> ModelMemory:
    required(body, "fixed_mib", "model.memory")
    return memory_from_json(body, "model.memory")


def memory_from_json(body: dict[str, Any], where: str) -> ModelMemory:
    """Read the memory of a model; parts that are missing are 0."""
    name = "layer_mib_by_inflight"
    sizes = as_list(required(body, name, where), f"{where}.{name}")
    return ModelMemory(
        reference_tp=as_int(required(body, "reference_tp", where), f"{where}.reference_tp"),
        layer_mib_by_inflight=tuple(as_float(size, f"{where}.{name}") for size in sizes),
        **{part: as_float(body.get(part, 0.0), f"{where}.{part}") for part in MEMORY_PARTS},
    )


def _degree(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise BadInputError(f"model.layer_time_s: {key!r} is not a TP degree.")
    return int(key)


def _optional[T](
    body: dict[str, Any], name: str, where: str, read: Callable[[Any, str], T]
) -> T | None:
    value = body.get(name)
    return None if value is None else read(value, f"{where}.{name}")
