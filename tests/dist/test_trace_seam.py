"""The one seam of a trace: Megatron's timers, which leave marks in traced iterations alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.timers import Timers

from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.inventory import inventory
from malleus_megatron.adapter.seams import seam_rows
from malleus_megatron.adapter.trace import JobTrace, no_trace_of, trace_row
from malleus_megatron.config import MalleusConfig
from malleus_megatron.runtime.operation_trace import OperationTrace
from malleus_megatron.runtime.patching import Installed, mismatch

TARGET = "megatron.core.timers.Timers.__call__"


def targets(**settings: Any) -> list[str]:
    return [row.target for row in seam_rows(Plugin(MalleusConfig(enabled=True, **settings)))]


def test_without_the_flag_nothing_is_replaced_for_it() -> None:
    assert TARGET not in targets()
    assert targets(trace=5, log_dir=Path("out")) == [*targets(), TARGET]
    assert mismatch(trace_row(lambda: None)) is None


def test_the_doctor_looks_at_it() -> None:
    assert [(kind, fault) for kind, row, fault in inventory() if row.target == TARGET] == [
        ("seam", None)
    ]


def test_only_in_a_traced_iteration_a_timer_leaves_marks() -> None:
    operations = OperationTrace(torch.device("cpu"))
    trace = cast("JobTrace", SimpleNamespace(operations=operations))
    timers = Timers(0, "minmax")
    stock = type(timers("x", log_level=2))
    installed = Installed([trace_row(lambda: trace)])
    try:
        assert type(timers("x", log_level=2)) is stock
        operations.begin()
        timers("forward-compute", log_level=2).start()
        timers("forward-compute").stop()
        timers("params-all-gather", log_level=1).start(barrier=False)
        timers("params-all-gather").stop()
        assert timers("all-grads-sync", log_level=0).elapsed(reset=True) == 0.0
        operations.end()
        assert type(timers("x", log_level=2)) is stock
    finally:
        installed.uninstall()
    names = [name for name, _, _ in operations.read("gc")]
    assert names == ["forward-compute", "params-all-gather", "gc"]


def test_what_cannot_be_traced_is_said() -> None:
    plain = {"virtual_pipeline_model_parallel_size": None, "cuda_graph_impl": "none"}
    assert no_trace_of(SimpleNamespace(**plain)) is None
    interleaved = no_trace_of(SimpleNamespace(**plain | {"virtual_pipeline_model_parallel_size": 2}))
    assert interleaved is not None
    assert "interleaved" in interleaved
    graphs = no_trace_of(SimpleNamespace(**plain | {"cuda_graph_impl": "local"}))
    assert graphs is not None
    assert "CUDA graph" in graphs
