"""Numbers beyond any job are refused at once: no traceback, no endless search."""

import copy
from typing import Any

import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.problem_codec import problem_from_json

BASE: dict[str, Any] = {
    "schema_version": 1,
    "cluster": {"gpus_per_node": [4], "memory_mib": 80000},
    "model": {
        "num_layers": 4,
        "layer_time_s": {"1": 7.22, "2": 3.66, "4": 1.9},
        "memory": {"reference_tp": 4, "layer_mib_by_inflight": [100, 110], "fixed_mib": 4},
    },
    "batch": {"num_microbatches": 4},
    "parallel": {"tensor_parallel_sizes": [1, 2, 4], "num_pipelines": 1},
    "rates": {"0": 2.0},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(BASE)
    inner = document
    *folders, name = path.split(".")
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return document


def test_the_base_is_good() -> None:
    assert problem_from_json(BASE).model.num_layers == 4


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("rates", {"0": 1e308}, "GPU 0"),
        ("rates", [], "rates"),
        ("model.layer_time_s", {"1": 1e308, "2": 1e308, "4": 1e308}, "layer_time_s"),
        ("model.layer_time_s", {"1": 1e-320, "2": 1e-320, "4": 1e-320}, "layer_time_s"),
        ("model.memory.reference_tp", 10**400, "reference_tp"),
        ("model.num_layers", 10**400, "num_layers"),
        ("cluster.gpus_per_node", [10**9], "gpus_per_node"),
        ("cluster.gpus_per_node", [10**400], "gpus_per_node"),
        ("batch.num_microbatches", 10**12, "num_microbatches"),
        ("current_plan", [], "current_plan"),
    ],
)
def test_each_is_named_in_few_words(path: str, value: Any, field: str) -> None:
    with pytest.raises(BadInputError, match=field) as raised:
        problem_from_json(changed(path, value))
    assert len(str(raised.value)) < 300


def test_memory_without_its_fixed_part_is_refused() -> None:
    document = copy.deepcopy(BASE)
    del document["model"]["memory"]["fixed_mib"]
    with pytest.raises(BadInputError, match="'fixed_mib' is missing"):
        problem_from_json(document)


def test_a_current_plan_of_another_model_is_refused_with_both_depths() -> None:
    plan = {
        "schema_version": 1,
        "num_layers": 1000,
        "num_microbatches": 4,
        "pipelines": [
            {"num_microbatches": 4, "stages": [{"gpus": [0, 1, 2, 3], "layers": [0, 1000]}]}
        ],
    }
    with pytest.raises(BadInputError, match="1000 layers; the model has 4"):
        problem_from_json(changed("current_plan", plan))
