"""Hooks that see when a layer computes, forward and backward, and open and close windows for it.

Forward: hooks before and after a layer. Backward: hooks on the gradients of the layer's output and
input. (Module backward hooks would turn outputs into views, which Megatron refuses to free.) No
hook holds a tensor, and none changes one.

A forward inside a backward pass is activation recomputation: it belongs to the backward of its
layer that ends next, whether the layer's graph is rebuilt first (reentrant checkpoints) or its
activations are needed half-way (non-reentrant ones).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from malleus_megatron.runtime.windows import LayerCall, Phase, Window, Windows, in_backward


class LayerHooks:
    """Turns the calls of the attached layers into windows and `LayerCall`s."""

    def __init__(self, windows: Windows, on_call: Callable[[LayerCall], None]) -> None:
        """Nothing is attached yet.

        Args:
            windows: Where windows are opened and closed.
            on_call: Gets every call when its own work is done and its last window is still open:
                what it does then is part of the call's total time.
        """
        self._windows = windows
        self._on_call = on_call
        self._recomputed: dict[int, list[Window]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Watch these layers, numbered in their order, instead of any others."""
        self.detach()
        for index, layer in enumerate(layers):
            before = functools.partial(self._before_forward, index)
            after = functools.partial(self._after_forward, index)
            self._handles += [
                layer.register_forward_pre_hook(before),
                # Always: a non-reentrant recomputation leaves its last layer by an exception.
                layer.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]

    def detach(self) -> None:
        """Take the hooks off the layers."""
        while self._handles:
            self._handles.pop().remove()
        self._forget_open()

    def backward_begins(self, layer: int) -> Window:
        """The gradient of a layer's output is complete.

        The next layer's input may be the same tensor, whose hooks run in the order in which they
        were made, this one first: a backward that is still open has ended too.
        """
        previous = self._windows.innermost
        if previous is not None and previous.phase is Phase.backward:
            self.backward_ends(previous)
        return self._windows.open(layer, Phase.backward)

    def backward_ends(self, window: Window) -> None:
        """The gradient of the layer's input is complete, or the whole autograd run is."""
        if self._windows.is_open(window):
            recomputed = self._recomputed.pop(window.layer, [])
            self._end_call(LayerCall(windows=(*recomputed, window), is_training=True))

    def _before_forward(self, layer: int, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        if not in_backward():
            self._forget_open()
        self._windows.open(layer, Phase.forward)

    def _after_forward(
        self, layer: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        window = self._windows.innermost
        if window is None or window.layer != layer or window.phase is not Phase.forward:
            return
        if in_backward():
            self._windows.close(window)
            self._recomputed[layer].append(window)
        else:
            self._end_call(LayerCall(windows=(window,), is_training=module.training))
        self._watch_backward(layer, _input_of(args, kwargs), _first(output))

    def _watch_backward(self, layer: int, hidden_states: Any, output: Any) -> None:
        if not _has_grad(output):
            return
        watch = _BackwardWatch(self, layer, ends_with_graph=not _has_grad(hidden_states))
        output.register_hook(watch.start)
        if not watch.ends_with_graph:
            hidden_states.register_hook(watch.end)

    def _forget_open(self) -> None:
        """Drop what is left of a pass that failed: a forward begins outside of all others."""
        self._windows.drop_layers()
        self._recomputed.clear()

    def _end_call(self, call: LayerCall) -> None:
        window = call.windows[-1]
        self._windows.work_done(window)
        self._on_call(call)
        self._windows.close(window)


class _BackwardWatch:
    """The two gradient hooks of one forward call: several micro-batches may be in flight."""

    __slots__ = ("_hooks", "_layer", "_window", "ends_with_graph")

    def __init__(self, hooks: LayerHooks, layer: int, *, ends_with_graph: bool) -> None:
        self._hooks = hooks
        self._layer = layer
        self._window: Window | None = None
        self.ends_with_graph = ends_with_graph
        """True if the input has no gradient that could tell the end."""

    def start(self, gradient: Tensor) -> None:  # noqa: ARG002
        self._window = self._hooks.backward_begins(self._layer)
        if self.ends_with_graph:
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
            engine.queue_callback(self.end)

    def end(self, gradient: Tensor | None = None) -> None:  # noqa: ARG002
        if self._window is not None:
            self._hooks.backward_ends(self._window)


def _input_of(args: Any, kwargs: Any) -> Any:
    return kwargs.get("hidden_states", args[0] if args else None)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _has_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
