"""`malleus explain`: what it says of the uniform plan, and of a plan for another cluster."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.cli.main import main
from tests.harness.problems import problem

MEMORY = {"reference_tp": 1, "layer_mib_by_inflight": [100, 150], "fixed_mib": 50}
PLAN: dict[str, Any] = {
    "schema_version": 1,
    "num_layers": 8,
    "num_microbatches": 4,
    "pipelines": [
        {
            "num_microbatches": 4,
            "stages": [
                {"gpus": [0], "layers": [0, 1]},
                {"gpus": [1], "layers": [1, 3]},
                {"gpus": [2], "layers": [3, 5]},
                {"gpus": [3], "layers": [5, 8]},
            ],
        }
    ],
    "standby": [],
}


def explained(
    folder: Path, capsys: Any, asked: dict[str, Any], plan: dict[str, Any]
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, text and JSON."""
    (folder / "p.json").write_text(json.dumps(asked), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    words = ["explain", str(folder / "plan.json"), "--problem", str(folder / "p.json")]
    status = main(words)
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == status
    return status, text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("memory_mib", "fits"), [(650, True), (None, True), (420, False)], ids=["fits", "free", "less"]
)
def test_a_uniform_plan_that_does_not_fit_is_told(
    tmp_path: Path, capsys: Any, memory_mib: float | None, fits: bool
) -> None:
    asked = problem([4], 8, 4, cluster={"memory_mib": memory_mib})
    asked["model"]["memory"] = MEMORY
    _, text, document = explained(tmp_path, capsys, asked, PLAN)
    assert document["nominal_fits"] is fits
    told = "need 550 MiB a GPU; 420 MiB may be used." in text.split("The uniform plan would")[1]
    assert ("but does not fit in memory" in text) is told is not fits


def test_without_a_uniform_plan_nothing_is_said_of_its_memory(tmp_path: Path, capsys: Any) -> None:
    asked = problem([4], 8, 4, parallel={"tensor_parallel_sizes": [1, 4]})
    asked["model"]["layer_time_s"] = {"1": 1.0, "4": 0.3}
    plan = copy.deepcopy(PLAN)
    plan["pipelines"] = [
        {"num_microbatches": 2, "stages": [{"gpus": [gpu], "layers": [0, 8]}]} for gpu in (0, 1)
    ]
    plan["standby"] = [2, 3]
    _, text, document = explained(tmp_path, capsys, asked, plan)
    assert "There is no uniform plan" in text
    assert document["nominal_fits"] is None


def test_gpus_that_the_plan_does_not_know_are_a_fault(tmp_path: Path, capsys: Any) -> None:
    asked = problem([4, 4], 8, 4, rates={"5": 3.0})
    status, text, document = explained(tmp_path, capsys, asked, PLAN)
    assert status == 2
    fault = (
        "The plan names 4 GPUs; the problem has 8. The first that is missing is GPU 4: "
        "a GPU without layers belongs into `standby`."
    )
    assert document["faults"] == [fault]
    assert f"FAULT: {fault}" in text
    assert "): on standby" not in text

    listed = PLAN | {"standby": [4, 5, 6, 7]}
    status, text, document = explained(tmp_path, capsys, asked, listed)
    assert (status, document["faults"]) == (0, [])
    assert "GPU 5 (rate 3): on standby" in text


def test_gpus_that_the_problem_does_not_have_are_an_error(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p.json").write_text(json.dumps(problem([2], 8, 4)), encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    words = ["explain", str(tmp_path / "plan.json"), "--problem", str(tmp_path / "p.json")]
    assert main(words) == 2
    assert "The plan names GPU 2; the problem has 0..1." in capsys.readouterr().err


def test_what_was_proved_is_said_of_the_same_problem_only(tmp_path: Path, capsys: Any) -> None:
    """Healed GPUs that the plan does without change nothing in it, but another plan is better."""
    asked = problem([4], 8, 4, rates={"0": 9.0})
    healed = asked | {"rates": {}}
    (tmp_path / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    assert main(["plan", str(tmp_path / "asked.json"), "--out", str(tmp_path / "made.json")]) == 0
    capsys.readouterr()
    plan = json.loads((tmp_path / "made.json").read_text(encoding="utf-8"))
    proved = plan["predicted"]["lower_bound"]
    _, text, document = explained(tmp_path, capsys, asked, plan)
    assert document["lower_bound"] == proved
    assert f"no plan is below {proved:.6g}, as was proved" in text
    for other in (healed, problem([4], 8, 8, rates={"0": 9.0})):
        _, text, document = explained(tmp_path, capsys, other, plan)
        assert document["lower_bound"] is None
        assert "is not known of this problem" in text
