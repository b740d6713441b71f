"""plan.json and rates.json: round trips, one identity on every machine, and every kind of fault."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.errors import EXIT_BAD_INPUT, BadInputError
from malleus_megatron.plan.codec import (
    canonical_json,
    plan_from_json,
    plan_id,
    plan_to_json,
    rates_from_json,
    rates_to_json,
    read_json,
    read_plan,
    read_rates,
)
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import Rates
from tests.harness.plans import plans

EXAMPLE = {
    "schema_version": 1,
    "num_layers": 4,
    "num_microbatches": 8,
    "objective": "step-time",
    "pipelines": [
        {"num_microbatches": 5, "stages": [{"gpus": [0, 1], "layers": [0, 4]}]},
        {
            "num_microbatches": 3,
            "stages": [{"gpus": [2], "layers": [0, 1]}, {"gpus": [3], "layers": [1, 4]}],
        },
    ],
    "standby": [4],
    "predicted": {"step_time_s": 2.5, "bottleneck": 656.0, "memory_mib": [[10.0], [20.0, 30.0]]},
    "planning": {"seconds": 0.2, "seed": 7},
}


def shuffled(value: Any, order: Callable[[list[str]], list[str]]) -> Any:
    """The same document with its keys in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], order) for key in order(list(value))}
    if isinstance(value, list):
        return [shuffled(inner, order) for inner in value]
    return value


def test_the_documented_example_is_read() -> None:
    plan = plan_from_json(EXAMPLE)
    assert plan.microbatch_counts == (5, 3)
    assert plan.pipelines[1].stages[1].layers == (1, 4)
    assert plan.standby == (4,)
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == 2.5
    assert plan.predicted.lower_bound is None
    assert plan.predicted.memory_mib == ((10.0,), (20.0, 30.0))
    assert plan.planning is not None
    assert plan.planning.seed == 7
    assert plan_to_json(plan) == EXAMPLE


@given(plans())
def test_a_plan_survives_its_json(plan: Plan) -> None:
    back = plan_from_json(json.loads(canonical_json(plan_to_json(plan))))
    assert back == plan
    assert back.predicted == plan.predicted
    assert back.planning == plan.planning
    assert plan_id(back) == plan_id(plan)
    assert canonical_json(plan_to_json(back)) == canonical_json(plan_to_json(plan))


@given(plans(), st.randoms(use_true_random=False))
def test_the_identity_does_not_depend_on_the_order_of_keys(plan: Plan, random: Any) -> None:
    document = plan_to_json(plan)
    other = shuffled(document, lambda keys: random.sample(keys, len(keys)))
    assert plan_id(plan_from_json(other)) == plan_id(plan)


@given(plans(), plans())
def test_the_identity_is_that_of_the_assignment(one: Plan, other: Plan) -> None:
    def assigned(plan: Plan) -> tuple[Any, ...]:
        return (plan.num_layers, plan.pipelines, plan.standby)

    assert (plan_id(one) == plan_id(other)) == (assigned(one) == assigned(other))


def test_the_identity_is_the_same_on_every_machine() -> None:
    """Frozen: a change here means that old and new versions can no longer agree on a plan."""
    text = (
        '{"num_layers":4,"num_microbatches":8,"pipelines":[{"num_microbatches":5,'
        '"stages":[{"gpus":[0,1],"layers":[0,4]}]},{"num_microbatches":3,"stages":'
        '[{"gpus":[2],"layers":[0,1]},{"gpus":[3],"layers":[1,4]}]}],'
        '"schema_version":1,"standby":[4]}'
    )
    assert plan_id(plan_from_json(EXAMPLE)) == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def test_predictions_notes_and_unknown_fields_do_not_change_the_identity() -> None:
    bare = {name: EXAMPLE[name] for name in EXAMPLE if name not in {"predicted", "planning"}}
    extended = EXAMPLE | {"comment": "by hand", "predicted": {"step_time_s": 9.0}}
    assert plan_id(plan_from_json(bare)) == plan_id(plan_from_json(EXAMPLE))
    assert plan_id(plan_from_json(extended)) == plan_id(plan_from_json(EXAMPLE))


def test_optional_fields_have_defaults() -> None:
    needed = ("schema_version", "num_layers", "num_microbatches", "pipelines")
    plan = plan_from_json({name: EXAMPLE[name] for name in needed} | {"predicted": None})
    assert (plan.standby, plan.objective) == ((), "step-time")
    assert (plan.predicted, plan.planning) == (None, None)


def changed(path: str, value: Any) -> Any:
    """The example with one field replaced; the path is like `pipelines.0.stages`."""
    document = json.loads(json.dumps(EXAMPLE))
    *parents, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    place = document
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("num_layers", ..., "my.json: the field 'num_layers' is missing"),
        ("pipelines.1.stages.0.gpus", ..., r"pipelines\[1\].stages\[0\]: the field 'gpus'"),
        ("schema_version", ..., "'schema_version' is missing"),
        ("schema_version", 2, "schema_version 2 is not known; this version reads 1"),
        ("schema_version", "1", "schema_version '1' is not known"),
        ("schema_version", True, "schema_version True is not known"),
        ("num_layers", "4", "num_layers: expected a whole number, got '4'"),
        ("num_layers", 4.0, "expected a whole number, got 4.0"),
        ("num_microbatches", True, "expected a whole number, got True"),
        ("num_microbatches", None, "expected a whole number, got None"),
        ("pipelines", {}, "my.json.pipelines: expected an array, got {}"),
        ("pipelines.0", 3, r"pipelines\[0\]: expected an object, got 3"),
        ("pipelines.0.stages.0.layers", [0], r"layers: \[0\] must be \[start, end\]"),
        ("pipelines.0.stages.0.layers", [0, "4"], "expected a whole number, got '4'"),
        ("pipelines.0.stages.0.gpus", 0, "gpus: expected an array, got 0"),
        ("standby", [None], "standby: expected a whole number, got None"),
        ("objective", 5, "my.json: Objective 5 is unknown"),
        ("predicted", [], "predicted: expected an object"),
        ("predicted.step_time_s", "NaN", "step_time_s: expected a finite number, got 'NaN'"),
        ("predicted.step_time_s", math.nan, "expected a finite number, got nan"),
        pytest.param(
            "predicted.step_time_s", 10**400, "expected a finite number, got 1000", id="huge"
        ),
        ("predicted.memory_mib", [[-math.inf]], "expected a finite number, got -inf"),
        ("planning.seed", 0.5, "seed: expected a whole number"),
        ("num_microbatches", 9, r"my.json: Micro-batches 5 \+ 3 = 8; the step has 9"),
        ("num_layers", 5, "my.json: Pipeline 0 holds 4 layers; the model has 5"),
        ("standby", [3], "my.json: GPU 3 stands in the plan twice"),
        ("pipelines.0.num_microbatches", 0, "my.json: A pipeline has 0 micro-batches"),
    ],
)
def test_a_fault_is_named_with_its_place_and_value(path: str, value: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as refusal:
        plan_from_json(changed(path, value), "my.json")
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == EXIT_BAD_INPUT == 2


@pytest.mark.parametrize("document", [None, 3, "plan", []])
def test_what_is_no_object_is_no_plan(document: Any) -> None:
    with pytest.raises(BadInputError, match="expected an object"):
        plan_from_json(document)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b'{"a": ', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        pytest.param(b"[" * 100_000, "is not JSON", id="deep"),
        pytest.param(b"1" * 10_000, "is not JSON", id="long number"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError, match=said) as refusal:
        read_json(path)
    assert str(path) in str(refusal.value)


def test_files_are_read_under_their_names(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(EXAMPLE), encoding="utf-8")
    assert read_plan(path) == plan_from_json(EXAMPLE)
    path.write_text(json.dumps(changed("num_layers", ...)), encoding="utf-8")
    with pytest.raises(BadInputError, match="plan.json: the field 'num_layers' is missing"):
        read_plan(path)


def test_canonical_json_has_no_word_for_nan() -> None:
    assert canonical_json({"b": [1, 2.5], "a": None}) == '{"a":null,"b":[1,2.5]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": math.nan})


rate_values = st.floats(min_value=0.01, max_value=1e6) | st.just(math.inf)


@given(st.dictionaries(st.integers(0, 10**6), rate_values))
def test_rates_survive_their_json(rates: dict[int, float]) -> None:
    text = canonical_json(rates_to_json(Rates.of(rates)))
    assert rates_from_json(json.loads(text)) == Rates.of(rates)


def write_rates(folder: Path, text: str) -> Path:
    path = folder / "rates.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "gpu", "rate"),
    [
        ('{"rates": {"3": 2.57}}', 3, 2.57),
        ('{"rates": {"3": 2.57}}', 2, 1.0),  # a missing GPU counts as healthy
        ('{"rates": {"0": "inf"}}', 0, math.inf),
        ('{"rates": {"0": null}}', 0, math.inf),
        ('{"rates": {"1": 3}, "source": "by hand"}', 1, 3.0),
        ('{"rates": {"1": 0.8}}', 1, 0.8),  # faster than the others
    ],
)
def test_a_rates_file(tmp_path: Path, text: str, gpu: int, rate: float) -> None:
    assert read_rates(write_rates(tmp_path, text))[gpu] == rate


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rates": {"0": NaN}}', "GPU 0: rate nan must be above 0"),
        ('{"rates": {"0": "NaN"}}', "GPU 0: rate 'NaN' is not a number"),
        ('{"rates": {"7": -1.5}}', "GPU 7: rate -1.5 must be above 0"),
        ('{"rates": {"7": 0}}', "GPU 7: rate 0 must be above 0"),
        ('{"rates": {"7": -Infinity}}', "GPU 7: rate -inf must be above 0"),
        ('{"rates": {"2": "slow"}}', "GPU 2: rate 'slow' is not a number"),
        ('{"rates": {"2": true}}', "GPU 2: rate True is not a number"),
        ('{"rates": {"2": [2.0]}}', r"GPU 2: rate \[2.0\] is not a number"),
        ('{"rates": {"two": 2.0}}', "'two' is not a GPU number"),
        ('{"rates": {"-1": 2.0}}', "'-1' is not a GPU number"),
        ('{"rates": {"01": 2.0}}', "'01' is not a GPU number"),
        ('{"rates": {"\u0663": 2.0}}', "is not a GPU number"),
        ('{"rates": [2.0]}', "expected an object"),
        ("{}", "'rates' is missing"),
    ],
)
def test_a_bad_rates_file_is_refused_with_gpu_and_value(
    tmp_path: Path, text: str, said: str
) -> None:
    path = write_rates(tmp_path, text)
    with pytest.raises(BadInputError, match=said) as refusal:
        read_rates(path)
    assert str(path) in str(refusal.value)
    assert refusal.value.exit_code == EXIT_BAD_INPUT


def test_a_rate_too_large_for_a_float_is_a_failed_gpu(tmp_path: Path) -> None:
    path = write_rates(tmp_path, f'{{"rates": {{"0": {10**400}, "1": 1e999}}}}')
    assert dict(read_rates(path)) == {0: math.inf, 1: math.inf}
