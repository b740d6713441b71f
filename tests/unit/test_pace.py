"""pace.json: what is read, and what is refused with which numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.pace import LayerPace, Pace, pace_from_json, read_pace

GOOD = {
    "layer_forward_s": {"1": 0.02, "2": 0.011},
    "layer_backward_s": {"1": 0.04, "2": 0.022},
}


def test_reads_the_documented_example(tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    path.write_text(json.dumps(GOOD | {"comment": "fields may be added"}))
    pace = read_pace(path)
    assert pace.at(1) == LayerPace(forward_s=0.02, backward_s=0.04)
    assert pace.at(2) == LayerPace(forward_s=0.011, backward_s=0.022)


def test_a_missing_degree_names_those_that_are_there() -> None:
    with pytest.raises(BadInputError, match=r"TP degree 4; it has 1, 2\."):
        pace_from_json(GOOD).at(4)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 s"),
        (-0.5, r"-0\.5 s"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("0.02", r"'0\.02'"),
        (True, "True"),
        (None, "None"),
        (3600.5, r"3600\.5 s must be above 0 and at most 3600 s"),
        (1e308, r"1e\+308 s"),
        (10**300, r"1e\+300 s"),
    ],
)
def test_a_bad_time_is_refused_with_its_place_and_number(value: Any, shown: str) -> None:
    document = GOOD | {"layer_backward_s": {"1": 0.04, "2": value}}
    with pytest.raises(BadInputError, match=rf"layer_backward_s\['2'\]: .*{shown}"):
        pace_from_json(document)


def test_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    path.write_text('{"layer_forward_s": {"1": NaN}, "layer_backward_s": {"1": 1}}')
    with pytest.raises(BadInputError, match=rf"{path.name}.*nan"):
        read_pace(path)


@pytest.mark.parametrize("key", ["one", "0", "-1", "1.0", "²", ""])
def test_a_key_that_is_no_degree_is_refused(key: str) -> None:
    with pytest.raises(BadInputError, match="is not a TP degree"):
        pace_from_json({"layer_forward_s": {key: 0.1}, "layer_backward_s": {key: 0.1}})


def test_both_tables_must_have_the_same_degrees() -> None:
    with pytest.raises(BadInputError, match=r"\[1, 2\].*\[1\]"):
        pace_from_json(GOOD | {"layer_backward_s": {"1": 0.04}})


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "expected an object"),
        ({"layer_forward_s": {"1": 0.1}}, "'layer_backward_s' is missing"),
        ({"layer_forward_s": {}, "layer_backward_s": {}}, "names no TP degree"),
        ({"layer_forward_s": 0.1, "layer_backward_s": 0.1}, "expected an object"),
    ],
)
def test_a_wrong_document_is_refused(document: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        pace_from_json(document)


def test_values_made_in_code_are_checked_too() -> None:
    with pytest.raises(BadInputError, match=r"backward_s: 0\.0 s"):
        LayerPace(forward_s=1.0, backward_s=0.0)
    with pytest.raises(BadInputError, match="it has none"):
        Pace(by_degree=()).at(1)
