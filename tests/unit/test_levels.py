"""How far the plugin goes with a recipe, and the reason it gives."""

from types import SimpleNamespace

import pytest

from malleus_megatron.adapter.levels import (
    OBSERVE_OBSTACLES,
    RESHAPE_OBSTACLES,
    LevelDecision,
    check_required,
    decide_level,
)
from malleus_megatron.config import Level
from malleus_megatron.errors import LevelError


def arguments(**changes: object) -> SimpleNamespace:
    dense = {
        "data_parallel_size": 2,
        "cuda_graph_impl": "none",
        "dataloader_type": "single",
        "optimizer": "adam",
    }
    return SimpleNamespace(**(dense | changes))


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_dense_recipe_is_reshaped(pipelines: int, overlap: bool) -> None:
    recipe = arguments(
        data_parallel_size=pipelines, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    assert decide_level(recipe).level is Level.reshape


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fp8": "hybrid"}, "fp8"),
        ({"optimizer": "sgd"}, "Adam"),
        ({"use_precision_aware_optimizer": True}, "precision-aware"),
        ({"optimizer_cuda_graph": True}, "graphed"),
        ({"cpu_offloading_num_layers": 2}, "offloads activations"),
        ({"adlr_autoresume": True}, "autoresume"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"delay_wgrad_compute": True}, "weight gradients"),
        ({"async_save": True, "ckpt_assume_constant_structure": True}, "asynchronous saves"),
        ({"log_params_norm": True}, "diagnostic"),
        ({"check_weight_hash_across_dp_replicas_interval": 10}, "diagnostic"),
        ({"logits_load_dir": "x"}, "distillation"),
        ({"multi_latent_attention": True}, "standard layers"),
        ({"spec": ["a", "b"]}, "standard layers"),
        ({"full_validation": True}, "validation"),
    ],
)
def test_what_cannot_be_moved_is_rebalanced_where_there_are_pipelines(
    change: dict[str, object], word: str
) -> None:
    decision = decide_level(arguments(**change))
    assert decision.level is Level.rebalance
    assert word in decision.reason
    alone = decide_level(arguments(data_parallel_size=1, **change))
    assert alone.level is Level.observe
    assert word in alone.reason
    assert "one pipeline" in alone.reason


def test_a_script_with_a_model_of_its_own_is_rebalanced() -> None:
    decision = decide_level(arguments(), own_model=True)
    assert decision.level is Level.rebalance
    assert "model" in decision.reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "interleaved"),
        ({"num_experts": 8}, "experts"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"mtp_num_layers": 1}, "multi-token"),
        ({"use_megatron_fsdp": True}, "FSDP"),
        ({"use_torch_fsdp2": True}, "FSDP"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs"),
        ({"dataloader_type": "external"}, "external"),
        ({"sft": True}, "--sft"),
        ({"dataloader_inter_document_masking": True}, "masking"),
        ({"hybrid_context_parallel": True}, "hybrid"),
        ({"gtp_weight_remat_size": 2}, "rematerialisation"),
        ({"num_distributed_optimizer_instances": 2}, "instances"),
        ({"iterations_to_skip": [3]}, "--iterations-to-skip"),
        ({"perform_rl_step": True}, "reinforcement"),
        ({"inprocess_restart": True}, "in-process restart"),
        ({"skip_train": True}, "--skip-train"),
    ],
)
def test_each_obstacle_lowers_the_level_and_is_named(change: dict[str, object], word: str) -> None:
    decision = decide_level(arguments(**change))
    assert decision.level is Level.observe
    assert word in decision.reason


def test_every_obstacle_has_a_reason_of_its_own() -> None:
    reasons = [obstacle.reason for obstacle in OBSERVE_OBSTACLES + RESHAPE_OBSTACLES]
    assert len(set(reasons)) == len(reasons)


def test_a_required_level_that_is_not_reached_is_an_error_with_both() -> None:
    decision = LevelDecision(level=Level.observe, reason="some reason")
    with pytest.raises(LevelError, match=r"reshape.*observe \(some reason\)"):
        check_required(decision, Level.reshape)
    check_required(decision, Level.observe)
    check_required(decision, None)
