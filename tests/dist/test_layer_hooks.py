"""When layer calls begin and end, exactly, on a clock that only the layers move."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from malleus_megatron.runtime.layer_hooks import LayerHooks
from malleus_megatron.runtime.windows import LayerCall, Phase, Windows
from tests.dist.slow_layers import Layer, VirtualStopwatch, run


class Watched:
    """Layers with hooks, and what the hooks told."""

    def __init__(self, num_layers: int, output: str = "tensor") -> None:
        self.stopwatch = VirtualStopwatch()
        self.layers = [Layer(index, self.stopwatch, output) for index in range(num_layers)]
        self.windows = Windows(self.stopwatch)
        self.hooks = LayerHooks(self.windows, self._on_call)
        self.hooks.attach(self.layers)
        self.calls: list[LayerCall] = []

    def _on_call(self, call: LayerCall) -> None:
        self.calls.append(call)
        self.stopwatch.log.append(f"end of {call.phase} {call.layer}")

    @property
    def log(self) -> list[str]:
        return self.stopwatch.log

    def times(self) -> list[tuple[str, int, float]]:
        return [(call.phase, call.layer, call.own_s(self.stopwatch)) for call in self.calls]


def states(requires_grad: bool = True) -> Tensor:
    return torch.ones(2, 4, requires_grad=requires_grad)


def forward_s(*layers: int) -> list[tuple[str, int, float]]:
    return [("forward", layer, 1.0 + layer) for layer in layers]


def backward_s(*layers: int, recomputed: bool = False) -> list[tuple[str, int, float]]:
    extra = {layer: 1.0 + layer if recomputed else 0.0 for layer in layers}
    return [("backward", layer, 100.0 + layer + extra[layer]) for layer in layers]


@pytest.mark.parametrize("output", ["tensor", "tuple"])
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_calls_end_when_their_work_is_done(output: str, by: str) -> None:
    watched = Watched(3, output)
    run(watched.layers, states(), by).sum().backward()
    assert watched.log == [
        *("forward 0", "end of forward 0", "forward 1", "end of forward 1"),
        *("forward 2", "end of forward 2", "backward 2", "end of backward 2"),
        *("backward 1", "end of backward 1", "backward 0", "end of backward 0"),
    ]
    assert watched.times() == forward_s(0, 1, 2) + backward_s(2, 1, 0)


def test_work_between_layers_is_nobodys() -> None:
    watched = Watched(2)
    between = Layer(7, watched.stopwatch)
    first, second = watched.layers
    run([between, first, between, second, between], states()).sum().backward()
    assert watched.times() == forward_s(0, 1) + backward_s(1, 0)


def test_micro_batches_in_flight_do_not_mix() -> None:
    """1F1B: forwards of later micro-batches lie between a forward and its backward."""
    watched = Watched(2)
    outputs = [run(watched.layers, states()) for _ in range(2)]
    outputs.append(run(watched.layers, states()))
    outputs.pop(0).sum().backward()
    outputs.append(run(watched.layers, states()))
    while outputs:
        outputs.pop(0).sum().backward()
    forward, backward = forward_s(0, 1), backward_s(1, 0)
    assert watched.times() == forward * 3 + backward + forward + backward * 3


def test_a_module_that_is_called_twice_in_a_row_has_two_calls() -> None:
    watched = Watched(1)
    run(watched.layers * 2, states()).sum().backward()
    assert watched.times() == forward_s(0, 0) + backward_s(0, 0)


@pytest.mark.parametrize("trained", [True, False])
def test_an_input_without_gradient_ends_with_the_autograd_run(trained: bool) -> None:
    watched = Watched(2)
    if not trained:
        for parameter in watched.layers[0].parameters():
            parameter.requires_grad_(False)
    run(watched.layers, states(requires_grad=False)).sum().backward()
    # Without an input gradient the work's own backward is not run in the first layer with
    # parameters: its backward takes no time, but it is seen.
    seen = [("backward", 1, 101.0), ("backward", 0, 0.0)] if trained else [("backward", 1, 0.0)]
    assert watched.times() == forward_s(0, 1) + seen
    assert watched.windows.innermost is None


def reentrant(layers: Any, hidden_states: Tensor) -> Tensor:
    return checkpoint(run, layers, hidden_states, use_reentrant=True)


def non_reentrant(layers: Any, hidden_states: Tensor) -> Tensor:
    return checkpoint(run, layers, hidden_states, use_reentrant=False)


@pytest.mark.parametrize("recompute", [reentrant, non_reentrant])
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_recomputation_counts_as_backward(
    recompute: Callable[[Any, Tensor], Tensor], chunk: int
) -> None:
    watched = Watched(4)
    hidden_states = states()
    for first in range(0, 4, chunk):
        hidden_states = recompute(watched.layers[first : first + chunk], hidden_states)
    hidden_states.sum().backward()
    expected = forward_s(0, 1, 2, 3) + backward_s(3, 2, 1, 0, recomputed=True)
    assert watched.times() == expected
    assert watched.log.count("forward 3") == 2
    assert watched.windows.innermost is None


def test_recomputed_and_kept_layers_alternate() -> None:
    watched = Watched(4)
    hidden_states = reentrant(watched.layers[:2], states())
    hidden_states = run(watched.layers[2:3], hidden_states)
    non_reentrant(watched.layers[3:], hidden_states).sum().backward()
    expected = backward_s(3, recomputed=True) + backward_s(2) + backward_s(1, 0, recomputed=True)
    assert watched.times() == forward_s(0, 1, 2, 3) + expected


@pytest.mark.parametrize("recompute", [reentrant, non_reentrant])
def test_recomputation_with_micro_batches_in_flight(
    recompute: Callable[[Any, Tensor], Tensor],
) -> None:
    watched = Watched(2)
    outputs = [recompute(watched.layers, states()) for _ in range(3)]
    for output in outputs:
        output.sum().backward()
    assert watched.times() == forward_s(0, 1) * 3 + backward_s(1, 0, recomputed=True) * 3


def test_evaluation_is_told_apart() -> None:
    watched = Watched(1)
    watched.layers[0].eval()
    with torch.no_grad():
        run(watched.layers, states())
    watched.layers[0].train()
    run(watched.layers, states())
    assert [call.is_training for call in watched.calls] == [False, True]


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    watched = Watched(2)
    with pytest.raises(RuntimeError):
        run(watched.layers, torch.ones(2, 5))
    watched.calls.clear()
    run(watched.layers, states()).sum().backward()
    assert watched.times() == forward_s(0, 1) + backward_s(1, 0)


@pytest.mark.parametrize("through", [run, reentrant, non_reentrant])
def test_a_backward_that_failed_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, through: Callable[[Any, Tensor], Tensor]
) -> None:
    watched = Watched(2)
    output = through(watched.layers, states()).sum()
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="broken"):
        broken.setattr(Layer, "passes", fails_in_backward(Layer.passes))
        output.backward()
    watched.calls.clear()
    run(watched.layers, states()).sum().backward()
    assert watched.times() == forward_s(0, 1) + backward_s(1, 0)
    assert watched.windows.innermost is None


def fails_in_backward(passes: Callable[[Layer, str, float], None]) -> Any:
    def passes_or_fails(layer: Layer, phase: str, seconds: float) -> None:
        if phase == "backward":
            raise RuntimeError("broken")
        passes(layer, phase, seconds)

    return passes_or_fails


def test_a_pause_is_left_out_of_the_layer_it_happens_in(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(2)
    passes = Layer.passes

    def passes_and_waits(layer: Layer, phase: str, seconds: float) -> None:
        passes(layer, phase, seconds)
        with watched.windows.pause(), watched.windows.pause():
            watched.stopwatch.advance(1000.0)

    monkeypatch.setattr(Layer, "passes", passes_and_waits)
    with watched.windows.stage(Phase.forward) as stage:
        output = run(watched.layers, states())
        with watched.windows.pause():
            watched.stopwatch.advance(5000.0)
    reentrant(watched.layers, output).sum().backward()
    expected = backward_s(1, 0, recomputed=True) + backward_s(1, 0)
    assert watched.times() == forward_s(0, 1) * 2 + expected
    assert stage.own_s(watched.stopwatch) == 1.0 + 2.0


def test_pauses_of_other_threads_do_not_count() -> None:
    watched = Watched(1)

    def wait_elsewhere() -> None:
        with watched.windows.pause():
            watched.stopwatch.advance(7.0)

    with watched.windows.stage(Phase.forward) as stage:
        thread = threading.Thread(target=wait_elsewhere)
        thread.start()
        thread.join()
    wait_elsewhere()
    assert stage.own_s(watched.stopwatch) == 7.0


def test_detached_layers_are_left_alone() -> None:
    watched = Watched(2)
    watched.hooks.detach()
    run(watched.layers, states()).sum().backward()
    assert watched.calls == []
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in watched.layers)
    watched.hooks.attach(watched.layers[1:])
    run(watched.layers, states()).sum().backward()
    assert watched.times() == [("forward", 0, 2.0), ("backward", 0, 101.0)]


def test_hooks_change_no_bit_and_make_no_view() -> None:
    def gradients(watch: bool) -> list[Tensor]:
        torch.manual_seed(1)
        watched = Watched(3)
        if not watch:
            watched.hooks.detach()
        hidden_states = torch.randn(2, 4, requires_grad=True)
        output = reentrant(watched.layers[:2], run(watched.layers, hidden_states))
        assert output._base is None
        output.square().sum().backward()
        assert hidden_states.grad is not None
        parameters = [p.grad for layer in watched.layers for p in layer.parameters()]
        return [
            output.detach(),
            hidden_states.grad,
            *(grad for grad in parameters if grad is not None),
        ]

    plain, hooked = gradients(watch=False), gradients(watch=True)
    assert len(plain) == 2 + 3 * 2
    for one, other in zip(plain, hooked, strict=True):
        assert torch.equal(one, other)


def test_no_activation_is_kept_alive() -> None:
    watched = Watched(2)
    hidden_states = states()
    middle = run(watched.layers[:1], hidden_states)
    output = run(watched.layers[1:], middle)
    loss = output.sum()
    kept = [weakref.ref(tensor) for tensor in (hidden_states, middle, output)]
    gc.disable()
    try:
        del hidden_states, middle
        output.data = torch.empty(1)
        del output
        assert kept[2]() is None, "the graph, not the hooks, may hold an output"
        loss.backward()
        del loss
        assert [reference() for reference in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_freed_output_can_still_run_backward() -> None:
    """Megatron empties a stage's output when it is sent, and starts the engine by hand."""
    watched = Watched(2)
    output = run(watched.layers, states())
    gradient = torch.ones_like(output)
    output.data = torch.empty((1,))
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert watched.times() == forward_s(0, 1) + backward_s(1, 0)
