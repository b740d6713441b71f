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
from malleus_megatron.plan.problem import Model, ModelMemory, Problem
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
    where = "model.memory"
    sizes = as_list(
        required(body, "layer_mib_by_inflight", where), f"{where}.layer_mib_by_inflight"
    )
    extras = ("embedding_mib", "head_mib", "fixed_mib", "reserve_mib")
    required(body, "fixed_mib", where)
    return ModelMemory(
        reference_tp=as_int(required(body, "reference_tp", where), f"{where}.reference_tp"),
        layer_mib_by_inflight=tuple(
            as_float(size, f"{where}.layer_mib_by_inflight") for size in sizes
        ),
        **{name: as_float(body.get(name, 0.0), f"{where}.{name}") for name in extras},
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
