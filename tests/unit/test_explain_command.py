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
