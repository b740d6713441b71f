"""Transformer layers of what Megatron has built."""

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_layer import BaseTransformerLayer


def layers_of(model: Sequence[Any]) -> list[Any]:
    """The layers of a rank's model chunks, in order."""
    return [
        module
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, BaseTransformerLayer)
    ]
