"""How far the plugin can go with a recipe, and why not further."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from malleus_megatron.config import Level
from malleus_megatron.errors import LevelError

HIGHEST_REASON = "nothing holds this recipe back"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDecision:
    """The level of a job and the one reason why it is not higher."""

    level: Level
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A setting under which a level cannot be reached."""

    present: Callable[[Any], bool]
    """Megatron's parsed arguments -> whether the recipe uses it."""
    reason: str


def _set(name: str) -> Callable[[Any], bool]:
    """Present if the argument exists and is neither None, 0, False nor empty."""
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


ONE_PIPELINE = Obstacle(
    present=lambda args: args.data_parallel_size < 2,
    reason="one pipeline only (data parallel size 1): micro-batches have nowhere to move",
)
"""Stands in the way of level rebalance alone: a reshaped job may have more pipelines."""

OBSERVE_OBSTACLES: tuple[Obstacle, ...] = (
    Obstacle(
        present=_set("virtual_pipeline_model_parallel_size"),
        reason="virtual pipeline stages: the interleaved schedule needs equal micro-batch counts",
    ),
    Obstacle(
        present=_set("num_experts"),
        reason="mixture of experts: routing and expert all-to-alls join the pipelines in every "
        "micro-batch",
    ),
    Obstacle(
        present=_above_one("context_parallel_size"),
        reason="context parallelism is not covered yet",
    ),
    Obstacle(
        present=_set("mtp_num_layers"),
        reason="multi-token prediction sums over pipelines in every micro-batch",
    ),
    Obstacle(
        present=lambda args: _set("use_megatron_fsdp")(args) or _set("use_torch_fsdp2")(args),
        reason="FSDP gathers parameters across pipelines in every micro-batch",
    ),
    Obstacle(
        present=lambda args: getattr(args, "cuda_graph_impl", "none") != "none",
        reason="CUDA graphs record a fixed number of micro-batches",
    ),
    Obstacle(
        present=lambda args: getattr(args, "dataloader_type", None) == "external",
        reason="an external data loader cannot be addressed by micro-batch",
    ),
    Obstacle(present=_set("sft"), reason="packed sequences (--sft) are not covered yet"),
    Obstacle(
        present=_set("dataloader_inter_document_masking"),
        reason="packed sequences (--dataloader-inter-document-masking) are not covered yet",
    ),
    Obstacle(
        present=_set("hybrid_context_parallel"),
        reason="hybrid context parallelism packs its own micro-batches",
    ),
    Obstacle(
        present=_above_one("gtp_weight_remat_size"),
        reason="weight rematerialisation across pipelines gathers in every micro-batch",
    ),
    Obstacle(
        present=_above_one("num_distributed_optimizer_instances"),
        reason="several distributed-optimizer instances are not covered yet",
    ),
    Obstacle(
        present=_set("iterations_to_skip"),
        reason="--iterations-to-skip reads data outside a training step",
    ),
    Obstacle(present=_set("perform_rl_step"), reason="reinforcement learning steps"),
    Obstacle(
        present=_set("inprocess_restart"),
        reason="in-process restart re-enters training in the same process",
    ),
    Obstacle(present=_set("skip_train"), reason="--skip-train: there is no training step"),
)


RESHAPE_OBSTACLES: tuple[Obstacle, ...] = (
    Obstacle(
        present=lambda args: _set("fp8")(args) or _set("fp4")(args),
        reason="fp8 and fp4 scaling factors cannot be moved yet",
    ),
    Obstacle(
        present=lambda args: args.optimizer != "adam",
        reason="only Adam's state can be moved",
    ),
    Obstacle(
        present=lambda args: any(
            _set(name)(args)
            for name in (
                *("use_precision_aware_optimizer", "optimizer_cpu_offload", "use_mup"),
                "optimizer_cuda_graph",
            )
        ),
        reason="the state of precision-aware, offloaded, graphed and muP optimizers cannot be "
        "moved yet",
    ),
    Obstacle(
        present=_set("tp_comm_overlap"),
        reason="--tp-comm-overlap allocates its buffers for one TP degree",
    ),
    Obstacle(
        present=lambda args: any(
            _set(name)(args) for name in ("defer_embedding_wgrad_compute", "delay_wgrad_compute")
        ),
        reason="delayed weight gradients are not covered yet",
    ),
    Obstacle(
        present=lambda args: any(
            _set(name)(args) for name in ("full_validation", "multiple_validation_sets")
        ),
        reason="validation on whole or several sets is not covered yet",
    ),
    Obstacle(
        present=lambda args: any(
            _set(name)(args)
            for name in ("cpu_offloading_num_layers", "fine_grained_activation_offloading")
        ),
        reason="Megatron offloads activations without pipeline stages only",
    ),
    Obstacle(present=_set("adlr_autoresume"), reason="ADLR autoresume saves past the seams"),
    Obstacle(
        present=lambda args: (
            _set("async_save")(args) and _set("ckpt_assume_constant_structure")(args)
        ),
        reason="--ckpt-assume-constant-structure lets the writer of asynchronous saves keep what "
        "it knows of tensors, which a change of plan replaces",
    ),
    Obstacle(
        present=lambda args: any(
            _set(name)(args)
            for name in (
                *("log_params_norm", "check_weight_hash_across_dp_replicas_interval"),
                *("save_params_interval", "save_wgrads_interval"),
                *("save_activations_interval", "save_dgrads_interval"),
                *("qk_clip", "log_max_attention_logit", "nccl_ub"),
            )
        ),
        reason="a diagnostic of this recipe reads parameters by Megatron's own groups",
    ),
    Obstacle(
        present=lambda args: _set("logits_save_dir")(args) or _set("logits_load_dir")(args),
        reason="distillation attaches itself to the first model that is built",
    ),
    Obstacle(
        present=lambda args: any(
            _set(name)(args)
            for name in (
                *("multi_latent_attention", "experimental_attention_variant"),
                *("heterogeneous_layers_config_path", "init_model_with_meta_device"),
                *("spec", "yaml_cfg", "modelopt_enabled", "freeze_all_layers"),
            )
        ),
        reason="only dense decoders in Megatron's standard layers can be reshaped",
    ),
)


def decide_level(args: Any, *, own_model: bool = False) -> LevelDecision:
    """The highest level at which this recipe trains right.

    Args:
        args: Megatron's arguments, after its validation.
        own_model: The script builds its model by itself, not from Megatron's GPT configuration.
    """
    reason = _first_reason(OBSERVE_OBSTACLES, args)
    if reason is not None:
        return LevelDecision(level=Level.observe, reason=reason)
    reason = _first_reason(RESHAPE_OBSTACLES, args)
    if own_model:
        reason = "the script builds its model itself, not from Megatron's GPT configuration"
    if reason is None:
        return LevelDecision(level=Level.reshape, reason=HIGHEST_REASON)
    return without_reshape(args, reason)


def without_reshape(args: Any, reason: str) -> LevelDecision:
    """The level of a job that cannot be reshaped."""
    if ONE_PIPELINE.present(args):
        return LevelDecision(level=Level.observe, reason=f"{ONE_PIPELINE.reason}; {reason}")
    return LevelDecision(level=Level.rebalance, reason=reason)


def _first_reason(obstacles: Sequence[Obstacle], args: Any) -> str | None:
    return next((one.reason for one in obstacles if one.present(args)), None)


def check_required(decision: LevelDecision, required: Level | None) -> None:
    """Refuse a job that reaches less than `--malleus-require` asks.

    Raises:
        LevelError: with both levels and the reason.
    """
    if required is not None and decision.level < required:
        raise LevelError(
            f"--malleus-require {required.name}: this job reaches {decision.level.name} "
            f"({decision.reason})."
        )
