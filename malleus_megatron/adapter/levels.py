"""How far the plugin can go with a recipe, and why not further."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from malleus_megatron.config import Level
from malleus_megatron.errors import LevelError

HIGHEST = Level.rebalance
"""What this version can do at best."""
HIGHEST_REASON = "this version moves micro-batches only"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDecision:
    """The level of a job and the one reason why it is not higher."""

    level: Level
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A setting under which pipelines must all get the same number of micro-batches."""

    present: Callable[[Any], bool]
    """Megatron's parsed arguments -> whether the recipe uses it."""
    reason: str


def _set(name: str) -> Callable[[Any], bool]:
    """Present if the argument exists and is neither None, 0, False nor empty."""
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


REBALANCE_OBSTACLES: tuple[Obstacle, ...] = (
    Obstacle(
        present=lambda args: args.data_parallel_size < 2,
        reason="one pipeline only (data parallel size 1): micro-batches have nowhere to move",
    ),
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


def decide_level(args: Any) -> LevelDecision:
    """The highest level at which this recipe trains right.

    Args:
        args: Megatron's arguments, after its validation.
    """
    for obstacle in REBALANCE_OBSTACLES:
        if obstacle.present(args):
            return LevelDecision(level=Level.observe, reason=obstacle.reason)
    return LevelDecision(level=HIGHEST, reason=HIGHEST_REASON)


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
