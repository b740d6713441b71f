"""A job with wrong input says one sentence with the numbers and ends with status 2, untrained."""

from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.errors import EXIT_BAD_INPUT
from tests.harness.ranks import run_script
from tests.harness.training import TINY_GPT, Grid, train, write_json

pytestmark = pytest.mark.e2e

TWO = Grid(pipelines=2)


def plan_file(folder: Path, document: dict[str, Any]) -> list[str]:
    return ["--malleus-plan", str(write_json(folder / "plan.json", document))]


def unknown_version(folder: Path) -> list[str]:
    return plan_file(folder, TWO.plan((5, 3)) | {"schema_version": 7})


def another_world(folder: Path) -> list[str]:
    return plan_file(folder, Grid(pipelines=4).plan((3, 1, 2, 2)))


def other_layers(folder: Path) -> list[str]:
    return plan_file(folder, Grid(pipelines=1, stages=2, num_layers=6).plan((8,)))


def gpu_twice(folder: Path) -> list[str]:
    plan = TWO.plan((5, 3))
    plan["pipelines"][1]["stages"][0]["gpus"] = [0]
    return plan_file(folder, plan)


def heads_that_do_not_divide(folder: Path) -> list[str]:
    plan = Grid(pipelines=1, tp=2).plan((8,))
    return [*plan_file(folder, plan), "--num-attention-heads", "1"]


def query_groups_that_do_not_divide(folder: Path) -> list[str]:
    plan = Grid(pipelines=1, tp=2).plan((8,))
    return [*plan_file(folder, plan), "--group-query-attention", "--num-query-groups", "1"]


def moved_layers_at_a_lower_level(folder: Path) -> list[str]:
    plan = Grid(pipelines=1, stages=2).plan((8,))
    return [*plan_file(folder, plan), "--log-params-norm"]


def other_batch(folder: Path) -> list[str]:
    return plan_file(folder, Grid(pipelines=2, num_microbatches=10).plan((7, 3)))


def missing_gpu(folder: Path) -> list[str]:
    plan = TWO.plan((5, 3))
    plan["pipelines"][1]["stages"][0]["gpus"] = [5]
    write_json(folder / "plan.json", plan)
    schedule = write_json(folder / "schedule.json", [{"iteration": 3, "plan": "plan.json"}])
    return ["--malleus-plan-schedule", str(schedule)]


def negative_rate(folder: Path) -> list[str]:
    entry = {"gpu": 1, "rate": -2.5, "from_iteration": 1, "to_iteration": None}
    return ["--malleus-inject", str(write_json(folder / "injection.json", [entry]))]


def rate_that_is_no_number(folder: Path) -> list[str]:
    entry = {"gpu": 1, "rate": float("nan"), "from_iteration": 1, "to_iteration": None}
    return ["--malleus-inject", str(write_json(folder / "injection.json", [entry]))]


def pace_without_the_degree(folder: Path) -> list[str]:
    pace = {"layer_forward_s": {"4": 0.01}, "layer_backward_s": {"4": 0.02}}
    return ["--malleus-pace", str(write_json(folder / "pace.json", pace))]


def pace_beyond_any_layer(folder: Path) -> list[str]:
    pace = {"layer_forward_s": {"1": 1e308}, "layer_backward_s": {"1": 1e308}}
    return ["--malleus-pace", str(write_json(folder / "pace.json", pace))]


def empty_path(folder: Path) -> list[str]:
    return ["--malleus-plan", ""]


def plan_without_a_pace(folder: Path) -> list[str]:
    pace = {"layer_forward_s": {"1": 0.01}, "layer_backward_s": {"1": 0.02}}
    plan = Grid(pipelines=1, tp=2).plan((8,))
    return [
        *plan_file(folder, plan),
        *("--malleus-pace", str(write_json(folder / "pace.json", pace))),
    ]


def level_out_of_reach(folder: Path) -> list[str]:
    return ["--malleus-require", "reshape", "--log-params-norm"]


def odd_sidecar(folder: Path) -> list[str]:
    return ["--malleus-sidecar", "ftp://there"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (unknown_version, "schema_version 7"),
        (another_world, "4 GPUs (0..3); the job has 2 (0..1)"),
        (other_layers, "6 layers; the model has 4"),
        (gpu_twice, "GPU 0 stands in the plan twice"),
        (heads_that_do_not_divide, "attention heads 1"),
        (query_groups_that_do_not_divide, "query groups 1"),
        (moved_layers_at_a_lower_level, "level reshape"),
        (other_batch, "10 micro-batches a step; the job has 8"),
        (missing_gpu, "(0, 5)"),
        (negative_rate, "-2.5"),
        (rate_that_is_no_number, "nan"),
        (pace_without_the_degree, "TP degree 1"),
        (plan_without_a_pace, "TP degree 2"),
        (pace_beyond_any_layer, "at most 3600 s"),
        (empty_path, "--malleus-plan: the path is empty"),
        (level_out_of_reach, "this job reaches rebalance"),
        (odd_sidecar, "ftp://there"),
    ],
)
def test_one_message_and_status_2(flags: Any, message: str, tmp_path: Path) -> None:
    record = tmp_path / "losses.jsonl"
    ranks = train(TWO, record, "--malleus", *flags(tmp_path), expect_exit=EXIT_BAD_INPUT)
    lines = [line for rank in ranks for line in rank.output.splitlines() if "malleus: " in line]
    errors = [line for line in lines if message in line]
    assert len(errors) == 1, lines
    assert not any("Traceback" in rank.output for rank in ranks)
    assert not record.exists()


UNLIKE = {
    "absent": (None, "plan-1.json"),
    "another plan": (TWO.plan((3, 5)), "not what rank 0 has, on rank 1. Give the same file"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_a_file_that_is_not_the_same_on_all_nodes_stops_all_ranks(
    case: str, tmp_path: Path
) -> None:
    """Rank 1 runs in a folder of its own; no rank may wait for one that has left."""
    other, said = UNLIKE[case]
    good = write_json(tmp_path / "plan-0.json", TWO.plan((5, 3)))
    if other is not None:
        write_json(tmp_path / "plan-1.json", other)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"mine = {str(good)!r}.replace('-0', '-' + os.environ['RANK'])\n"
        "sys.argv[sys.argv.index('PLAN')] = mine\n"
        "runpy.run_module('malleus_megatron.pretrain_gpt', run_name='__main__', alter_sys=True)\n"
    )
    ranks = run_script(
        2,
        [
            script,
            *TINY_GPT,
            *TWO.flags,
            "--train-iters",
            "2",
            "--malleus",
            "--malleus-plan",
            "PLAN",
        ],
        expect_exit=EXIT_BAD_INPUT,
    )
    messages = [rank.output.count("malleus: rank 1: ") for rank in ranks]
    assert messages == [1, 0]
    assert "plan-1.json" in ranks[0].output
    assert said in ranks[0].output
