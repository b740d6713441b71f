"""CPU mode in a process: what it replaces, and that the stand-ins do the work."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

Snapshot = dict[tuple[str, str], Any]


def snapshot(targets: list[str]) -> Snapshot:
    """Every attribute of every module of torch and Megatron, and of the classes in the table."""
    from malleus_megatron.runtime.patching import resolve

    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] in {"torch", "megatron"}:
            found |= {(name, key): value for key, value in vars(module).items()}
    for target in targets:
        owner, name = resolve(target)
        if isinstance(owner, types.ModuleType):
            found[owner.__name__, name] = getattr(owner, name)
        else:
            key = f"{owner.__module__}.{owner.__qualname__}"
            found |= {(key, inner): value for inner, value in vars(owner).items()}
    return found


def differences(before: Snapshot, after: Snapshot) -> set[str]:
    """What is another object now, or new in a class; modules may load others into themselves."""
    absent = object()
    return {
        f"{owner}.{name}"
        for owner, name in before.keys() | after.keys()
        if before.get((owner, name), absent) is not after.get((owner, name), absent)
        and not ((owner, name) not in before and owner in sys.modules)
    }


def canonical(target: str) -> str:
    """The target as `snapshot` names it."""
    from malleus_megatron.runtime.patching import resolve

    owner, name = resolve(target)
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


def replaced_and_put_back() -> tuple[set[str], set[str], set[str]]:
    from megatron.training import training  # noqa: F401 all of Megatron before the first snapshot

    from malleus_megatron.adapter.cpu_mode import cpu_rows
    from malleus_megatron.runtime.patching import Installed

    targets = [row.target for row in cpu_rows()]
    before = snapshot(targets)
    installed = Installed(cpu_rows())
    changed = differences(before, snapshot(targets))
    installed.uninstall()
    left = differences(before, snapshot(targets))
    return {canonical(target) for target in targets}, changed, left


def test_exactly_the_listed_attributes_are_replaced_and_all_come_back():
    listed, changed, left = run_ranks(1, replaced_and_put_back)[0]
    assert changed == listed
    assert left == set()
    assert len(listed) > 60


def with_a_gpu() -> tuple[set[str], list[str]]:
    import torch
    from megatron.training import training  # noqa: F401

    from malleus_megatron.adapter import start
    from malleus_megatron.adapter.cpu_mode import cpu_rows

    torch.cuda.is_available = lambda: True
    targets = [row.target for row in cpu_rows()]
    before = snapshot(targets)
    sys.argv = ["pretrain", "--lr", "1", "--fp8-format", "hybrid", "--malleus-device", "auto"]
    start.install(start.prepare())
    return differences(before, snapshot(targets)), sys.argv


def test_with_a_gpu_nothing_is_replaced_and_the_recipe_stands():
    changed, words = run_ranks(1, with_a_gpu)[0]
    assert changed == set()
    assert words == ["pretrain", "--lr", "1", "--fp8-format", "hybrid"]


def in_cpu_mode(check: Callable[[], Any]) -> Any:
    from malleus_megatron.adapter.cpu_mode import cpu_rows
    from malleus_megatron.runtime.patching import Installed

    Installed(cpu_rows())
    return check()


def every_spelling_of_the_device() -> list[str]:
    import torch

    made = []
    spellings = ("cuda", "cuda:0", torch.device("cuda", 1), 0, "cpu", torch.cuda.current_device())
    for device in spellings:
        made += [
            torch.empty(2, device=device, pin_memory=True),
            torch.tensor([1.0], device=device),
            torch.arange(3, device=device),
            torch.zeros(2).to(device),
            torch.zeros(2).to(device, torch.float64),
            torch.zeros(2).to(device=device),
            torch.zeros(2).new_zeros(3, device=device),
            torch.ones_like(torch.zeros(2), device=device),
            torch.nn.Linear(2, 2, device=device).weight,
        ]
    made += [torch.zeros(2).cuda(), torch.zeros(1).pin_memory()]
    made += [torch.nn.Linear(2, 2).cuda().weight, torch.nn.Linear(2, 2).to("cuda:1").weight]
    return [tensor.device.type for tensor in made]


def test_a_tensor_for_a_gpu_is_made_in_ram():
    assert set(run_ranks(1, in_cpu_mode, every_spelling_of_the_device)[0]) == {"cpu"}


def names_of_types() -> list[Any]:
    import torch

    tensor = torch.zeros(1)
    return [
        tensor.type(),
        tensor.bfloat16().type(),
        tensor.type("torch.cuda.HalfTensor").dtype == torch.float16,
        tensor.type(torch.float64).dtype == torch.float64,
        isinstance(tensor, torch.FloatTensor),
    ]


def test_types_are_named_as_on_a_gpu():
    answers = run_ranks(1, in_cpu_mode, names_of_types)[0]
    assert answers == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", True, True, True]


def random_streams() -> list[bool]:
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    torch.cuda.set_rng_state(state)
    with tracker.fork():
        inside = torch.rand(3)
    loader: Any = torch.utils.data.DataLoader(range(1, 4), pin_memory=True)  # type: ignore[arg-type]
    assert [int(value) for value in loader] == [1, 2, 3]
    again = torch.rand(3)
    with tracker.fork():
        later = torch.rand(3)
    torch.cuda.manual_seed(7)
    expected = torch.rand(6)
    return [
        torch.equal(first, again),
        torch.equal(torch.cat([inside, later]), expected),
        not torch.equal(inside, again),
    ]


def test_a_fork_or_a_loader_does_not_move_the_shared_random_stream():
    assert run_ranks(1, in_cpu_mode, random_streams)[0] == [True, True, True]


def streams_and_events() -> tuple[float, bool]:
    import time

    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        start.record()
        time.sleep(0.05)
        torch.zeros(1).record_stream(side)
    side.record_event(end)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0
    return start.elapsed_time(end), end.query()


def test_events_measure_the_work_that_stream_order_would():
    elapsed_ms, done = run_ranks(1, in_cpu_mode, streams_and_events)[0]
    assert 50 <= elapsed_ms < 2000
    assert done


def gather_unequal() -> list[list[int]]:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    parts = [torch.zeros(count, 2, dtype=torch.int64) for count in (3, 1, 2)]
    dist.all_gather(parts, torch.full((parts[rank].shape[0], 2), rank + 1))
    group: Any = dist.new_group(backend="nccl")
    assert dist.get_backend(group) == "gloo"
    return [part.flatten().tolist() for part in parts]


def test_unequal_tensors_are_gathered_and_nccl_means_gloo():
    for parts in run_ranks(3, in_cpu_mode, gather_unequal):
        assert parts == [[1] * 6, [2] * 2, [3] * 4]


def norms() -> list[float]:
    import torch

    from malleus_megatron.adapter.cpu_norm import NORMS

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    distances = []
    for name in ("LayerNorm", "RMSNorm"):
        plain: Any = NORMS[name, False](8)
        centred: Any = NORMS[name, True](8)
        stock: Any = getattr(torch.nn, name)(8)
        for norm in (plain, stock):
            torch.nn.init.uniform_(norm.weight)
        centred.weight.data = plain.weight.data - 1
        stock.weight.data = plain.weight.data
        assert torch.equal(plain(x), stock(x))
        distances.append(float((plain(x) - centred(x)).abs().max()))
        narrow = plain.bfloat16()
        assert narrow(x).dtype == torch.bfloat16
    return distances


def test_zero_centred_norms_add_one_and_all_answer_in_the_precision_of_their_weights():
    assert max(run_ranks(1, norms)[0]) < 1e-6


def hide(folder: str) -> list[bool]:
    import importlib

    from malleus_megatron.adapter import cpu_mode

    sys.path.insert(0, folder)
    cpu_mode._hide_gpu_packages()
    found = []
    for name in ("transformer_engine", "apex"):
        try:
            importlib.import_module(name)
        except ImportError:
            found.append(False)
        else:
            found.append(True)
    return found


def test_kernels_for_gpus_are_not_found_though_installed(tmp_path: Path):
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('needs a GPU')")
    assert run_ranks(1, hide, str(tmp_path))[0] == [False, False]


def adam_state() -> list[Any]:
    import torch

    from malleus_megatron.adapter import torch_adam

    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([weight], lr=0.1)
    torch_adam.allocate(adam)
    allocated = {key: value.clone() for key, value in adam.state[weight].items()}
    twin = torch.nn.Parameter(torch.ones(3))
    fresh = torch.optim.AdamW([twin], lr=0.1)
    for parameter, optimizer in ((weight, adam), (twin, fresh)):
        parameter.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
    torch_adam.allocate(adam)
    return [
        sorted(allocated),
        all(not value.any() for value in allocated.values()),
        torch.equal(weight, twin),
        float(adam.state[weight]["step"]),
    ]


def test_allocated_adam_state_is_what_the_first_step_would_make():
    answers = run_ranks(1, adam_state)[0]
    assert answers == [["exp_avg", "exp_avg_sq", "step"], True, True, 1.0]


def state_of_a_rank_without_parameters() -> dict[str, Any]:
    import torch

    from malleus_megatron.adapter.torch_adam import ROWS

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    adam.param_groups[0]["params"] = []
    rank = types.SimpleNamespace(optimizer=adam, grad_scaler=None)
    row = next(row for row in ROWS if row.target.endswith(".state_dict"))

    def never(_: Any) -> Any:
        raise AssertionError("The original cannot read a step from no state.")

    state: dict[str, Any] = row.make(never)(rank)
    return state


def test_a_rank_whose_share_is_padding_has_a_state_too():
    state = run_ranks(1, state_of_a_rank_without_parameters)[0]
    (group,) = state["optimizer"]["param_groups"]
    assert group["lr"] == 0.1
    assert group["step"] == 0.0
    assert "params" not in group


def sockets_after_a_fork() -> list[bool]:
    import multiprocessing
    import socket

    from malleus_megatron.adapter.cpu_rows import close_sockets

    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(close_sockets,))
    process.start()
    theirs.close()
    ours.settimeout(20)
    closed = ours.recv(1) == b""
    alive = process.is_alive()
    process.terminate()
    process.join()
    return [closed, alive]


def _hold(release: Callable[[], None]) -> None:
    import time

    release()
    time.sleep(60)


def test_a_forked_helper_does_not_hold_its_parents_connections():
    assert run_ranks(1, sockets_after_a_fork)[0] == [True, True]
