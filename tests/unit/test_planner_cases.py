"""Situations that people report (cases 1 to 5 and 10); problems that are wrong or impossible."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.cli.main import main
from malleus_megatron.cost.validity import plan_faults
from malleus_megatron.errors import BadInputError, InfeasiblePlanError
from malleus_megatron.plan.codec import plan_from_json, plan_to_json, read_rates
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner.search import make_plan
from tests.harness.check_plan import faults
from tests.harness.problems import problem

MEMORY = {"reference_tp": 1, "layer_mib_by_inflight": [100, 120], "fixed_mib": 50}


def layers_of(document: dict[str, Any]) -> list[int]:
    plan = make_plan(problem_from_json(document))
    assert faults(document, plan_to_json(plan)) == []
    return [stage.num_layers for stage in plan.pipelines[0].stages]


def write(path: Path, document: Any) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("num_layers", [30, 46])
def test_layers_that_do_not_divide_are_not_lost(num_layers: int) -> None:
    layers = layers_of(problem([4], num_layers, 64))
    assert len(layers) == 4
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) == 1


def test_the_faster_stage_has_more_of_an_odd_number_of_layers() -> None:
    document = problem([2], 7, 8, rates={"1": 0.75}, rate_floor=0.0)
    plan = make_plan(problem_from_json(document))
    by_gpu = {stage.gpus[0]: stage.num_layers for stage in plan.pipelines[0].stages}
    assert by_gpu == {0: 3, 1: 4}


def test_below_the_rate_floor_the_truly_faster_gpu_still_has_more() -> None:
    plan = make_plan(problem_from_json(problem([2], 7, 8, rates={"1": 0.75})))
    by_gpu = {stage.gpus[0]: stage.num_layers for stage in plan.pipelines[0].stages}
    assert by_gpu == {0: 3, 1: 4}


def test_the_heaviest_stage_is_the_one_that_is_checked() -> None:
    document = problem([4], 8, 1, cluster={"memory_mib": 300})
    document["model"]["memory"] = MEMORY | {"layer_mib_by_inflight": [100]}
    asked = problem_from_json(document)
    ends = [0, 1, 3, 5, 8]
    stages = [{"gpus": [j], "layers": ends[j : j + 2]} for j in range(4)]
    plan = plan_from_json(
        {
            "schema_version": 1,
            "num_layers": 8,
            "num_microbatches": 1,
            "pipelines": [{"num_microbatches": 1, "stages": stages}],
        }
    )
    assert plan_faults(asked, plan) == [
        "Pipeline 0, stage 3: 3 layers on 1 GPUs [3] need 350 MiB a GPU; 300 MiB may be used."
    ]


def test_memory_that_is_too_small_is_named(tmp_path: Path, capsys: Any) -> None:
    document = problem([4], 8, 4, cluster={"memory_mib": 1000})
    document["model"]["memory"] = MEMORY | {"layer_mib_by_inflight": [2000]}
    assert main(["plan", write(tmp_path / "p.json", document)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2000 MiB" in captured.err
    assert "1000 MiB" in captured.err


def test_a_model_that_does_not_fit_the_cluster_is_explained() -> None:
    document = problem([4], 80, 4, cluster={"memory_mib": 1000})
    document["model"]["memory"] = MEMORY
    with pytest.raises(InfeasiblePlanError, match="80 layers do not fit: 4 usable GPUs"):
        make_plan(problem_from_json(document))


def test_a_gpu_missing_in_the_rates_is_healthy(tmp_path: Path) -> None:
    write(tmp_path / "rates.json", {"rates": {"1": 2.0}})
    assert read_rates(tmp_path / "rates.json")[0] == 1.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"rates": {"3": NaN}}', "GPU 3: rate nan"),
        ('{"rates": {"3": -2.5}}', "GPU 3: rate -2.5"),
        ('{"rates": {"3": "fast"}}', "GPU 3: rate 'fast'"),
        ('{"rates": {"3": true}}', "GPU 3: rate True"),
        ('{"rates": {"9": 2.0}}', "GPU 9 is not one of 0..3"),
    ],
)
def test_wrong_rates_name_gpu_and_value(tmp_path: Path, capsys: Any, text: str, told: str) -> None:
    (tmp_path / "rates.json").write_text(text, encoding="utf-8")
    asked = write(tmp_path / "p.json", problem([4], 8, 4))
    assert main(["plan", asked, "--rates", str(tmp_path / "rates.json")]) == 2
    assert told in capsys.readouterr().err


WRONG: list[tuple[str, str, Any, str]] = [
    ("cluster", "gpus_per_node", [], "cluster.gpus_per_node: [] names no node"),
    ("cluster", "gpus_per_node", [4, 0], "cluster.gpus_per_node[1]: 0 GPUs"),
    ("cluster", "gpus_per_node", 4, "cluster.gpus_per_node: expected an array, got 4"),
    ("cluster", "memory_mib", 1000, "model.memory is missing"),
    ("cluster", "memory_mib", "much", "cluster.memory_mib: expected a finite number, got 'much'"),
    ("model", "num_layers", 0, "model.num_layers: 0"),
    ("model", "num_layers", "8", "model.num_layers: expected a whole number, got '8'"),
    ("model", "layer_time_s", {}, "model.layer_time_s: names no TP degree"),
    ("model", "layer_time_s", {"one": 1.0}, "model.layer_time_s: 'one' is not a TP degree"),
    ("model", "layer_time_s", {"1": -1.0}, "model.layer_time_s[1]: -1.0 s"),
    ("model", "head_time_s", -1, "model.head_time_s: -1.0 s"),
    ("batch", "num_microbatches", 0, "batch.num_microbatches: 0"),
    ("batch", "num_microbatches", 2.5, "batch.num_microbatches: expected a whole number, got 2.5"),
    ("parallel", "tensor_parallel_sizes", [8], "8 is larger than a node; the largest has 4 GPUs"),
    ("parallel", "tensor_parallel_sizes", [2], "2 has no time in model.layer_time_s"),
    ("parallel", "tensor_parallel_sizes", [], "parallel.tensor_parallel_sizes: [] allows no"),
    ("parallel", "num_pipelines", 5, "parallel.num_pipelines: 5 pipelines for 4 GPUs"),
    ("parallel", "num_pipelines", 0, "parallel.num_pipelines: 0"),
    ("parallel", "num_pipelines", True, "parallel.num_pipelines: expected a whole number"),
]


@pytest.mark.parametrize(("section", "field", "value", "told"), WRONG)
def test_a_wrong_problem_exits_2_and_names_the_field(
    tmp_path: Path, capsys: Any, section: str, field: str, value: Any, told: str
) -> None:
    document = problem([4], 8, 4)
    document[section][field] = value
    assert main(["plan", write(tmp_path / "p.json", document)]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schema_version": 2}, "schema_version 2 is not known"),
        ({"model": None}, "model: expected an object, got None"),
        ({"rate_floor": -1}, "rate_floor: -1.0"),
    ],
)
def test_a_wrong_document_is_refused(changes: dict[str, Any], told: str) -> None:
    document = problem([4], 8, 4) | changes
    with pytest.raises(BadInputError) as caught:
        problem_from_json(document)
    assert told in str(caught.value)


def test_a_missing_section_is_named() -> None:
    document = problem([4], 8, 4)
    del document["batch"]
    with pytest.raises(BadInputError, match="'batch' is missing"):
        problem_from_json(document)


def test_a_file_that_is_no_json_exits_2(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p.json").write_text("{", encoding="utf-8")
    assert main(["plan", str(tmp_path / "p.json")]) == 2
    assert main(["plan", str(tmp_path / "absent.json")]) == 2
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rates": {str(gpu): "inf" for gpu in range(4)}}, "the 0 GPUs that have not failed"),
        (
            {"parallel": {"num_pipelines": 3}, "rates": {"0": None, "1": None}},
            "3 pipelines need 3 TP groups; the 2 GPUs",
        ),
        (
            {"parallel": {"num_pipelines": 3}, "batch": {"num_microbatches": 2}},
            "2 micro-batches for 3 pipelines",
        ),
    ],
)
def test_an_impossible_problem_exits_1_with_the_numbers(
    tmp_path: Path, capsys: Any, changes: dict[str, Any], told: str
) -> None:
    asked = write(tmp_path / "p.json", problem([4], 8, 4, **copy.deepcopy(changes)))
    assert main(["plan", asked]) == 1
    assert told in capsys.readouterr().err


def test_json_is_all_that_is_on_standard_output(tmp_path: Path, capsys: Any) -> None:
    document = problem([4], 8, 4, rates={"1": 3.0})
    asked = write(tmp_path / "p.json", document)
    out = tmp_path / "plan.json"
    assert main(["plan", asked, "--json", "--out", str(out), "--objective", "bottleneck"]) == 0
    printed = capsys.readouterr().out
    assert printed == out.read_text(encoding="utf-8")
    plan = json.loads(printed)
    assert faults(document, plan) == []
    assert plan["objective"] == "bottleneck"

    assert main(["explain", str(out), "--problem", asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stragglers"][0]["gpu"] == 1
    assert found["bottleneck"] == plan["predicted"]["bottleneck"]
    assert found["nominal_healthy_step_time_s"] < found["nominal_step_time_s"]
    assert found["faults"] == []


def test_explain_of_a_plan_that_does_not_fit_is_status_2(tmp_path: Path, capsys: Any) -> None:
    asked = write(tmp_path / "p.json", problem([4], 8, 16))
    out = tmp_path / "plan.json"
    assert main(["plan", asked, "--out", str(out)]) == 0
    other = write(tmp_path / "other.json", problem([4], 8, 16, rates={"1": "inf"}))
    capsys.readouterr()
    assert main(["explain", str(out), "--problem", other]) == 2
    assert "FAULT: " in capsys.readouterr().out


def test_explain_says_who_bounds_the_step(tmp_path: Path, capsys: Any) -> None:
    document = problem([4], 8, 16, rates={"1": 1.5})
    out = tmp_path / "plan.json"
    asked = write(tmp_path / "p.json", document)
    assert main(["plan", asked, "--out", str(out)]) == 0
    assert "2 on standby" not in capsys.readouterr().out
    assert main(["explain", str(out), "--problem", asked]) == 0
    told = capsys.readouterr().out
    assert "Pipeline 0 ends last" in told
    assert "GPU 1 (rate 1.5)" in told
    assert main(["explain", str(out)]) == 0


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys\n"
        "from malleus_megatron.cli.main import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'ortools', 'torch', 'numpy', 'pandas'} & set(sys.modules)\n"
        "sys.exit(1 if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0
