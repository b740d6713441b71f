"""One word per thing, no path of one machine, and nothing that speaks of how it was made."""

import re

import pytest

from tests.architecture.sources import text_files

RULES = "tests/architecture/test_words.py"

# Words that docs/glossary.md has another word for. Only those that mean nothing else here.
FORBIDDEN = {
    r"\bslow (node|worker|card|device)s?\b": "straggler",
    r"\b(sr|mbn)\b": "straggling rate, num_microbatches",
    r"\b(spare|unused|suspended) (GPU|rank)s?\b": "standby GPU",
    r"\breshard(s|ed|ing)?\b": "migration",
    r"\bmonkey[- ]patch(es|ed|ing)?\b": "seam, replacement",
}

MACHINE_PATH = re.compile(r"(?<![\w.$}])/(work|root|home|tmp|farm|mnt|Users)/[\w.\-]+")

OUTSIDE = re.compile(
    r"\bshared/(notes|prototype|hooks)\b|\bDESIGN( section)? \d|\bFORMATS\b"
    r"|\bworkplace\b|\bsub-?agents?\b|\bassistants?\b",
)
"""Pages and things that a reader of this repository does not have."""


def hits(pattern: re.Pattern[str]) -> list[str]:
    """`file:line: text` of every match."""
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in text_files().items()
        if name != RULES
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_one_word_per_thing(word: str) -> None:
    found = [hit for hit in hits(re.compile(word)) if not hit.startswith("docs/glossary.md")]
    assert not found, f"say: {FORBIDDEN[word]}"


def test_no_path_of_one_machine() -> None:
    assert not hits(MACHINE_PATH)


def test_the_project_speaks_of_itself_alone() -> None:
    assert not hits(OUTSIDE)


def test_no_open_ends() -> None:
    assert not hits(re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"))
