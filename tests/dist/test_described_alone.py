"""What holds for a rank on a GPU and can be shown without one: where its stage is, and is not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from torch import nn

from malleus_megatron.adapter.reshape.stage import described_alone
from malleus_megatron.adapter.setup import _device_of


def te_arguments(config: Any) -> dict[str, Any]:
    """Megatron's order of what it asks: the CPU first."""
    return {"device": "cpu" if config.use_cpu_initialization else "meta", "params_dtype": 1}


def test_layers_of_transformer_engine_are_described_without_memory() -> None:
    config = SimpleNamespace(use_cpu_initialization=True, init_model_with_meta_device=True)

    def made(arguments: dict[str, Any]) -> torch.Tensor:
        """As Megatron's wrappers make a weight: by Transformer Engine, then CPU initialization."""
        with torch.device("meta"):
            weight = nn.Parameter(torch.empty(4, 6, device=arguments["device"]))
            _initialize_affine_weight_cpu(
                weight, 8, 6, 4, 0, init_method=lambda _: None, rank=1, world_size=2
            )
        return weight

    with pytest.raises(NotImplementedError):
        made(te_arguments(config))
    arguments = described_alone(te_arguments)(config)
    assert arguments["params_dtype"] == 1
    assert made(arguments).is_meta


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_stage_without_layers_is_timed_where_its_parameters_are(*, is_cuda: bool) -> None:
    """A pipeline layout may give a rank the embedding alone."""
    embedding = SimpleNamespace(is_cuda=is_cuda)
    chunk = SimpleNamespace(parameters=lambda: iter([embedding]))
    assert _device_of([chunk]).type == ("cuda" if is_cuda else "cpu")
