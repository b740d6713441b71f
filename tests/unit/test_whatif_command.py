"""`malleus whatif`: its document, its pictures, and files that are no trace."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pyarrow
import pytest
from pyarrow import parquet

from malleus_megatron.cli.main import main
from tests.unit.whatif_pipeline import Pipelines, slower, table, write

JOB = slower(
    Pipelines(num_pipelines=3, num_stages=2, num_microbatches=3, transfer_s=0.1, grads_s=0.2),
    *(2, 1, 2.0),
)
ROWS = JOB.rows()
FIELDS = set(
    "slowdown step_time_s ideal_step_time_s m_w m_s by_operation by_worker stragglers diagnosis "
    "skipped_steps".split()
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(ROWS, tmp_path / "trace.parquet")


def test_the_document_has_what_others_rely_on(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", str(trace), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert set(document) >= FIELDS
    assert document["slowdown"] == document["step_time_s"] / document["ideal_step_time_s"]
    assert len(document["by_worker"]) == 6
    assert document["by_worker"][0].items() >= {"dp_rank": 2, "stage": 1}.items()
    [straggler] = document["stragglers"]
    assert (straggler["dp_rank"], straggler["stage"]) == (2, 1)
    assert straggler["rate"] == pytest.approx(2)
    assert list(document) == sorted(document)
    assert captured.err == ""


def test_skipped_steps_are_in_the_document_and_in_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(ROWS[:-1], tmp_path / "holed.parquet")
    assert main(["whatif", str(path), "--json"]) == 0
    [skip] = json.loads(capsys.readouterr().out)["skipped_steps"]
    assert skip["step"] == 30
    assert main(["whatif", str(path)]) == 0
    assert f"step 30: {skip['reason']}" in capsys.readouterr().out


def test_the_picture_is_svg_with_a_cell_for_each_worker_and_step(
    trace: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "heat.svg"
    assert main(["whatif", str(trace), "--plot", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    name = "{http://www.w3.org/2000/svg}"
    titles = [title.text or "" for title in root.iter(f"{name}title")]
    assert len(titles) == 3 * 2 + 3 * 2 * 3
    hot = {cell[0].text: cell.get("fill") for cell in root.iter(f"{name}rect") if len(cell)}
    warmest = [text for text, colour in hot.items() if colour == "#b2182b"]
    assert len(warmest) == 3
    assert all(str(text).startswith("dp 2, stage 1, ") for text in warmest)
    assert max(float(cell.get("width", 0)) for cell in root.iter(f"{name}rect")) == 960


def test_a_picture_of_many_steps_and_workers_stays_small(tmp_path: Path) -> None:
    job = Pipelines(num_pipelines=80, num_stages=1, num_microbatches=1, steps=range(300))
    path = write(job.rows(), tmp_path / "large.parquet")
    picture = tmp_path / "large.svg"
    assert main(["whatif", str(path), "--plot", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8").count("<rect") < 64 * 240


def test_the_time_line_has_every_operation_twice_and_none_overlaps(
    trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "line.json"
    assert main(["whatif", str(trace), "--perfetto", str(out)]) == 0
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert len(spans) == 2 * len(ROWS)
    assert sum(name.startswith("ideal: ") for name in names.values()) == len(names) / 2 == 6
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in spans:
        place = (span["pid"], span["tid"])
        threads.setdefault(place, []).append((span["ts"], span["ts"] + span["dur"]))
    for times in threads.values():
        times.sort()
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(times))


def test_the_ideal_time_line_is_shorter(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "line.json"
    assert main(["whatif", str(trace), "--perfetto", str(out)]) == 0
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    ends = {"measured": 0.0, "ideal": 0.0}
    for event in events:
        if event["ph"] == "X" and event["args"]["step"] == 10:
            what = names[event["pid"]].split(":")[0]
            ends[what] = max(ends[what], event["ts"] + event["dur"])
    assert 0 < ends["ideal"] < ends["measured"]


def damaged(path: Path) -> list[tuple[str, bytes]]:
    whole = write(ROWS, path / "whole.parquet").read_bytes()
    middle = len(whole) // 3
    foot = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    return [
        ("empty", b""),
        ("text", b"dp_rank,stage\n0,0\n"),
        ("start only", whole[: len(whole) // 2]),
        ("end only", whole[len(whole) // 2 :]),
        ("a byte less", whole[:-1]),
        ("a hole", whole[:middle] + whole[middle + 300 :]),
        ("zeros", whole[:middle] + bytes(300) + whole[middle + 300 :]),
        ("foot", whole[:foot] + bytes(30) + whole[foot + 30 :]),
    ]


def test_damaged_files_are_refused_with_status_2_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, content in damaged(tmp_path):
        path = tmp_path / "bad.parquet"
        path.write_bytes(content)
        assert main(["whatif", str(path), "--json"]) == 2, what
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"malleus: {path}"), what
        assert captured.err.count("\n") == 1, what


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: pyarrow.table({"name": ["x"], "value": [1]}), "no column dp_rank"),
        (lambda t: t.drop_columns(["duration"]), "no column duration"),
        (lambda t: t.slice(0, 0), "no rows"),
        (lambda t: t.set_column(1, "stage", pyarrow.array([None, *[0] * (len(t) - 1)])), "1 empty"),
        (lambda t: t.set_column(1, "stage", pyarrow.array(["a"] * len(t))), "whole numbers"),
        (lambda t: t.set_column(1, "stage", pyarrow.array([0.5] * len(t))), "whole numbers"),
        (lambda t: t.set_column(3, "optype", pyarrow.array([7] * len(t))), "must hold text"),
        (lambda t: t.set_column(3, "optype", pyarrow.array([None] * len(t))), "empty values"),
        (lambda t: t.set_column(6, "duration", pyarrow.array(["long"] * len(t))), "hold seconds"),
        (lambda t: t.set_column(6, "duration", pyarrow.nulls(len(t))), "seconds|no time"),
        (lambda t: t.append_column("mc", pyarrow.array([1] * len(t))), "interleaved"),
        (lambda t: t.set_column(3, "optype", pyarrow.array([[1]] * len(t))), "must hold text"),
        (lambda t: t.set_column(3, "optype", pyarrow.array([b"x"] * len(t))), "must hold text"),
        (lambda t: t.set_column(1, "stage", pyarrow.array([[1]] * len(t))), "whole numbers"),
        (lambda t: t.append_column("stage", t.column("stage")), "column stage twice"),
    ],
)
def test_foreign_tables_are_refused_with_what_is_wrong(
    change, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "foreign.parquet"
    parquet.write_table(change(table(ROWS)), path)
    assert main(["whatif", str(path)]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|")), error


def test_a_trace_is_not_written_over(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    assert main(["whatif", str(trace), "--perfetto", str(trace)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_files_of_one_folder_with_unlike_columns_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet.write_table(table(ROWS), tmp_path / "a.parquet")
    text = table(ROWS).set_column(1, "stage", pyarrow.array(["a"] * len(ROWS)))
    parquet.write_table(text, tmp_path / "b.parquet")
    assert main(["whatif", str(tmp_path)]) == 2
    assert "is not a trace" in capsys.readouterr().err


def test_an_empty_time_costs_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = pyarrow.array([None, *[row[6] for row in ROWS[1:]]])
    path = tmp_path / "hole.parquet"
    parquet.write_table(table(ROWS).set_column(6, "duration", times), path)
    assert main(["whatif", str(path), "--json"]) == 0
    [skip] = json.loads(capsys.readouterr().out)["skipped_steps"]
    assert skip["step"] == 10


def test_operation_names_may_be_a_dictionary_in_several_row_groups(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "groups.parquet"
    names = table(ROWS).column("optype").combine_chunks().dictionary_encode()
    small = pyarrow.int8()
    narrow = table(ROWS).set_column(3, "optype", names)
    narrow = narrow.set_column(0, "dp_rank", narrow.column("dp_rank").cast(small))
    parquet.write_table(narrow, path, row_group_size=50)
    texts = []
    for file in (trace, path):
        assert main(["whatif", str(file), "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such.parquet"], "does not exist"),
        (["."], "holds no trace"),
        (["{trace}", "--plot", "heat.png"], "SVG"),
        (["{trace}", "--plot", "no/such/folder/heat.svg"], "--plot no/such/folder/heat.svg"),
        (["{trace}", "--perfetto", "."], "--perfetto ."),
    ],
)
def test_paths_that_cannot_be_are_status_2(
    words: list[str], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", *(word.format(trace=trace) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_help_loads_neither_numpy_nor_pyarrow() -> None:
    code = (
        "import sys\n"
        "from malleus_megatron.cli.main import main\n"
        "try:\n    main(['whatif', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--perfetto" in done.stdout
