"""LayerNorm and RMSNorm that do without Transformer Engine what its norms do.

That is: work under sequence parallelism, with weights that are added to 1, and on a residual stream
that is wider than the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm over the last dimension; `offset` is added to the weight in the forward pass."""

    offset = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in the precision of `x`; the result has the precision of the weight."""
        weight, bias = _as_input(self.weight, x) + self.offset, _as_input(self.bias, x)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(
            self.weight.dtype
        )


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension; `offset` is added to the weight in the forward pass."""

    offset = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in the precision of `x`; the result has the precision of the weight."""
        weight = _as_input(self.weight, x) + self.offset
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


class ZeroCenteredLayerNorm(LayerNorm):
    """`--apply-layernorm-1p` for LayerNorm."""

    offset = 1

    def reset_parameters(self) -> None:
        """Start as the plain norm does: at a sum of 1."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)


class ZeroCenteredRMSNorm(RMSNorm):
    """`--apply-layernorm-1p` for RMSNorm."""

    offset = 1

    def reset_parameters(self) -> None:
        """Start as the plain norm does: at a sum of 1."""
        torch.nn.init.zeros_(self.weight)


NORMS: dict[tuple[str, bool], type[torch.nn.Module]] = {
    ("LayerNorm", False): LayerNorm,
    ("LayerNorm", True): ZeroCenteredLayerNorm,
    ("RMSNorm", False): RMSNorm,
    ("RMSNorm", True): ZeroCenteredRMSNorm,
}


def make_norm(_original: Any) -> Callable[..., torch.nn.Module]:
    """What takes the place of `WrappedTorchNorm.__new__`."""

    def new(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        kind = NORMS[config.normalization, config.layernorm_zero_centered_gamma]
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            # Each TP rank sees a part of the sequence; Megatron sums the gradients by this mark.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    return new


def _as_input(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)
