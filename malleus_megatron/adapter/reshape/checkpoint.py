"""A checkpoint of a plan's stages: Megatron's own keys and shapes, in whatever boxes there are.

A GPU writes the elements whose optimizer state it keeps, and the same elements of the parameters.
Each element is in one share, and the owners of a slice have equal shares: nothing is written
twice, and owners write equally much.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.training import get_args
from megatron.training.utils import print_rank_0
from torch import Tensor, nn

from malleus_megatron.adapter.reshape.shards import OwnerShards
from malleus_megatron.adapter.reshape.stage import RankStage
from malleus_megatron.adapter.reshape.state import (
    MOMENTS,
    PARAMETER,
    inner_optimizers,
    parameters_of,
    parts_of,
    scaler_state,
    sharded_leaves,
)
from malleus_megatron.migration.shards import Piece

_DISTRIBUTED_MAIN, _MAIN = "param", "fp32_param"
"""What Megatron's distributed and other optimizers call a parameter's fp32 copy, on disk."""
_FORM = "fully_reshardable"
"""Of the distributed optimizer's state: the one form of Megatron's that any grid can load."""


class SavedModel(nn.Module):
    """Stands where Megatron saves a model: it answers with the plan's pieces."""

    def __init__(self, entries: Mapping[str, ShardedTensor | ShardedObject]) -> None:
        """Hold this rank's entries, by names that differ."""
        super().__init__()
        self._entries = entries

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """As Megatron asks a model; the pieces are the same whatever the metadata says."""
        del metadata
        return dict(self._entries)

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """With overlap Megatron asks for complete parameters before a save: they are."""

    def enable_forward_pre_hook(self) -> None:
        """Nobody runs what is saved."""

    def disable_forward_pre_hook(self, *, param_sync: bool = True) -> None:
        """Nobody runs what is saved."""


class SavedOptimizer:
    """Stands where Megatron saves an optimizer."""

    is_stub_optimizer = False
    """As Megatron asks: also a rank on standby takes part in the save."""

    def __init__(self, common: dict[str, Any], tensors: Mapping[str, ShardedTensor]) -> None:
        """Hold what all ranks share, and this rank's pieces."""
        self._common = common
        self._tensors = tensors

    def prepare_model_params_for_param_sync(self) -> None:
        """As Megatron calls it before a save: the parameters are complete."""

    def sharded_state_dict(
        self, model_state: dict[str, Any], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """As Megatron asks an optimizer.

        Megatron writes the metadata beside the state, and a load goes by it: the form that is
        written goes in there, whichever the recipe has.
        """
        del model_state
        if "distrib_optim_sharding_type" in metadata:
            if metadata["distrib_optim_sharding_type"] != _FORM:
                print_rank_0(f"malleus: the plan's optimizer state is stored as {_FORM}")
            metadata["distrib_optim_sharding_type"] = _FORM
            metadata.setdefault("distrib_optim_fully_reshardable_mem_efficient", False)
        return {**self._common, "pieces": dict(self._tensors)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheckpoint:
    """What Megatron is given to save instead of the model and the optimizer."""

    model: SavedModel
    optimizer: SavedOptimizer


def checkpoint_of(stage: RankStage, config: Any, step: int) -> PlanCheckpoint:
    """Describe what this rank writes; nothing is copied.

    Args:
        stage: This rank's, under a plan.
        config: Megatron's TransformerConfig.
        step: Steps that the optimizer has made, also where this rank is on standby.
    """
    shards = stage.shards
    assert shards is not None, "Megatron saves the nominal stages itself"
    distributed = bool(get_args().use_distributed_optimizer)
    main = _DISTRIBUTED_MAIN if distributed else _MAIN if shards.keeps_main else None
    return PlanCheckpoint(
        model=SavedModel({**_parameters(stage, shards, config), **_objects(stage, config)}),
        optimizer=SavedOptimizer(
            _common(stage.optimizer, step, distributed=distributed, low=shards.keeps_main),
            _optimizer_tensors(stage, shards, main),
        ),
    )


def _parameters(stage: RankStage, shards: OwnerShards, config: Any) -> dict[str, ShardedTensor]:
    gpu = _gpu(stage)
    local = parameters_of(stage.module, parts_of(stage.module, stage.view, config)).tensors
    found = {}
    for share in shards.shares:
        for piece in share.pieces:
            holding = piece.slice.holding_of(gpu)
            whole = local[holding.name].view(holding.box.shape)
            name, tensor = _entry(piece, "", whole[holding.box.slices_of(piece.box)])
            found[name] = tensor
    return found


def _optimizer_tensors(
    stage: RankStage, shards: OwnerShards, main: str | None
) -> dict[str, ShardedTensor]:
    """Both moments, and the fp32 parameters where there is a name for them."""
    found = {}
    for inner in inner_optimizers(stage.optimizer):
        for share in shards.shares:
            if not share.main.numel():
                continue
            state = inner.optimizer.state[share.main]
            kept = {kind: state[kind] for kind in MOMENTS}
            if main is not None:
                kept[main] = share.main.detach()
            for piece in share.pieces:
                for kind, flat in kept.items():
                    data = flat[piece.span[0] : piece.span[1]].view(piece.box.shape)
                    name, tensor = _entry(piece, f"optimizer.state.{kind}.", data)
                    found[name] = tensor
    return found


def _entry(piece: Piece, prefix: str, data: Tensor) -> tuple[str, ShardedTensor]:
    """A name that no other piece of the rank has, and the piece as Megatron describes it."""
    key = prefix + piece.slice.key.removeprefix(f"{PARAMETER}.")
    return f"{key}@{piece.box.offset}", ShardedTensor(
        key=key,
        data=data.detach(),
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=piece.slice.holdings[0].global_shape,
        global_offset=piece.box.offset,
        # No regular grid: the box alone says where the data lies.
        axis_fragmentations=None,
    )


def _objects(stage: RankStage, config: Any) -> dict[str, ShardedObject]:
    """What modules keep beside tensors; the first ranks of the first pipeline have it all."""
    seat = stage.view.seat
    if seat is None or seat.pipeline != 0 or seat.tp_rank != 0:
        return {}
    leaves = sharded_leaves(stage.module, stage.view, config)
    return {
        leaf.unique_key: replace(leaf, replica_id=0)
        for leaf in leaves
        if isinstance(leaf, ShardedObject)
    }


def _common(optimizer: Any, step: int, *, distributed: bool, low: bool) -> dict[str, Any]:
    """What Megatron's optimizer of the same recipe puts into a checkpoint once for all ranks.

    Args:
        optimizer: This rank's.
        step: Steps made.
        distributed: Whether the recipe has Megatron's distributed optimizer.
        low: Whether parameters have less than 32 bits.
    """
    (inner,) = inner_optimizers(optimizer)
    # Each step of torch's Adam is counted by parameter, of the fused ones by group.
    by_parameter = isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW)
    groups = list(_groups(inner.optimizer.param_groups))
    if step and not by_parameter:
        groups = [group | {"step": step} for group in groups]
    scaler = scaler_state(optimizer)
    scaling = {} if scaler is None else {"grad_scaler": scaler}
    if distributed:
        if by_parameter:
            groups = [group | {"step": float(step)} for group in groups]
        return {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": _FORM,
            **scaling,
        }
    counted = {"common_step": torch.tensor(float(step))} if step and by_parameter else {}
    adam = {"state": counted, "param_groups": groups}
    return {"optimizer": adam, **scaling} if low else adam


def _groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Settings without parameters: those are each rank's own."""
    for group in groups:
        yield {name: value for name, value in group.items() if name != "params"}


def _gpu(stage: RankStage) -> int:
    assert stage.view.seat is not None
    return stage.view.seat.gpu
