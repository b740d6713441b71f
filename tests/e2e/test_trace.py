"""`--malleus-trace`: what the GPUs of a job did, read by `malleus whatif`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.cli.main import main
from malleus_megatron.cli.own_trace import read_own
from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.whatif.analysis import analyse
from malleus_megatron.whatif.trace_folder import trace_files
from tests.harness.plans import plan_of
from tests.harness.ranks import run_script
from tests.harness.training import (
    TINY_GPT,
    Grid,
    assert_same_training,
    read_lines,
    train,
    write_json,
)
from tests.unit.whatif_pipeline import Pipelines, to_rows

pytestmark = pytest.mark.e2e

TWO_BY_TWO = Grid(pipelines=2, stages=2)
FORWARD_S, BACKWARD_S = 0.04, 0.08
ALONE = ("--malleus", "--malleus-sidecar", "none")
KILLED_AT = Path(__file__).with_name("killed_at.py")
SLOW_LINK = Path(__file__).with_name("slow_link.py")
LONG_S = 600.0


@pytest.fixture
def pace(tmp_path: Path) -> Path:
    times = {"layer_forward_s": {"1": FORWARD_S}, "layer_backward_s": {"1": BACKWARD_S}}
    return write_json(tmp_path / "pace.json", times)


@pytest.fixture
def whatif(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], dict[str, Any]]:
    def ask(path: Path) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["whatif", str(path), "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return ask


@pytest.mark.timeout(LONG_S)
def test_a_killed_jobs_trace_names_the_slow_gpu(
    tmp_path: Path, pace: Path, whatif: Callable[[Path], dict[str, Any]]
) -> None:
    """GPU 2 is stage 1 of pipeline 0. What S should be, 1F1B says, played with the times that the
    GPUs measured of themselves.
    """
    injected = [{"gpu": 2, "rate": 2.5, "from_iteration": 1, "to_iteration": None}]
    run_script(
        TWO_BY_TWO.world,
        [
            KILLED_AT,
            *(*TINY_GPT, *TWO_BY_TWO.flags, *ALONE, "--train-iters", "20"),
            *("--malleus-log-dir", tmp_path, "--malleus-trace", "2", "--malleus-pace", pace),
            *("--malleus-inject", write_json(tmp_path / "injection.json", injected)),
        ],
        env={"KILLED_AT": "11"},
        timeout_s=LONG_S,
        expect_exit=None,
    )
    found = whatif(tmp_path / "trace")
    assert found["num_steps"] == 5
    assert [(one["dp_rank"], one["stage"]) for one in found["stragglers"]] == [(0, 1)]
    assert 1.4 < found["stragglers"][0]["rate"] < 3
    assert found["by_worker"][0].items() >= {"dp_rank": 0, "stage": 1}.items()
    played = analyse(to_rows(played_again(tmp_path / "trace").rows()))
    assert found["slowdown"] == pytest.approx(played.what_if.slowdown, rel=0.12)
    assert found["step_time_s"] == pytest.approx(played.what_if.step_time_s, rel=0.12)
    assert found["replan"]["lower_bound_s"] <= found["replan"]["replanned_step_time_s"]
    assert found["replan"]["replanned_step_time_s"] < 0.9 * found["replan"]["present_step_time_s"]
    assert list(found["replan"]["rates"]) == ["2"]
    events = read_lines(tmp_path / "events.jsonl")
    assert not [event for event in events if event["event"] == "slow_link"]
    measured_s = [
        event["step_time_s"]
        for event in events
        if event["event"] == "iteration" and event["iteration"] in {2, 4, 6, 8, 10}
    ]
    assert found["measured_step_time_s"] == pytest.approx(sum(measured_s) / 5, rel=0.15)
    assert found["causes"]["gaps"] < 1.15


def played_again(folder: Path) -> Pipelines:
    """1F1B of two stages in which each worker takes what its GPU measured in each iteration."""
    own = read_own(trace_files(folder))
    assert own is not None
    measured = {
        (one.iteration, sample.gpu): sample for one in own.observations for sample in one.samples
    }

    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        [gpu] = own.plan.pipelines[dp_rank].stages[stage].gpus
        sample = measured[step, gpu]
        return sample.stage_forward_s if kind == "forward" else sample.stage_backward_s

    steps = [one.iteration for one in own.observations]
    return Pipelines(num_microbatches=4, steps=steps, time_of=time_of)


@pytest.mark.timeout(LONG_S)
def test_a_slow_link_is_named_and_no_gpu(
    tmp_path: Path, pace: Path, whatif: Callable[[Path], dict[str, Any]]
) -> None:
    """GPU 0 is stage 0 of pipeline 0, and sends to GPU 2."""
    outcomes = run_script(
        TWO_BY_TWO.world,
        [
            SLOW_LINK,
            *(*TINY_GPT, *TWO_BY_TWO.flags, *ALONE, "--train-iters", "5"),
            *("--malleus-log-dir", tmp_path, "--malleus-trace", "1", "--malleus-pace", pace),
        ],
        env={"SLOW_LINK_S": "0.2"},
        timeout_s=LONG_S,
    )
    told = [one for one in read_lines(tmp_path / "events.jsonl") if one["event"] == "slow_link"]
    assert [(one["gpus"], one["peers"], one["is_slow"]) for one in told] == [([0], [2], True)]
    assert told[0]["seconds"] > 0.19
    assert "the link between GPU 0 and GPU 2 is slow" in outcomes[0].output
    found = whatif(tmp_path / "trace")
    assert found["stragglers"] == []
    assert found["replan"]["rates"] == {}
    assert found["causes"]["communication"] > found["causes"]["gpus"]


UNEVEN = plan_of((3, [((0,), 3), ((1,), 1)]), (5, [((2,), 4)]), standby=[3])


@pytest.mark.timeout(LONG_S)
def test_a_trace_under_an_uneven_plan(
    tmp_path: Path, pace: Path, whatif: Callable[[Path], dict[str, Any]]
) -> None:
    """Pipeline 0 has two stages and three micro-batches, pipeline 1 one stage and five."""
    injected = [{"gpu": 1, "rate": 8.0, "from_iteration": 1, "to_iteration": None}]
    plan = write_json(tmp_path / "plan.json", plan_to_json(UNEVEN))
    traced, plain = tmp_path / "traced.jsonl", tmp_path / "plain.jsonl"
    under = (*ALONE, "--malleus-plan", plan)
    train(
        TWO_BY_TWO,
        traced,
        *under,
        *("--malleus-log-dir", tmp_path, "--malleus-trace", "1", "--malleus-pace", pace),
        *("--malleus-inject", write_json(tmp_path / "injection.json", injected)),
        timeout_s=LONG_S,
    )
    found = whatif(tmp_path / "trace")
    assert found["uneven"]
    assert found["num_steps"] == 4
    assert [(one["dp_rank"], one["stage"]) for one in found["stragglers"]] == [(0, 1)]
    assert "GPU 1" in found["diagnosis"]
    assert found["slowdown"] > 1.1
    assert found["step_time_s"] == pytest.approx(found["measured_step_time_s"], rel=0.2)
    # Three layers against one at eight times their time, and four: 3, 8 and 4 of a layer's.
    assert found["stage_times_s"][0][1] > 1.7 * found["stage_times_s"][0][0]
    assert found["replan"]["replanned_step_time_s"] < found["replan"]["present_step_time_s"]
    train(TWO_BY_TWO, plain, *under, timeout_s=LONG_S)
    assert_same_training(traced, plain, relative=0)


@pytest.mark.timeout(LONG_S)
def test_a_heavy_last_stage_is_no_slow_gpu(
    tmp_path: Path, pace: Path, whatif: Callable[[Path], dict[str, Any]]
) -> None:
    """Stage 0 has one layer of four; the losses are those of a job without a trace."""
    recipe = ("--decoder-first-pipeline-num-layers", "1")
    traced, stock = tmp_path / "traced.jsonl", tmp_path / "stock.jsonl"
    flags = ("--malleus-log-dir", tmp_path, "--malleus-trace", "1", "--malleus-pace", pace)
    train(TWO_BY_TWO, traced, *recipe, *ALONE, *flags, timeout_s=LONG_S)
    found = whatif(tmp_path / "trace")
    assert found["stragglers"] == []
    assert found["diagnosis"].startswith("The last stage (stage 1) is too heavy")
    assert found["stage_times_s"][1] == pytest.approx(3 * found["stage_times_s"][0], rel=0.2)
    assert found["by_stage"][1] == max(found["by_stage"])
    assert found["m_s"] > 0.5
    train(TWO_BY_TWO, stock, *recipe, timeout_s=LONG_S)
    assert_same_training(traced, stock, relative=0)
