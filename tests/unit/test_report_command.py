"""`malleus report`: one file that needs nothing else, the same numbers as JSON, and refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from malleus_megatron.cli.main import main
from tests.harness.logs import CHANGES, HOSTILE, LAST, RETURNS, SLOW_GPU, job_events, write_log
from tests.unit.test_pages import Reader

LOADS = {"src", "href", "srcset", "data", "action", "poster", "formaction", "background"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_log(tmp_path / "log", job_events())
    return tmp_path / "log"


def numbers(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["report", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_file_is_written_and_the_sentence_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"GPU {SLOW_GPU} slowed down to rate 2.57")
    assert said.endswith(f"Written: {folder / 'report.html'}\n")
    assert [path.name for path in folder.glob("*.html")] == ["report.html"]
    page = Reader((folder / "report.html").read_text(encoding="utf-8"))
    assert said.splitlines()[0] in page.text


def test_the_page_loads_nothing_and_may_load_nothing(folder: Path) -> None:
    out = folder / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    page = Reader(text)
    assert [name for name, attributes in page.found if LOADS & attributes.keys()] == []
    assert not re.search(r"https?://|url\(|@import|//cdn", text)
    [policy] = [a["content"] or "" for _, a in page.found if "http-equiv" in a]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert rules["style-src"].startswith("'sha256-")
    assert "connect-src" not in rules
    assert [a for _, a in page.found if "style" in a or any(k.startswith("on") for k in a)] == []


def test_what_a_warning_says_is_text(folder: Path) -> None:
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert HOSTILE in Reader(re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)).text
    assert text.count("<script") == 1


def test_the_numbers_are_those_of_the_events(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = numbers(capsys, str(folder))
    assert not (folder / "report.html").exists()
    steps = [event for event in job_events() if event["event"] == "iteration"]
    for phase in told["phases"]:
        own = [s["step_time_s"] for s in steps if s["generation"] == phase["generation"]]
        assert (phase["median_s"], phase["lowest_s"], phase["highest_s"]) == (
            median(own), min(own), max(own),
        )  # fmt: skip
        assert phase["num_iterations"] == len(own)
    assert [band["middle"] for band in told["losses"]] == [step["loss"] for step in steps]
    assert [(move["iteration"], move["num_bytes"]) for move in told["moves"]] == [
        (CHANGES, 3 * 2**20), (RETURNS, 3 * 2**20),
    ]  # fmt: skip
    assert (told["generation"], told["last_iteration"], told["num_gpus"]) == (2, LAST, 4)
    assert told["plan"]["pipelines"][0]["num_microbatches"] == 8
    assert told["stragglers"][0]["rate"] == 2.57
    assert told["notes"] == []


def test_of_several_runs_the_last_is_shown_and_each_can_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(folder, job_events(first=31, last=35))
    last = numbers(capsys, str(folder))
    assert (last["run"], last["first_iteration"], last["last_iteration"]) == (2, 31, 35)
    assert [run["last_iteration"] for run in last["runs"]] == [LAST, 35]
    assert numbers(capsys, str(folder), "--run", "1")["last_iteration"] == LAST
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "run 2 of 2" in text
    assert "run 1: iterations 1 to 40, 2 plans" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}/nowhere"], "events.jsonl: No such file or directory. A job writes it with "),
        (["{folder}/events.jsonl"], "events.jsonl: Not a directory"),
        (["{folder}", "--run", "0"], "--run 0: the folder holds 1 run."),
        (["{folder}", "--run", "2"], "--run 2: the folder holds 1 run."),
        (["{folder}", "--out", "{folder}/a.html/"], "Is a directory"),
        (["{folder}", "--out", "x.png"], "HTML is written; the name must end with .html or .htm."),
        (["{folder}", "--out", "{folder}/no/where.html"], "No such file"),
    ],
)
def test_bad_use_is_one_sentence_and_status_2(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.html").mkdir()
    assert main(["report", *(word.format(folder=folder) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_help_loads_nothing_of_the_pages() -> None:
    code = (
        "import sys\n"
        "from malleus_megatron.cli.main import main\n"
        "try:\n    main(['report', '--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'starlette', 'malleus_megatron.pages'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LOGDIR" in done.stdout
