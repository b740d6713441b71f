"""The distributed optimizer on torch's Adam: faults of Megatron 0.19 that lose state on resume.

Without Transformer Engine and Apex the optimizer is torch's. Its state is born in the first step
and holds the step count as a tensor for each parameter; Megatron saves the count with the
parameter groups. Four places do not go together; each row mends one.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from malleus_megatron.runtime.patching import Replacement

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def _state_dict(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give a fresh optimizer its state first: the original reads the step from it."""

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if not _on_torch_adam(self):
            return original(self)
        allocate(self.optimizer)
        if self.optimizer.state:
            return original(self)
        return _state_dict_without_parameters(self)

    return state_dict


def _load_state_dict(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Give every parameter a step count of its own again: the original shares one among all."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if _on_torch_adam(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return load_state_dict


def _set_states(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the step that came with the parameter groups.

    The tensors of one checkpoint format lack it, and the other's carry that of before the load.
    In fp32 the main parameter is a view of the model's, which autograd lets nobody write to.
    """

    @functools.wraps(original)
    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        without_step = {**tensors, "step": None} if _on_torch_adam(self) else tensors
        original(self, model_param, without_step)

    return set_states


def allocate(adam: Any) -> None:
    """Make the state that torch's Adam would make in its first step, where there is none."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if parameter not in adam.state:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _on_torch_adam(optimizer: Any) -> bool:
    inner = getattr(optimizer, "optimizer", None)
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _state_dict_without_parameters(optimizer: Any) -> dict[str, Any]:
    """What a rank says whose share of the buffers is padding alone; others say the step."""
    inner = optimizer.optimizer.state_dict()
    groups = [
        {name: value for name, value in group.items() if name != "params"} | {"step": 0.0}
        for group in inner["param_groups"]
    ]
    state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
    if optimizer.grad_scaler:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


ROWS: tuple[Replacement, ...] = (
    Replacement(
        target=f"{_OPTIMIZER}.state_dict",
        make=_state_dict,
        reason="a fresh torch Adam has no state to read the step from, so every load would fail",
        signature="(self)",
    ),
    Replacement(
        target=f"{_OPTIMIZER}.load_state_dict",
        make=_load_state_dict,
        reason="the stock load gives all parameters one step tensor, which then counts N times",
        signature="(self, state_dict)",
    ),
    Replacement(
        target=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        make=_set_states,
        reason="the stock load takes the step from tensors that lack it or hold a stale one, and "
        "writes under autograd",
        signature="(self, model_param, tensors)",
    ),
)
