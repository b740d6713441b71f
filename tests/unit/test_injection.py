"""injection.json: half-open spans, overlaps, and what is refused with which numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.injection import (
    InjectedRate,
    Injection,
    injection_from_json,
    read_injection,
)

GOOD = {"gpu": 3, "rate": 2.57, "from_iteration": 5, "to_iteration": 20}


def test_reads_the_documented_example(tmp_path: Path) -> None:
    path = tmp_path / "injection.json"
    path.write_text(json.dumps([GOOD | {"comment": "in words"}]))
    assert read_injection(path) == Injection(
        entries=(InjectedRate(gpu=3, rate=2.57, from_iteration=5, to_iteration=20),)
    )


def test_a_span_is_half_open_and_of_one_gpu() -> None:
    injection = injection_from_json([GOOD])
    assert [injection.rate_at(3, i) for i in (1, 4, 5, 19, 20)] == [1.0, 1.0, 2.57, 2.57, 1.0]
    assert injection.rate_at(2, 7) == 1.0
    assert injection.rates_of(3) == (2.57,)
    assert injection.rates_of(2) == ()


@pytest.mark.parametrize("end", [{}, {"to_iteration": None}])
def test_without_an_end_it_lasts(end: dict[str, Any]) -> None:
    injection = injection_from_json([{"gpu": 0, "rate": 2.0, "from_iteration": 1} | end])
    assert injection.rate_at(0, 1) == injection.rate_at(0, 10**9) == 2.0


def test_where_spans_overlap_the_largest_rate_holds() -> None:
    injection = injection_from_json([GOOD, GOOD | {"rate": 4.0, "from_iteration": 10}, GOOD])
    assert [injection.rate_at(3, i) for i in (9, 10, 20)] == [2.57, 4.0, 1.0]


def test_a_faster_gpu_is_a_rate_below_one() -> None:
    assert injection_from_json([GOOD | {"rate": 0.5}]).rate_at(3, 5) == 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 0}, "GPU 3: rate 0 "),
        ({"rate": -1.5}, r"GPU 3: rate -1\.5 "),
        ({"rate": float("nan")}, "GPU 3: rate nan "),
        ({"rate": float("inf")}, "GPU 3: rate inf "),
        ({"rate": "2.5"}, r"GPU 3: rate '2\.5' "),
        ({"rate": True}, "GPU 3: rate True "),
        ({"gpu": -1}, "GPU -1"),
        ({"gpu": "3"}, r"\.gpu: .*'3'"),
        ({"from_iteration": 0}, "from_iteration 0"),
        ({"from_iteration": 2.5}, r"\.from_iteration: .*2\.5"),
        ({"to_iteration": 5}, "to_iteration 5 .* from_iteration 5"),
        ({"to_iteration": 4}, "to_iteration 4 .* from_iteration 5"),
        ({"to_iteration": "end"}, r"\.to_iteration: .*'end'"),
    ],
)
def test_a_bad_entry_is_refused_with_its_place_and_number(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInputError, match=rf"^injection\[1\].*{said}"):
        injection_from_json([GOOD, GOOD | change])


def test_a_misspelt_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        BadInputError,
        match=r"^injection\[1\]: the field 'to_iteratoin' is not known; the nearest is "
        r"'to_iteration'\.",
    ):
        injection_from_json([GOOD, {"gpu": 0, "rate": 3, "from_iteration": 1, "to_iteratoin": 8}])


@pytest.mark.parametrize("name", ["gpu", "rate", "from_iteration"])
def test_a_missing_field_is_named(name: str) -> None:
    entry = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(BadInputError, match=rf"'{name}' is missing"):
        injection_from_json([entry])


def test_the_document_is_an_array() -> None:
    with pytest.raises(BadInputError, match="expected an array"):
        injection_from_json(GOOD)


def test_gpus_outside_the_job_are_refused_with_both_numbers() -> None:
    injection = injection_from_json([GOOD])
    injection.check_gpus(4)
    with pytest.raises(BadInputError, match=r"GPU 3; the job has 3 GPUs \(0\.\.2\)"):
        injection.check_gpus(3)
