"""How both entry points start on CPU: the one line, the help, and what they refuse."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.ranks import RankOutcome, run_script
from tests.harness.training import ENTRY, TINY_GPT, Grid, read_lines, train

pytestmark = pytest.mark.e2e

RUN = ("-m", "malleus_megatron.run")


def refused(argv: Sequence[str | Path], ranks: int = 1) -> list[RankOutcome]:
    """Two ranks at most, exit status 2, one message and no traceback."""
    outcomes = run_script(ranks, argv, expect_exit=2)
    assert outcomes[0].output.count("malleus: ") == 1
    for outcome in outcomes:
        assert "Traceback" not in outcome.output
        assert outcome.rank == 0 or "malleus: " not in outcome.output
    return outcomes


def test_a_gpu_recipe_trains_and_one_line_says_what_was_replaced(tmp_path: Path):
    record = tmp_path / "losses.jsonl"
    flags = (
        "--distributed-backend nccl --transformer-impl transformer_engine --use-flash-attn "
        "--attention-backend flash --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
        "--high-priority-stream-groups dp_cp --te-rng-tracker --num-workers 8 --bf16 "
        "--use-precision-aware-optimizer --use-distributed-optimizer --log-straggler"
    ).split()
    outcomes = train(Grid(pipelines=2), record, *flags, iterations=2)
    lines = [line for line in outcomes[0].output.splitlines() if line.startswith("CPU mode: ")]
    assert len(lines) == 1
    assert lines[0].startswith("CPU mode: no GPU found; gloo, one process a GPU; replaced: ")
    for phrase in (
        "nccl → gloo",
        "--attention-backend → local attention",
        "without --log-straggler",
    ):
        assert phrase in lines[0]
    assert "CPU mode" not in outcomes[1].output
    assert [line["iteration"] for line in read_lines(record)] == [1, 2]


def test_all_that_a_cpu_cannot_do_is_refused_in_one_message():
    flags = "--fp8-format hybrid --cuda-graph-impl=local --tp-comm-overlap".split()
    message = refused([*ENTRY, *TINY_GPT, *flags], ranks=2)[0].output
    for flag in ("--fp8-format hybrid", "--cuda-graph-impl=local", "--tp-comm-overlap"):
        assert flag in message


def test_code_that_the_wheel_lacks_is_refused_by_name():
    message = refused([*ENTRY, *TINY_GPT, "--export-kd-teacher-load", "x"])[0].output
    assert "--export-kd-teacher-load (megatron.post_training (ModelOpt))" in message


def test_a_gpu_that_is_asked_for_and_absent_is_an_error():
    message = refused([*ENTRY, *TINY_GPT, "--malleus-device", "cuda"])[0].output
    assert "torch sees no GPU" in message


@pytest.mark.parametrize("words", [[], ["--lr", "1"], ["no/such/script.py"]])
def test_run_wants_a_script_first(words: list[str]):
    message = refused([*RUN, *words])[0].output
    assert words[0] in message if words else "No script" in message


@pytest.mark.parametrize("entry", [ENTRY, RUN])
def test_help_lists_megatrons_flags_and_ours(entry: tuple[str, str]):
    text = run_script(1, [*entry, "--help"])[0].output
    for flag in ("--tensor-model-parallel-size", "--use-distributed-optimizer", "--malleus-plan"):
        assert flag in text


SCRIPT = """
import sys
from pathlib import Path

import neighbour
import torch

assert sys.argv == [__file__, "--own", "1"] + sys.argv[3:]
assert Path(sys.path[0]) == Path(__file__).parent
assert torch.tensor([neighbour.VALUE], device="cuda").item() == 7
assert __name__ == "__main__"
print("done")
"""


def test_a_script_runs_as_it_would_by_itself(tmp_path: Path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    outcome = run_script(1, [*RUN, script, "--own", "1", "--malleus-device", "cpu"])[0]
    assert outcome.output.splitlines()[-1] == "done"
    assert "CPU mode: as asked;" in outcome.output
    assert "--malleus" not in outcome.output
