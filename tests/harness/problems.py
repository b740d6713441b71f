"""Planning problems for tests: drawn by hypothesis, or read from the shared folder."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SHARED = Path(__file__).resolve().parents[3] / "shared" / "problems"
CLUSTERS = ((2,), (3,), (4,), (6,), (8,), (1, 1), (2, 2), (3, 2), (4, 2), (4, 4), (5, 3), (7, 1))
SIZES = ((1,), (1, 2), (2,), (1, 3), (1, 2, 4), (1, 2, 4, 8))


def shared_problem(name: str) -> dict[str, Any]:
    """One of the problems with known results."""
    document: dict[str, Any] = json.loads((SHARED / f"{name}.json").read_text(encoding="utf-8"))
    return document


def problem(
    nodes: list[int], num_layers: int, num_microbatches: int, **changes: Any
) -> dict[str, Any]:
    """A problem.json of TP 1, one pipeline, no memory limit; `changes` by top-level section."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "cluster": {"gpus_per_node": nodes, "memory_mib": None},
        "model": {"num_layers": num_layers, "layer_time_s": {"1": 1.0}},
        "batch": {"num_microbatches": num_microbatches},
        "parallel": {"tensor_parallel_sizes": [1], "num_pipelines": 1},
    }
    for name, value in changes.items():
        document[name] = document[name] | value if isinstance(document.get(name), dict) else value
    return document


@st.composite
def small_problems(draw: st.DrawFn) -> dict[str, Any]:
    """Up to 8 GPUs on one or two nodes, few different rates, memory tight or not."""
    nodes = list(draw(st.sampled_from(CLUSTERS)))
    gpus = sum(nodes)
    sizes = [s for s in draw(st.sampled_from(SIZES)) if s <= max(nodes)] or [1]
    speedup = draw(st.floats(0.8, 1.0))
    kinds = 3 if gpus <= 6 else 2
    slow = draw(st.lists(st.floats(1.05, 6.0), min_size=kinds - 1, max_size=kinds - 1))
    rates = draw(st.lists(st.sampled_from([1.0, *slow, "inf"]), min_size=gpus, max_size=gpus))
    num_layers = draw(st.integers(1, 8 if gpus <= 6 else 6))
    model: dict[str, Any] = {
        "num_layers": num_layers,
        "layer_time_s": {str(size): 8 / size**speedup for size in sizes},
    }
    if draw(st.booleans()):
        model["embedding_time_s"] = draw(st.floats(0, 3))
        model["head_time_s"] = draw(st.floats(0, 3))
    limit = None
    if draw(st.booleans()):
        steps = draw(st.lists(st.floats(0, 60), max_size=3))
        model["memory"] = {
            "reference_tp": max(sizes),
            "layer_mib_by_inflight": [100 + sum(steps[:i]) for i in range(len(steps) + 1)],
            "embedding_mib": draw(st.sampled_from([0, 100, 250])),
            "head_mib": draw(st.sampled_from([0, 100, 300])),
            "fixed_mib": 40,
            "reserve_mib": 10,
            "working_mib": draw(st.sampled_from([0, 30])),
            "replicated_mib": draw(st.sampled_from([0, 15])),
            "layer_shared_mib": draw(st.sampled_from([0, 80])),
            "head_shared_mib": draw(st.sampled_from([0, 60])),
            "layer_update_mib": draw(st.sampled_from([0, 40])),
        }
        limit = 50 + draw(st.floats(0.3, 2.0)) * 100 * num_layers * max(sizes) / 2
    return problem(
        nodes,
        num_layers,
        draw(st.integers(1, 6 if gpus <= 6 else 4)),
        cluster={"memory_mib": limit},
        model=model,
        parallel={
            "tensor_parallel_sizes": sizes,
            "num_pipelines": draw(st.sampled_from([None, 1, min(2, gpus), min(3, gpus)])),
        },
        rates={str(gpu): rate for gpu, rate in enumerate(rates)},
    )
