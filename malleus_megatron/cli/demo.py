"""`malleus demo`: a small GPT trains on CPU; GPUs slow down and heal, the job moves around them.

Two real Megatron jobs on the same data: the stock job, whose losses are the reference, and a paced
job under `--malleus`: one GPU of a TP group turns slower, then another one too, then both heal.
"""

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from malleus_megatron.cli.demo_summary import Change, Script, summarise, table
from malleus_megatron.cli.report import write_report
from malleus_megatron.errors import MalleusError

NUM_RANKS = 8
LAYER_FORWARD_S = {"1": 0.072, "2": 0.040, "4": 0.0225}
LAYER_BACKWARD_S = {"1": 0.144, "2": 0.080, "4": 0.045}
"""By TP degree; long enough for eight processes on two cores."""
JOB_TIME_LIMIT_S = 900
SCRIPT = Script(
    changes=(
        Change(iteration=6, name="GPU 0 at rate 3", rates={0: 3.0}),
        Change(iteration=15, name="GPU 6 at rate 5 too", rates={0: 3.0, 6: 5.0}),
        Change(iteration=24, name="both healthy again", rates={}),
    ),
    plan="4 x (0-1:4 | 4-5:4), 4 x (2-3:4 | 6-7:4)",
    micro_batches=(4, 4),
    num_iterations=44,
)

RECIPE = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 8 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --clip-grad 1.0 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 "
    "--eval-interval 1000 --seed 1234 --num-workers 0"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFiles:
    """Where the demo's inputs and outputs lie."""

    folder: Path

    @property
    def data(self) -> Path:
        """Prefix of the tokenised data."""
        return self.folder / "data" / "text"

    @property
    def stock_losses(self) -> Path:
        """The reference."""
        return self.folder / "stock.jsonl"

    @property
    def report(self) -> Path:
        """For a browser."""
        return self.folder / "report.html"

    @property
    def events(self) -> Path:
        """What the job under --malleus says."""
        return self.folder / "events.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; its summary and its report also land in OUT."""
    files = DemoFiles(folder=arguments.out)
    _clear(files)
    say = _teller(quiet=arguments.json)
    say(
        f"A GPT of 8 layers on {NUM_RANKS} CPU processes (2 pipelines, each of 2 stages of TP "
        "degree 2), real text. "
        "Paced: every layer is held to a set time, as if each process were a GPU."
    )
    recipe = [*RECIPE, "--train-iters", str(SCRIPT.num_iterations), *_data(files)]
    _run_stock(files, recipe)
    _run_malleus(files, recipe)
    summary = summarise(SCRIPT, _read(files.events), _read(files.stock_losses))
    (files.folder / "summary.json").write_text(
        json.dumps(summary, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    write_report(files.folder, files.report)
    if arguments.json:
        sys.stdout.write(json.dumps(summary, sort_keys=True) + "\n")
    else:
        say(table(summary))
        say(f"Written: {files.folder / 'summary.json'}, {files.events}, {files.report}")
    return 0


def _run_stock(files: DemoFiles, recipe: Sequence[str]) -> None:
    _run_job(
        [*recipe, "--malleus-device", "cpu", "--malleus-record", str(files.stock_losses)],
        log=files.folder / "stock.log",
        watch=files.stock_losses,
        title="stock job (reference)",
    )


def _run_malleus(files: DemoFiles, recipe: Sequence[str]) -> None:
    pace = files.folder / "pace.json"
    inject = files.folder / "injection.json"
    pace.write_text(
        json.dumps(
            {
                "layer_forward_s": LAYER_FORWARD_S,
                "layer_backward_s": LAYER_BACKWARD_S,
            }
        )
    )
    inject.write_text(json.dumps(SCRIPT.injection()), encoding="utf-8")
    flags = ["--malleus", "--malleus-device", "cpu", "--malleus-pace", str(pace)]
    flags += ["--malleus-inject", str(inject), "--malleus-log-dir", str(files.folder)]
    _run_job(
        [*recipe, *flags],
        log=files.folder / "malleus.log",
        watch=files.events,
        title="job under --malleus",
    )


def _run_job(flags: Sequence[str], *, log: Path, watch: Path, title: str) -> None:
    """Train with torchrun, showing progress from the file that the job writes.

    Raises:
        MalleusError: the job failed or ran past its time; the message shows the log's end.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(NUM_RANKS), "-m", "malleus_megatron.pretrain_gpt", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + JOB_TIME_LIMIT_S
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
        _progress(title, SCRIPT.num_iterations) as bar,
    ):
        for event in _follow(watch, process, deadline):
            if event["event"] == "iteration":
                bar.update(1)
                bar.set_postfix_str(f"loss {event['loss']:.3f}", refresh=False)
            elif event["event"] in {"straggler", "recovered", "plan", "warning"}:
                bar.write(_line(event), file=sys.stderr)
        if process.poll() is None:
            process.terminate()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-25:])
        raise MalleusError(f"The {title} ended with status {process.returncode}. {log}:\n{tail}")


def _progress(title: str, iterations: int) -> Any:
    """A bar on a terminal; elsewhere a line now and then."""
    seconds = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=iterations, desc=title, unit="it", file=sys.stderr, mininterval=seconds, ncols=100
    )


def _follow(
    path: Path, process: subprocess.Popen[Any], deadline: float
) -> Iterator[dict[str, Any]]:
    """The lines of a growing file, until the process that writes it ends or the time is up."""
    told = 0
    while True:
        ended = process.poll() is not None or time.monotonic() > deadline
        events = _read(path) if path.exists() else []
        yield from events[told:]
        told = len(events)
        if ended:
            return
        time.sleep(0.2)


def _line(event: dict[str, Any]) -> str:
    """One event in words."""
    at = f"iteration {event['iteration']}: "
    if event["event"] == "straggler":
        return f"{at}GPU {event['gpu']} is a straggler, rate {event['rate']:.2f}"
    if event["event"] == "recovered":
        return f"{at}GPU {event['gpu']} has recovered"
    if event["event"] == "plan":
        return f"{at}new plan, {event['layout']}"
    return f"{at}{event['message']}"


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON-lines file."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _data(files: DemoFiles) -> list[str]:
    """Prepare the text; the flags that name it."""
    import sysconfig

    from malleus_megatron.adapter.text_data import prepare_text_data

    with _without_import_warnings():
        summary = prepare_text_data(
            Path(sysconfig.get_paths()["stdlib"]),
            files.data,
            patterns=("*.py",),
            limit_bytes=2_000_000,
            overwrite=True,
        )
    return list(summary.megatron_flags("100,0,0"))


@contextlib.contextmanager
def _without_import_warnings() -> Iterator[None]:
    """Megatron warns of a dozen packages that it can do without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _clear(files: DemoFiles) -> None:
    """Results of an earlier demo would be taken for this one's."""
    files.data.parent.mkdir(parents=True, exist_ok=True)
    for path in [files.events, files.stock_losses]:
        path.unlink(missing_ok=True)


def _teller(*, quiet: bool) -> Any:
    """Print to people; under --json standard output holds one document and nothing else."""
    stream = sys.stderr if quiet else sys.stdout
    return lambda text: print(text, file=stream, flush=True)
