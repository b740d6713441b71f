"""schedule.json: scripted re-plans."""

import json
from pathlib import Path

import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.schedule import read_schedule

NOMINAL = nominal_plan(
    num_layers=4,
    num_microbatches=8,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    data_parallel_size=2,
)


def write(folder: Path, entries: list[object]) -> Path:
    for name, counts in {"b": (5, 3), "c": (2, 6)}.items():
        document = plan_to_json(NOMINAL.with_counts(counts))
        (folder / f"{name}.json").write_text(json.dumps(document))
    path = folder / "schedule.json"
    path.write_text(json.dumps(entries))
    return path


def test_a_plan_holds_from_its_iteration_on(tmp_path: Path) -> None:
    entries: list[object] = [
        {"iteration": 6, "plan": "c.json"},
        {"iteration": 3, "plan": "b.json"},
    ]
    schedule = read_schedule(write(tmp_path, entries))
    assert schedule.at(4) is None
    assert schedule.at(3) == NOMINAL.with_counts((5, 3))
    assert schedule.in_force(2) is None
    assert schedule.in_force(5) == NOMINAL.with_counts((5, 3))
    assert schedule.in_force(9) == NOMINAL.with_counts((2, 6))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"iteration": 0, "plan": "b.json"}], "iteration 0"),
        ([{"iteration": 3, "plan": "b.json"}] * 2, "iteration 3 has two plans"),
        ([{"iteration": 3, "plan": "missing.json"}], "missing.json"),
        ([{"iteration": 3}], "'plan' is missing"),
        ([{"iteration": "3", "plan": "b.json"}], "whole number"),
        ([{"iteration": 3, "plan": 7}], "file name"),
        ({"iteration": 3}, "array"),
    ],
)
def test_bad_schedules_say_what_is_wrong(
    tmp_path: Path, entries: list[object], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        read_schedule(write(tmp_path, entries))
