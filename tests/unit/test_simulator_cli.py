"""`malleus simulate`: the table, the document, the picture, and what it refuses."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.cli.main import main
from malleus_megatron.simulator.policies import POLICIES
from tests.harness.problems import problem

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    asked = problem(
        [4, 4],
        8,
        16,
        model={"layer_time_s": {"1": 2.0, "2": 1.1}},
        parallel={"tensor_parallel_sizes": [1, 2], "num_pipelines": 2},
    )
    trace = [{"gpu": 1, "rate": 4.0, "from_iteration": 6, "to_iteration": 40}]
    return save(tmp_path / "problem.json", asked), save(tmp_path / "trace.json", trace)


def save(path: Path, document: Any) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_the_table_has_a_line_for_each_policy(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", files[0], "--trace", files[1]]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(POLICIES)]] == list(POLICIES)
    assert "89 iterations, 3 situations" in captured.out
    stock = lines[1 + list(POLICIES).index("stock")].split()
    assert float(stock[1]) == pytest.approx(89 * float(stock[2]), rel=1e-4)


def test_the_document_is_one_line_of_json_and_the_same_every_time(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", files[0], "--trace", files[1], "--policy", "malleus, stock", "--json"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert first.count("\n") == 1
    document = json.loads(first)
    assert document["schema_version"] == 1
    assert set(document["policies"]) == {"malleus", "stock"}
    malleus, stock = document["policies"]["malleus"], document["policies"]["stock"]
    assert malleus["num_replans"] == len(malleus["plan_changes"]) >= 2
    assert malleus["plan_changes"][0]["waited_iterations"] == 5
    assert malleus["total_s"] < stock["total_s"]
    assert stock["ratio_to_healthy"] == pytest.approx(
        stock["mean_step_time_s"] / document["healthy_step_time_s"]
    )
    assert stock["ratio_to_bound"] > malleus["ratio_to_bound"] > 1
    total_s = sum(
        span["step_time_s"] * (span["to_iteration"] - span["from_iteration"])
        for span in malleus["step_times"]
    )
    assert total_s == pytest.approx(malleus["total_s"])


def test_the_picture_has_a_line_for_each_policy_and_needs_nothing_else(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.svg"
    assert main(["simulate", files[0], "--trace", files[1], "--plot", str(out)]) == 0
    capsys.readouterr()
    text = out.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    paths = root.findall(f"{SVG}path[@class]")
    assert len(paths) == len(POLICIES)
    assert {element.text for element in root.iter(f"{SVG}text")} >= set(POLICIES)
    assert "href" not in text
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for path in paths:
        for point in path.attrib["d"].removeprefix("M").split("L"):
            x, y = map(float, point.split())
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert [title.text for title in root.iter(f"{SVG}title") if "malleus" in str(title.text)]


def test_costs_that_the_problem_does_not_say_are_flags(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> dict[str, Any]:
        assert main(["simulate", files[0], "--trace", files[1], "--json", *words]) == 0
        policies: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)["policies"]
        return policies["malleus"]

    plain = run("--policy", "malleus")
    dear = run(
        *("--policy", "malleus", "--migration-seconds", "50", "--layer-state-mib", "1000"),
        *("--migration-bytes-per-second", "1e8"),
    )
    slow = run("--policy", "malleus", "--transfer-seconds", "0.5", "--gradient-seconds", "7")
    assert plain["paused_s"] == 2.0 * plain["num_replans"]
    assert dear["plan_changes"][0]["moved_bytes"] > 0
    assert dear["plan_changes"][0]["pause_s"] > 50 + 1000 / 100
    assert slow["step_times"][0]["step_time_s"] > plain["step_times"][0]["step_time_s"] + 7


def test_rates_of_the_problem_are_left_out_and_that_is_said(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", files[0], "--trace", files[1], "--policy", "stock"]
    assert main(command) == 0
    plain = capsys.readouterr()
    document = json.loads(Path(files[0]).read_text(encoding="utf-8"))
    save(Path(files[0]), document | {"rates": {"0": 9.0}})
    assert main(command) == 0
    rated = capsys.readouterr()
    assert rated.out == plain.out
    assert "left out" in rated.err
    assert "left out" not in plain.err


@pytest.mark.parametrize(
    ("trace", "words", "said"),
    [
        ([{"gpu": 8, "rate": 2, "from_iteration": 1}], [], "GPU 8; the job has 8 GPUs"),
        ([{"gpu": 0, "rate": 0, "from_iteration": 1}], [], "rate 0"),
        ([{"gpu": 0, "rate": -2.5, "from_iteration": 1}], [], "rate -2.5"),
        ([{"gpu": 0, "rate": float("nan"), "from_iteration": 1}], [], "rate nan"),
        ([{"gpu": 0, "rate": "fast", "from_iteration": 1}], [], "GPU 0: rate 'fast'"),
        ([{"gpu": 0, "rate": "inf", "from_iteration": 1}], [], "not a number"),
        ([{"gpu": 0, "rate": 2, "from_iteration": 0}], [], "from_iteration 0"),
        ({"gpu": 0}, [], "expected an array"),
        ([], ["--policy", "malleus,oracle"], "'oracle'"),
        ([], ["--policy", ""], "''"),
        ([], ["--iterations", "0"], "iterations: 0"),
        ([], ["--forward-share", "1.5"], "1.5"),
        ([], ["--restart-seconds", "-1"], "-1"),
        ([], ["--migration-bytes-per-second", "0"], "0"),
        ([], ["--policy", "stock", "--plot", "missing/out.svg"], "missing"),
        ([], ["--plot", "out.png"], "--plot out.png: SVG is written; the name must end with .svg."),
    ],
)
def test_bad_input_is_status_2_with_the_value(
    trace: Any,
    words: list[str],
    said: str,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(Path(files[1]), trace)
    assert main(["simulate", files[0], "--trace", files[1], *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_job_that_no_plan_fits_is_status_1(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(Path(files[0]).read_text(encoding="utf-8"))
    document["batch"]["num_microbatches"] = 1
    save(Path(files[0]), document)
    assert main(["simulate", files[0], "--trace", files[1]]) == 1
    assert "1 micro-batches for 2 pipelines" in capsys.readouterr().err


def test_its_help_loads_neither_planner_nor_solver() -> None:
    code = (
        "import sys\n"
        "from malleus_megatron.cli.main import main\n"
        "try:\n"
        "    main(['simulate', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = [m for m in sys.modules if m.startswith(('ortools', 'numpy', 'torch'))\n"
        "         or 'planner' in m or 'simulator.' in m]\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--trace" in done.stdout


def test_another_ending_is_refused_before_the_work(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", files[0], "--trace", files[1], "--plot", "out"]) == 2
    assert "simulate: " not in capsys.readouterr().err
