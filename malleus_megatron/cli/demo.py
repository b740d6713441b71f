"""`malleus demo`: a small GPT trains on CPU, one GPU slows down, and the job moves around it.

Two real Megatron jobs on the same data: the stock job, whose losses are the reference, and a paced
job under `--malleus` in which one GPU of a TP group turns three times slower part-way.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from malleus_megatron.errors import MalleusError

NUM_RANKS = 4
INJECTED_GPU = 0
INJECTED_RATE = 3.0
INJECTED_FROM = 6
MICRO_BATCHES = 8
PLAN_BEFORE = f"{MICRO_BATCHES} x (0-1:4 | 2-3:4)"
"""What the recipe's flags describe: micro-batches x (GPUs:layers of each stage)."""
LAYER_FORWARD_S = {"1": 0.036, "2": 0.020}
LAYER_BACKWARD_S = {"1": 0.072, "2": 0.040}
JOB_TIME_LIMIT_S = 240
SETTLING = 2
"""Iterations left out at the start of the job and after a change, while caches and windows fill."""

RECIPE = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 8 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
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
    def events(self) -> Path:
        """What the job under --malleus says."""
        return self.folder / "events.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go")
    parser.add_argument("--iterations", type=int, default=18, help="length of the job")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; its summary also lands in OUT/summary.json."""
    if arguments.iterations < INJECTED_FROM + 8:
        raise MalleusError(
            f"--iterations {arguments.iterations}: need {INJECTED_FROM + 8}, since the GPU slows "
            f"down at iteration {INJECTED_FROM}."
        )
    files = DemoFiles(folder=arguments.out)
    _clear(files)
    say = _teller(quiet=arguments.json)
    say(
        f"A GPT of 8 layers on {NUM_RANKS} CPU processes (2 stages of TP degree 2), real text. "
        "Paced: every layer is held to a set time, as if each process were a GPU."
    )
    recipe = [*RECIPE, "--train-iters", str(arguments.iterations), *_data(files)]
    _run_stock(files, recipe, arguments.iterations)
    _run_malleus(files, recipe, arguments.iterations)
    summary = summarise(_read(files.events), _read(files.stock_losses))
    (files.folder / "summary.json").write_text(
        json.dumps(summary, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    if arguments.json:
        sys.stdout.write(json.dumps(summary, sort_keys=True) + "\n")
    else:
        say(table(summary))
        say(f"Written: {files.folder / 'summary.json'}, {files.events}")
    return 0


def summarise(events: Sequence[dict[str, Any]], stock: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draw the figures from what both jobs wrote.

    Raises:
        MalleusError: the job ended without a re-plan, or the reference is not whole.
    """
    steps = [event for event in events if event["event"] == "iteration"]
    plans = [event for event in events if event["event"] == "plan"]
    if not plans:
        raise MalleusError("The job ended without a re-plan; see events.jsonl.")
    rates = [event["rates"] for event in events if event["event"] == "rates"][-1]
    moves = [event for event in events if event["event"] == "migration"]
    first, last = plans[0], plans[-1]
    healthy = [s for s in steps if SETTLING < s["iteration"] < INJECTED_FROM]
    slow = [s for s in steps if INJECTED_FROM <= s["iteration"] < first["iteration"]]
    after = [s for s in steps if s["iteration"] >= last["iteration"] + SETTLING]
    reference = {line["iteration"]: line["loss"] for line in stock}
    return {
        "paced": True,
        "healthy_step_time_s": _median(healthy),
        "straggling_step_time_s": _median(slow),
        "replanned_step_time_s": _median(after),
        "predicted_step_time_s": last["predicted"]["step_time_s"],
        "injected": {str(INJECTED_GPU): INJECTED_RATE},
        "measured_rates": rates,
        "micro_batches_before": [MICRO_BATCHES],
        "micro_batches_after": last["micro_batches"],
        "plan_before": PLAN_BEFORE,
        "plan_after": last["layout"],
        "migrated_bytes": sum(move["bytes"] for move in moves),
        "migration_s": sum(move["seconds"] for move in moves),
        "iterations_until_replan": first["iteration"] - INJECTED_FROM,
        "max_loss_difference": _largest_difference(steps, reference),
        "iterations": len(steps),
    }


def table(summary: dict[str, Any]) -> str:
    """The three situations, for a person."""
    healthy = summary["healthy_step_time_s"]
    rows = [
        ("healthy", healthy, summary["plan_before"]),
        ("straggling, nominal plan", summary["straggling_step_time_s"], summary["plan_before"]),
        ("after the re-plan", summary["replanned_step_time_s"], summary["plan_after"]),
    ]
    lines = [f"{'':26} {'step':>8} {'vs healthy':>11}  plan: micro-batches x (GPUs:layers | ...)"]
    lines += [
        f"{name:26} {seconds:6.2f} s {seconds / healthy:10.2f}x  {plan}"
        for name, seconds, plan in rows
    ]
    measured = summary["measured_rates"].get(str(INJECTED_GPU), 1.0)
    lines += [
        "",
        f"GPU {INJECTED_GPU} was slowed to {INJECTED_RATE}; measured {measured:.2f}. The plan came "
        f"{summary['iterations_until_replan']} iterations later and predicted "
        f"{summary['predicted_step_time_s']:.2f} s; {summary['migrated_bytes'] / 2**20:.1f} MiB "
        f"moved in {summary['migration_s']:.2f} s, in memory.",
        f"Largest loss difference to the stock job over {summary['iterations']} iterations: "
        f"{summary['max_loss_difference']:.1e}",
        "Step times are of a paced run: they measure the plan and the protocol, not this machine.",
    ]
    return "\n".join(lines)


def _run_stock(files: DemoFiles, recipe: Sequence[str], iterations: int) -> None:
    _run_job(
        [*recipe, "--malleus-device", "cpu", "--malleus-record", str(files.stock_losses)],
        log=files.folder / "stock.log",
        watch=files.stock_losses,
        title="stock job (reference)",
        iterations=iterations,
    )


def _run_malleus(files: DemoFiles, recipe: Sequence[str], iterations: int) -> None:
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
    inject.write_text(
        json.dumps(
            [
                {
                    "gpu": INJECTED_GPU,
                    "rate": INJECTED_RATE,
                    "from_iteration": INJECTED_FROM,
                    "to_iteration": None,
                }
            ]
        )
    )
    flags = ["--malleus", "--malleus-device", "cpu", "--malleus-pace", str(pace)]
    flags += ["--malleus-inject", str(inject), "--malleus-log-dir", str(files.folder)]
    _run_job(
        [*recipe, *flags],
        log=files.folder / "malleus.log",
        watch=files.events,
        title="job under --malleus",
        iterations=iterations,
    )


def _run_job(flags: Sequence[str], *, log: Path, watch: Path, title: str, iterations: int) -> None:
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
        _progress(title, iterations) as bar,
    ):
        for event in _follow(watch, process, deadline):
            if event["event"] == "iteration":
                bar.update(1)
                bar.set_postfix_str(f"loss {event['loss']:.3f}", refresh=False)
            elif event["event"] in {"straggler", "plan", "warning"}:
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


def _largest_difference(steps: Sequence[dict[str, Any]], reference: dict[int, float]) -> float:
    for step in steps:
        if step["iteration"] not in reference:
            raise MalleusError(f"The stock job recorded no loss for iteration {step['iteration']}.")
    return max(abs(float(step["loss"]) - reference[step["iteration"]]) for step in steps)


def _median(steps: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(step["step_time_s"] for step in steps))


def _teller(*, quiet: bool) -> Any:
    """Print to people; under --json standard output holds one document and nothing else."""
    stream = sys.stderr if quiet else sys.stdout
    return lambda text: print(text, file=stream, flush=True)
