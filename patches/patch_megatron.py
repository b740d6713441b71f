"""Open the plugin's seams in the sources of a vendored Megatron-LM; README.md beside this says why.

    python patches/patch_megatron.py verify DIR     is the patch set applied, whole and unchanged?
    python patches/patch_megatron.py apply DIR      all of it or nothing
    python patches/patch_megatron.py revert DIR     back to the bytes of the release
    python patches/patch_megatron.py record DIR     for maintainers: write the manifest's checksums

DIR is the folder that holds `megatron`. This needs Python and git, whose `git apply` reads the
patches: DIR need be no repository, and neither torch nor the plugin need be installed.
Exit status: 0 done, 2 refused.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
PACKAGE_INFO = "megatron/core/package_info.py"


class RefusedError(Exception):
    """Why nothing was done, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch of one file. Checksums are SHA-256; None where there is no file."""

    patch: str
    sha256: str | None
    seam: str | None
    file: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSet:
    """Patches in the order in which they are applied, and the releases whose files they fit."""

    folder: Path
    patch_set: int
    megatron_core: tuple[str, ...]
    patches: tuple[Patch, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Each file once; first the one that the others import."""
        return tuple(dict.fromkeys(patch.file for patch in self.patches))

    def of(self, file: str) -> tuple[Patch, ...]:
        """The patches of one file."""
        return tuple(patch for patch in self.patches if patch.file == file)

    def states(self, file: str) -> tuple[str | None, ...]:
        """Checksums of one file with none of its patches, with the first, and so on."""
        patches = self.of(file)
        return (patches[0].before, *(patch.after for patch in patches))

    def __str__(self) -> str:
        """Name it for a person."""
        return f"patch set {self.patch_set} for megatron-core {', '.join(self.megatron_core)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and print its one message; 0 done, 2 refused."""
    commands: dict[str, Callable[[Path], str]] = {
        "verify": verify,
        "apply": apply,
        "revert": revert,
        "record": record,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("tree", metavar="DIR", type=Path, help="the folder that holds `megatron`")
    chosen = parser.parse_args(arguments)
    try:
        print(f"{chosen.tree}: {commands[chosen.command](chosen.tree)}")
    except (RefusedError, OSError) as error:
        print(f"{chosen.tree}: {error}", file=sys.stderr)
        return 2
    return 0


def verify(tree: Path) -> str:
    """Say that the patch set is applied.

    Raises:
        RefusedError: it is not, or in part, or a file is not as the manifest says.
    """
    patches = find_patch_set(tree)
    counts = applied(patches, tree)
    done, total = sum(counts.values()), len(patches.patches)
    if done == 0:
        raise RefusedError(f"as released: {patches} is not applied. `apply` does that.")
    if done < total:
        missing = [p.patch for file, count in counts.items() for p in patches.of(file)[count:]]
        raise RefusedError(
            f"half applied: {done} of the {total} patches of {patches}; missing: "
            f"{', '.join(missing)}. `apply` completes them, `revert` takes them out."
        )
    return f"{patches} is applied: {total} patches of {len(patches.files)} files."


def apply(tree: Path) -> str:
    """Put in place the patches that are missing.

    Raises:
        RefusedError: another release, or a file that is not as the manifest says.
    """
    patches = find_patch_set(tree)
    goal = {file: len(patches.of(file)) for file in patches.files}
    if not bring(tree, patches, goal):
        return f"{patches} is applied already; nothing was changed."
    return verify(tree)


def revert(tree: Path) -> str:
    """Take out the patches that are in place.

    Raises:
        RefusedError: another release, or a file that is not as the manifest says.
    """
    patches = find_patch_set(tree)
    if not bring(tree, patches, dict.fromkeys(reversed(patches.files), 0)):
        return "as released already; nothing was changed."
    return f"{patches} is taken out: {len(patches.files)} files are as released."


def record(tree: Path) -> str:
    """Write what the patches do to a released tree into the manifest of that release.

    Raises:
        RefusedError: no manifest names the release, or a patch does not fit.
    """
    patches, recorded = manifest_for(tree), []
    with tempfile.TemporaryDirectory() as text:
        for path in sorted(patches.folder.glob("*.patch")):
            words = path.read_text(encoding="utf-8")
            (file,) = re.findall(r"^\+\+\+ b/(.+)$", words, re.MULTILINE)
            seam = re.search(r"^Seam: (.+)$", words, re.MULTILINE)
            copy = Path(text) / file
            if not copy.exists():
                _copy(tree / file, copy)
            before = checksum(copy)
            run_patches([path], Path(text))
            recorded.append(
                Patch(
                    patch=path.name,
                    sha256=checksum(path),
                    seam=seam[1] if seam else None,
                    file=file,
                    before=before,
                    after=checksum(copy),
                )
            )
    document = asdict(replace(patches, patches=tuple(recorded)))
    del document["folder"]
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    (patches.folder / MANIFEST).write_text(text, encoding="utf-8")
    return f"{patches}: {len(recorded)} patches recorded."


def find_patch_set(tree: Path) -> PatchSet:
    """The patch set for the release in a tree, its patches checked.

    Raises:
        RefusedError: no Megatron, a release without patches, or a patch that has changed.
    """
    patches = manifest_for(tree)
    for patch in patches.patches:
        path = patches.folder / patch.patch
        if (found := checksum(path)) != patch.sha256:
            raise RefusedError(
                f"{path} has SHA-256 {found}, the manifest says {patch.sha256}. Get {HERE} anew "
                "from the plugin's sources."
            )
    return patches


def manifest_for(tree: Path) -> PatchSet:
    """Read the manifest that names the release in a tree.

    Raises:
        RefusedError: no Megatron, or a release that no manifest names.
    """
    version = megatron_version(tree)
    known: list[str] = []
    for path in sorted(HERE.glob(f"*/{MANIFEST}")):
        document = json.loads(path.read_text(encoding="utf-8"))
        known += document["megatron_core"]
        if version in document["megatron_core"]:
            return PatchSet(
                folder=path.parent,
                patch_set=document["patch_set"],
                megatron_core=tuple(document["megatron_core"]),
                patches=tuple(Patch(**entry) for entry in document["patches"]),
            )
    raise RefusedError(
        f"this is megatron-core {version}; there are patches for {', '.join(known)}. Vendor one of "
        "these, or take the patches of the plugin's version that knows yours."
    )


def megatron_version(tree: Path) -> str:
    """Read the release of the Megatron in a tree, without importing it.

    Raises:
        RefusedError: there is none.
    """
    try:
        text = (tree / PACKAGE_INFO).read_text(encoding="utf-8")
    except OSError as error:
        raise RefusedError(
            f"no {PACKAGE_INFO} there ({error.strerror}). Name the folder that holds `megatron`: "
            "the top of your copy of Megatron-LM."
        ) from error
    names = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
    found = dict(re.findall(r"^(\w+) = ['\"]?(\w*)", text, re.MULTILINE))
    major, minor, patch, pre_release = (found.get(name, "?") for name in names)
    return f"{major}.{minor}.{patch}{pre_release}"


def checksum(path: Path) -> str | None:
    """SHA-256 of a file; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def applied(patches: PatchSet, tree: Path) -> dict[str, int]:
    """File -> how many of its patches are in place.

    Raises:
        RefusedError: a file is none of those that the manifest knows.
    """
    counts: dict[str, int] = {}
    faults = ""
    for file in patches.files:
        states, found = patches.states(file), checksum(tree / file)
        if found in states:
            counts[file] = states.index(found)
        else:
            faults += (
                f"\n  {file}\n    is       {found or 'missing'}"
                f"\n    released {states[0] or 'missing'}\n    patched  {states[-1]}"
            )
    if faults:
        raise RefusedError(
            f"files that {patches} does not know (SHA-256):{faults}\nRestore them from the "
            "release; if another patch set was applied, `revert` with its own tool. To keep "
            f"changes of yours, see {HERE / 'README.md'}."
        )
    return counts


def bring(tree: Path, patches: PatchSet, goal: Mapping[str, int]) -> bool:
    """Give each file a number of its patches, in the goal's order: all files or none.

    All new content is checked and lies beside its file before the first one takes its place.

    Returns:
        Whether anything was to be done.

    Raises:
        RefusedError: also if the disk refuses; the message says where that leaves the tree.
    """
    counts = applied(patches, tree)
    files = [file for file in goal if goal[file] != counts[file]]
    staged = {file: tree / f"{file}.malleus-new" for file in files}
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as undo:
        workshop = Path(text)
        with _disk("Nothing was changed."):
            for file in files:
                _copy(tree / file, workshop / file)
                make(file, workshop, patches, counts[file], goal[file])
                undo.callback(_forget, staged[file])
                _copy(workshop / file, staged[file], mode_of=tree / file)
        with _disk("Some files are done: `apply` completes them, `revert` takes them out."):
            for file in files:
                if (workshop / file).exists():
                    staged[file].replace(tree / file)
                else:
                    (tree / file).unlink()
    return bool(files)


def make(file: str, workshop: Path, patches: PatchSet, have: int, want: int) -> None:
    """Take a copy of a file from one number of its patches to another.

    Raises:
        RefusedError: what comes out is not what the manifest says.
    """
    series = [patches.folder / patch.patch for patch in patches.of(file)]
    run_patches(series[have:want], workshop)
    run_patches(series[want:have][::-1], workshop, "--reverse")
    found, wanted = checksum(workshop / file), patches.states(file)[want]
    if found != wanted:
        raise RefusedError(
            f"{file} would get SHA-256 {found}, the manifest says {wanted}. Nothing was changed. "
            f"Get {HERE} anew from the plugin's sources."
        )


def run_patches(patches: Sequence[Path], folder: Path, *options: str) -> None:
    """Apply patches, one after the other, to the files of a folder, in a repository or not.

    Raises:
        RefusedError: no git, or a patch does not fit.
    """
    if not patches:
        return
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    command = ["git", "apply", "--whitespace=nowarn", *options, *map(str, patches)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise RefusedError(
            "no git on the PATH, which reads the patches. Nothing was changed. Install git."
        ) from error
    if done.returncode != 0:
        raise RefusedError(f"the patches do not fit: {done.stderr.strip()}. Nothing was changed.")


def _copy(source: Path, to: Path, *, mode_of: Path | None = None) -> None:
    """Copy a file if there is one; its permissions too, if they are to come from another."""
    if not source.exists():
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
    if mode_of is not None and mode_of.exists():
        shutil.copymode(mode_of, to)


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(consequence: str) -> Iterator[None]:
    """Turn what the disk refuses into a message that says where that leaves the tree."""
    try:
        yield
    except OSError as error:
        raise RefusedError(f"{error.filename}: {error.strerror}. {consequence}") from error


if __name__ == "__main__":
    sys.exit(main())
