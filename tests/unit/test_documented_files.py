"""The examples in docs/formats.md are files that the product takes."""

import json
from pathlib import Path

from malleus_megatron.plan.codec import plan_from_json
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner.search import make_plan

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "formats.md"


def example(key: str) -> dict[str, object]:
    """The first indented block that begins with a document that has this key."""
    for block in DOCUMENT.read_text(encoding="utf-8").split("\n\n"):
        if block.lstrip().startswith('{"schema_version"') and f'"{key}"' in block:
            document: dict[str, object] = json.loads(block)
            return document
    raise AssertionError(key)


def test_the_plan_is_one() -> None:
    assert plan_from_json(example("pipelines")).num_microbatches == 16


def test_the_problem_has_a_plan() -> None:
    predicted = make_plan(problem_from_json(example("cluster"))).predicted
    assert predicted is not None
    assert predicted.memory_mib
