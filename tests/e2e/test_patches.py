"""Jobs on a vendored Megatron whose sources open the seams (patches/): nothing is replaced there.

The oracles are the stock run and the run whose seams are replaced at run time: same bits.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from tests.harness.ranks import run_ranks, run_script
from tests.harness.training import TINY_GPT, Grid, assert_same_training, read_lines, write_json
from tests.unit.test_patches import HOOKS, MANIFEST, TOOL, released

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("user_script.py")
LOOKING = Path(__file__).with_name("patched_script.py")
GRID = Grid(pipelines=2)
BENEATH_EACH_OTHER = Plan(
    num_layers=4,
    num_microbatches=8,
    pipelines=(
        Pipeline(
            num_microbatches=8,
            stages=(Stage(gpus=(1,), layers=(0, 1)), Stage(gpus=(0,), layers=(1, 4))),
        ),
    ),
    standby=(),
)
ITERATIONS = 5
RECIPE = (
    *(*TINY_GPT, *GRID.flags, "--train-iters", str(ITERATIONS), "--split", "80,20,0"),
    *("--eval-interval", "3", "--eval-iters", "2"),
)
ON = ("--malleus", "--malleus-sidecar", "none", "--malleus-require", "reshape")
TIME_LIMIT_S = 300.0
GRACE_S = 60.0
NUM_SEAMS = len(MANIFEST["patches"]) - 1
PATCHED = (
    f"malleus: Megatron's sources have patch set {MANIFEST['patch_set']}: "
    f"all {NUM_SEAMS} seams are theirs, none is replaced"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched copy of the installed Megatron."""
    top = tmp_path_factory.mktemp("vendored")
    shutil.copytree(released() / "megatron", top / "megatron")
    subprocess.run([sys.executable, TOOL, "apply", top], check=True)
    return top


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loss and gradient norm of every iteration, as released."""
    record = tmp_path_factory.mktemp("stock") / "losses.jsonl"
    flags = ("--malleus-record", record)
    run_script(GRID.world, ["-m", "malleus_megatron.run", SCRIPT, *RECIPE, *flags])
    return record


def under_plans(folder: Path) -> list[str]:
    """Flags of a job that moves to stages beneath each other and back, and saves in between."""
    write_json(folder / "stages.json", plan_to_json(BENEATH_EACH_OTHER))
    write_json(folder / "counts.json", GRID.plan([5, 3]))
    entries = [{"iteration": 2, "plan": "stages.json"}, {"iteration": 4, "plan": "counts.json"}]
    schedule = write_json(folder / "schedule.json", entries)
    flags = {
        "--malleus-plan-schedule": schedule,
        "--malleus-log-dir": folder,
        "--malleus-record": folder / "losses.jsonl",
        "--save": folder / "saved",
        "--save-interval": 3,
    }
    return [*ON, *(str(word) for flag in flags.items() for word in flag)]


def python(tree: Path, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A fresh process, for the tests' own server has the released Megatron in its memory."""
    path = os.pathsep.join([str(tree), str(ROOT)])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, words)]
    process = subprocess.Popen(
        command,
        env=os.environ | environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        process.terminate()  # torchrun then ends its ranks
        process.wait(GRACE_S)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(tree: Path, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """All ranks of a job, in fresh processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GRID.world))
    return python(tree, *launcher, "-m", *words, **more)


def test_a_job_moves_through_plans_and_nothing_is_replaced(
    tree: Path, stock: Path, tmp_path: Path
) -> None:
    at_run_time, in_sources = tmp_path / "run-time", tmp_path / "sources"
    at_run_time.mkdir()
    in_sources.mkdir()
    flags = under_plans(at_run_time)
    replaced = run_script(GRID.world, ["-m", "malleus_megatron.run", SCRIPT, *RECIPE, *flags])
    assert "patch set" not in replaced[0].output
    seams = tmp_path / "seams.json"
    flags = under_plans(in_sources)
    done = torchrun(tree, "malleus_megatron.run", LOOKING, *RECIPE, *flags, SEAMS=str(seams))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stderr.count(PATCHED) == 1

    assert_same_training(in_sources / "losses.jsonl", stock, relative=1e-6)
    runs = [folder / "losses.jsonl" for folder in (in_sources, at_run_time)]
    assert_same_training(*runs, relative=0)
    assert_same_events(*(folder / "events.jsonl" for folder in (in_sources, at_run_time)))
    assert [path.name for path in sorted((in_sources / "saved").glob("iter_*"))] == [
        "iter_0000003",
        "iter_0000005",
    ]
    assert (in_sources / "saved" / "iter_0000003" / "malleus_plan.json").exists()
    found = json.loads(seams.read_text(encoding="utf-8"))
    assert len(found) == NUM_SEAMS
    for target, (attribute, fills, calls) in found.items():
        assert attribute == Path(HOOKS).name, target
        assert fills in {"seams.py", "schedule.py", "record.py"}, target
        assert calls > 0, target


def assert_same_events(ours: Path, theirs: Path) -> None:
    """What happened and when, without what a clock says."""
    told = [
        [
            (event["event"], event["iteration"], event.get("plan"), event.get("generation"))
            for event in read_lines(path)
        ]
        for path in (ours, theirs)
    ]
    assert told[0] == told[1]
    assert [kind for kind, *_ in told[0]].count("migration") == 2


def test_without_the_flag_a_patched_tree_trains_as_released(
    tree: Path, stock: Path, tmp_path: Path
) -> None:
    record = tmp_path / "losses.jsonl"
    flags = ("--malleus-record", record)
    done = torchrun(tree, "malleus_megatron.run", SCRIPT, *RECIPE, *flags)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "patch set" not in done.stdout + done.stderr
    assert_same_training(record, stock, relative=0)


WITHOUT_THE_PLUGIN = """
import sys
from importlib import import_module

sys.modules["malleus_megatron"] = None
import torch
from megatron.core import malleus_hooks
from megatron.training.arguments import add_megatron_arguments

modules = "megatron.training.training", "megatron.core.pipeline_parallel.schedules"
for target in sys.argv[1:]:
    module, _, name = target.removesuffix(".__init__").rpartition(".")
    found = getattr(import_module(module), name)
    found = found.__init__ if target.endswith(".__init__") else found
    assert found.__code__.co_filename == malleus_hooks.__file__, target
    assert found.malleus_slot.run is found.__wrapped__, target
import argparse
parser = add_megatron_arguments(argparse.ArgumentParser())
assert "--malleus" not in parser.format_usage()
print("stock")
"""


def test_where_the_plugin_is_not_installed_every_seam_runs_megatrons_own(tree: Path) -> None:
    done = python(tree, "-c", WITHOUT_THE_PLUGIN, *seams_of_the_manifest())
    assert done.stdout.endswith("stock\n"), done.stderr[-4000:]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (HOOKS, "PATCH_SET = ", "PATCH_SET = 9", "have patch set 9"),
        (
            "megatron/core/pipeline_parallel/schedules.py",
            "@malleus_hooks.seam\ndef backward_step",
            "def backward_step",
            f"1 of {NUM_SEAMS} seams are not open: megatron.core.pipeline_parallel.schedules.back",
        ),
    ],
)
def test_other_patches_are_refused(tree: Path, file: str, old: str, new: str, message: str) -> None:
    text = (tree / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tree / file).write_text(text.replace(old, new), encoding="utf-8")
    try:
        done = python(tree, "-m", "malleus_megatron.pretrain_gpt", *RECIPE, *ON)
    finally:
        (tree / file).write_text(text, encoding="utf-8")
    assert done.returncode == 2
    assert message in done.stderr
    assert [line[:9] for line in done.stderr.splitlines()].count("malleus: ") == 1
    assert "patches/patch_megatron.py" in done.stderr


def test_the_doctor_says_whose_the_seams_are(tree: Path) -> None:
    done = python(tree, "-m", "malleus_megatron.cli.main", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {entry["what"]: entry for entry in json.loads(done.stdout)["findings"]}
    assert found["Megatron's sources"]["detail"].startswith(f"patch set {MANIFEST['patch_set']}: ")
    assert all(found[f"seam {target}"]["ok"] for target in seams_of_the_manifest())


def test_the_patches_are_the_table_of_seams() -> None:
    """A seam without a patch, or a patch without a seam, is a fault of the set."""
    (targets,), (version,) = run_ranks(1, seams_of_the_table), run_ranks(1, version_of_the_plugin)
    assert seams_of_the_manifest() == targets
    assert version == MANIFEST["patch_set"]


def seams_of_the_manifest() -> list[str]:
    return [patch["seam"] for patch in MANIFEST["patches"] if patch["seam"] is not None]


def seams_of_the_table() -> list[str]:
    from malleus_megatron.adapter.plugin import Plugin
    from malleus_megatron.adapter.seams import seam_rows
    from malleus_megatron.config import MalleusConfig

    return [row.target for row in seam_rows(Plugin(MalleusConfig()))]


def version_of_the_plugin() -> int:
    from malleus_megatron.adapter.patched_tree import PATCH_SET

    return PATCH_SET
