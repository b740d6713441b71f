"""The patches for vendored trees and their tool, on the files of the installed release."""

import errno
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[2] / "patches"
FOLDER = PATCHES / "megatron-core-0.19"
TOOL = PATCHES / "patch_megatron.py"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
FILES = tuple(dict.fromkeys(patch["file"] for patch in MANIFEST["patches"]))
HOOKS, TRAINING = "megatron/core/malleus_hooks.py", "megatron/training/training.py"
INFO = "megatron/core/package_info.py"
APPLIED = f"patch set {MANIFEST['patch_set']} for megatron-core 0.19.0, 0.19.1, 0.19.2 is applied"


def released() -> Path:
    """The folder with the installed `megatron`, which is not imported."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A vendored tree: of a release, what the tool looks at."""
    top = tmp_path / "vendored"
    for file in (INFO, *FILES):
        if file != HOOKS:
            (top / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(released() / file, top / file)
    return top


class Tool:
    """The tool, called in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], path: Path = TOOL) -> None:
        self._capsys = capsys
        spec = importlib.util.spec_from_file_location("patch_megatron", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look there
        spec.loader.exec_module(module)
        self._main = module.main
        self.error = ""

    def call(self, command: str, tree: Path) -> tuple[int, str]:
        """Exit status and standard output; what went to standard error stays in `error`."""
        status = self._main([command, str(tree)])
        printed = self._capsys.readouterr()
        self.error = printed.err
        return status, printed.out

    def done(self, command: str, tree: Path) -> str:
        status, out = self.call(command, tree)
        assert (status, self.error) == (0, "")
        return out

    def refused(self, command: str, tree: Path) -> str:
        """One message, exit status 2, and the tree as it was."""
        before = contents(tree)
        assert self.call(command, tree) == (2, "")
        assert contents(tree) == before
        return self.error


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    yield Tool(capsys)
    del sys.modules["patch_megatron"]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the patches that a test may change."""
    return Path(shutil.copytree(PATCHES, tmp_path / "patches"))


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in sorted(tree.rglob("*")) if path.is_file())
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in files}


def git_apply(tree: Path, patches: Sequence[str]) -> None:
    for patch in patches:
        subprocess.run(["git", "apply", FOLDER / patch], cwd=tree, check=True)


@pytest.fixture
def other(copied: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    """The tool of the copied patches."""
    yield Tool(capsys, copied / TOOL.name)
    del sys.modules["patch_megatron"]


def test_apply_and_revert_there_and_back(tool: Tool, tree: Path) -> None:
    before = contents(tree)
    assert "as released" in tool.refused("verify", tree)
    assert APPLIED in tool.done("apply", tree)
    after = contents(tree)
    assert set(after) - set(before) == {HOOKS}
    assert {file for file in before if before[file] != after[file]} == set(FILES) - {HOOKS}
    assert APPLIED in tool.done("verify", tree)
    assert "nothing was changed" in tool.done("apply", tree)
    assert contents(tree) == after
    assert "as released" in tool.done("revert", tree)
    assert contents(tree) == before
    assert "nothing was changed" in tool.done("revert", tree)


def test_permissions_stay_and_hard_links_are_not_written_through(tool: Tool, tree: Path) -> None:
    (tree / TRAINING).chmod(0o640)
    elsewhere = tree.with_name("linked.py")
    elsewhere.hardlink_to(tree / TRAINING)
    tool.done("apply", tree)
    assert (tree / TRAINING).stat().st_mode & 0o777 == 0o640
    assert elsewhere.read_bytes() == (released() / TRAINING).read_bytes()


@pytest.mark.parametrize("command", ["verify", "apply", "revert"])
@pytest.mark.parametrize(
    ("old", "new", "version"),
    [
        ("PATCH = 2", "PATCH = 3", "0.19.3"),
        ("MINOR = 19", "MINOR = 20", "0.20.2"),
        ('PRE_RELEASE = ""', 'PRE_RELEASE = "rc1"', "0.19.2rc1"),
    ],
)
def test_another_release_is_refused(
    tool: Tool, tree: Path, command: str, old: str, new: str, version: str
) -> None:
    text = (tree / INFO).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tree / INFO).write_text(text.replace(old, new), encoding="utf-8")
    message = tool.refused(command, tree)
    assert f"megatron-core {version}; there are patches for 0.19.0, 0.19.1, 0.19.2" in message


@pytest.mark.parametrize("version", [0, 1])
def test_the_older_releases_of_these_files_are_patched_too(
    tool: Tool, tree: Path, version: int
) -> None:
    text = (tree / INFO).read_text(encoding="utf-8")
    (tree / INFO).write_text(text.replace("PATCH = 2", f"PATCH = {version}"), encoding="utf-8")
    assert APPLIED in tool.done("apply", tree)


@pytest.mark.parametrize("command", ["verify", "apply", "revert"])
@pytest.mark.parametrize("patched_before", [False, True])
def test_a_changed_file_is_refused_with_all_checksums(
    tool: Tool, tree: Path, command: str, patched_before: bool
) -> None:
    if patched_before:
        tool.done("apply", tree)
    with (tree / TRAINING).open("a", encoding="utf-8") as file:
        file.write("# ours\n")
    (tree / FILES[-1]).unlink()
    message = tool.refused(command, tree)
    series = [patch for patch in MANIFEST["patches"] if patch["file"] == TRAINING]
    for word in (series[0]["before"], series[-1]["after"], "missing", TRAINING, FILES[-1]):
        assert word in message
    assert "Restore them" in message
    assert message.count("\n    is ") == 2


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_half_applied_tree_is_told_completed_or_taken_back(
    tool: Tool, tree: Path, count: int
) -> None:
    before = contents(tree)
    names = [patch["patch"] for patch in MANIFEST["patches"]]
    git_apply(tree, names[:count])
    half = contents(tree)
    message = tool.refused("verify", tree)
    assert f"half applied: {count} of the {len(names)} patches" in message
    assert [name for name in names if name in message] == names[count:]
    assert APPLIED in tool.done("apply", tree)
    assert APPLIED in tool.done("verify", tree)
    for file, content in half.items():
        (tree / file).write_bytes(content)
    for file in set(contents(tree)) - set(half):
        (tree / file).unlink()
    tool.done("revert", tree)
    assert contents(tree) == before


def test_what_holds_no_megatron_is_refused(tool: Tool, tree: Path) -> None:
    assert "Name the folder that holds `megatron`" in tool.refused("apply", tree / "megatron")
    assert "no megatron/core/package_info.py" in tool.refused("verify", tree / "absent")


def test_a_disk_that_refuses_leaves_the_tree_as_it_was(tool: Tool, tree: Path) -> None:
    """The last file that is laid ready fails: those before it have not taken their places."""
    in_the_way = tree / f"{FILES[-1]}.malleus-new"
    in_the_way.mkdir()
    message = tool.refused("apply", tree)
    assert "Nothing was changed." in message
    assert in_the_way.name in message
    in_the_way.rmdir()
    assert APPLIED in tool.done("apply", tree)
    assert not list(tree.rglob("*.malleus-new"))


def test_a_disk_that_fails_half_way_is_told_and_made_good(
    tool: Tool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that the others import come first on the way in, and last on the way out."""
    before, replaced, move = contents(tree), [], Path.replace

    def third_fails(path: Path, target: Path) -> Path:
        replaced.append(target)
        if len(replaced) == 3:
            raise OSError(errno.EIO, "Input/output error", str(target))
        return move(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", third_fails)
        assert tool.call("apply", tree) == (2, "")
    assert "Some files are done: `apply` completes them" in tool.error
    assert replaced[0] == tree / HOOKS
    assert (tree / HOOKS).exists()
    assert not list(tree.rglob("*.malleus-new"))
    assert "half applied" in tool.refused("verify", tree)
    tool.done("revert", tree)
    assert contents(tree) == before


def test_what_a_killed_run_left_beside_a_file_does_not_matter(tool: Tool, tree: Path) -> None:
    before = contents(tree)
    tool.done("apply", tree)
    (tree / f"{HOOKS}.malleus-new").write_text("half of a fi", encoding="utf-8")
    tool.done("revert", tree)
    assert contents(tree) == before


def test_without_git_nothing_is_changed(
    tool: Tool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert "Install git" in tool.refused("apply", tree)


def test_git_settings_and_repositories_do_not_matter(
    tool: Tool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder deep in a repository, from another one's hook, with settings that change lines."""
    subprocess.run(["git", "init", "--quiet", tree.parent], check=True)
    settings = tree.parent / "gitconfig"
    settings.write_text("[apply]\nwhitespace = fix\n[core]\nautocrlf = true\n", encoding="utf-8")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_DIR", str(tree.parent / ".git"))
    monkeypatch.setattr(tempfile, "tempdir", str(tree.parent))
    assert APPLIED in tool.done("apply", tree)


def test_a_patch_that_has_changed_is_refused(tree: Path, other: Tool, copied: Path) -> None:
    patch = copied / FOLDER.name / "0006-train_step.patch"
    patch.write_text(patch.read_text(encoding="utf-8").replace("+@", "+#@"), encoding="utf-8")
    message = other.refused("apply", tree)
    assert MANIFEST["patches"][5]["sha256"] in message
    assert "Get " in message


def test_a_patch_that_does_something_else_than_recorded_is_refused(
    tree: Path, other: Tool, copied: Path
) -> None:
    manifest = copied / FOLDER.name / "manifest.json"
    document = json.loads(manifest.read_text(encoding="utf-8"))
    document["patches"][-1]["after"] = "0" * 64
    manifest.write_text(json.dumps(document), encoding="utf-8")
    assert f"the manifest says {'0' * 64}" in other.refused("apply", tree)


def test_the_manifest_is_what_the_patches_do(tree: Path, other: Tool, copied: Path) -> None:
    manifest = copied / FOLDER.name / "manifest.json"
    manifest.write_text(json.dumps({**MANIFEST, "patches": []}), encoding="utf-8")
    before = contents(tree)
    assert f"{len(MANIFEST['patches'])} patches recorded" in other.done("record", tree)
    assert manifest.read_bytes() == (FOLDER / "manifest.json").read_bytes()
    assert contents(tree) == before


def test_a_patch_opens_one_seam_and_does_nothing_else() -> None:
    """What a reviewer reads: a mark before a function, and once a file the import of the marks."""
    mark = r"(    )?@malleus_hooks\.seam|(\w+) = malleus_hooks\.seam\(\2\)"
    imports = r"from megatron\.core import malleus_hooks  # Modified: .*"
    imported: set[str] = set()
    for patch in MANIFEST["patches"][1:]:
        text = (FOLDER / patch["patch"]).read_text(encoding="utf-8")
        added = [line[1:] for line in text.splitlines() if re.match(r"\+(?!\+\+ b/)", line)]
        removed = [line for line in text.splitlines() if re.match(r"-(?!-- a/)", line)]
        marks = [line for line in added if re.fullmatch(mark, line)]
        first = [line for line in added if re.fullmatch(imports, line)]
        assert len(marks) == 1, patch["patch"]
        assert len(first) == (patch["file"] not in imported), patch["patch"]
        assert [line for line in added if line and line not in marks + first] == []
        assert removed == []
        imported.add(patch["file"])


def test_the_hooks_need_nothing_but_python(tool: Tool, tree: Path) -> None:
    """Neither torch nor the plugin; and a function is its stock self until its slot is filled."""
    tool.done("apply", tree)
    code = f"""
import sys
sys.path.insert(0, {str((tree / HOOKS).parent)!r})
before = set(sys.modules)
import malleus_hooks as hooks
assert set(sys.modules) - before - sys.stdlib_module_names == {{"malleus_hooks"}}
function = hooks.seam(lambda a, *, b=2: (a, b))
assert function(1, b=3) == (1, 3)
function.malleus_slot.run = lambda *args, **kwargs: "filled"
assert function(1) == "filled"
assert hooks.PATCH_SET == {MANIFEST["patch_set"]}
"""
    subprocess.run([sys.executable, "-IS", "-c", code], check=True)
