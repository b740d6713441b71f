"""What a rank holds of the job's state: from Megatron's ShardedTensor metadata to holdings.

Ownership is one notion. A parameter's metadata says which box of which global tensor it is; what
belongs to the parameter (its fp32 copy, both moments, its gradient) lies in the same box, or in a
span of it where Megatron's distributed optimizer has cut it up.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from malleus_megatron.adapter.reshape.shards import OwnerShards
from malleus_megatron.adapter.reshape.stage import RankStage
from malleus_megatron.adapter.reshape.view import View
from malleus_megatron.adapter.torch_adam import allocate
from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box, Span
from malleus_megatron.migration.holdings import Holding, tensor_name
from malleus_megatron.migration.shards import piece_holding
from malleus_megatron.migration.spans import boxes_of_span
from malleus_megatron.runtime.blocks import give_back, present

PARAMETER = "parameter"
MAIN = "main"
MOMENTS = ("exp_avg", "exp_avg_sq")
WITH_MAIN = MOMENTS[0]
"""Whose blocks hold a share's fp32 values too, where those are filled from the parameters."""
_STEP = "step"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a global tensor and where its elements begin in the flat local parameter."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    replica: int
    depth: int


type Parts = Mapping[int, Sequence[Part]]
"""The parts of every parameter, by the parameter's id."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """Holdings, and the tensors behind their names."""

    holdings: list[Holding] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, list[Tensor]] = field(default_factory=dict)
    """What comes into memory and leaves it together; the tensors above are views of these."""
    names_of: dict[nn.Parameter, list[str]] = field(default_factory=dict)
    """The holdings of each parameter, where `parameters_of` listed them."""

    def add(
        self,
        kind: str,
        parts: Sequence[Part],
        flat: Tensor,
        span: Span,
        *,
        optimizer_group: int = 0,
    ) -> list[str]:
        """Take in a tensor that goes with a parameter.

        Args:
            kind: What it is of the parameter; part of the key.
            parts: Of the parameter.
            flat: One axis; element 0 is the parameter's element span[0].
            span: Elements of the flat parameter that it has.
            optimizer_group: Of the parameter.

        Returns:
            The names of its holdings.
        """
        names = []
        block = PARAMETER if kind == PARAMETER else f"{kind} of {_first_name(parts)}"
        for part in parts:
            low = span[0] - part.start
            for box, (start, end) in boxes_of_span(part.box, (low, span[1] - part.start)):
                key = f"{kind}.{part.key}"
                name = tensor_name(key, box)
                names.append(name)
                self.tensors[name] = flat[start - low : end - low]
                self.holdings.append(
                    Holding(
                        key=key,
                        global_shape=part.global_shape,
                        box=box,
                        element_bytes=flat.element_size(),
                        name=name,
                        replica=part.replica,
                        depth=part.depth,
                        optimizer_group=optimizer_group,
                        block=block,
                    )
                )
        return names


def state_of(stage: RankStage, config: Any, *, with_memory: bool = True) -> RankState:
    """Everything that must move when the stage's owner changes: parameters and optimizer state.

    An optimizer that has made no step yet gets its state first: zeros, as its first step would.
    See `with_optimizer_state` for the arguments.

    Raises:
        MigrationError: a parameter without metadata, naming it.
    """
    parts = parts_of(stage.module, stage.view, config)
    parameters = parameters_of(stage.module, parts)
    return with_optimizer_state(stage, parts, parameters, with_memory=with_memory)


def with_optimizer_state(
    stage: RankStage, parts: Parts, parameters: RankState, *, with_memory: bool = True
) -> RankState:
    """The parameters, and beside them what the stage's optimizer keeps; see `state_of`.

    Args:
        stage: This rank's.
        parts: Of its parameters.
        parameters: Its state so far.
        with_memory: False: the optimizer's tensors are left without; it comes later.
    """
    state = RankState(
        holdings=[*parameters.holdings],
        tensors={**parameters.tensors},
        blocks={PARAMETER: list(stage.module.parameters())},
    )
    for inner in inner_optimizers(stage.optimizer):
        _allocate(inner, with_memory=with_memory)
        if stage.shards is not None:
            _add_shares(state, stage.shards, inner, with_memory=with_memory)
            continue
        for parameter, span, tensors in _optimizer_tensors(inner):
            for kind, tensor in tensors.items():
                own = parts[id(parameter)]
                state.blocks[f"{kind} of {_first_name(own)}"] = [tensor]
                with present([tensor], afterwards=with_memory):
                    state.add(kind, own, tensor.detach().view(-1), span)
    return state


def parameters_of(module: Any, parts: Parts, groups: Sequence[Mapping[str, Any]] = ()) -> RankState:
    """The parameters of a model.

    Args:
        module: The model.
        parts: Of all its parameters.
        groups: The optimizer's, where holdings are to say them.
    """
    number_of = {
        id(parameter): number
        for number, group in enumerate(groups)
        for parameter in group["params"]
    }
    state = RankState()
    for parameter in module.parameters():
        flat = parameter.detach().view(-1)
        group = number_of.get(id(parameter), 0)
        state.names_of[parameter] = state.add(
            PARAMETER, parts[id(parameter)], flat, (0, flat.numel()), optimizer_group=group
        )
    return state


def gradients_of(module: Any, parts: Parts) -> dict[str, Tensor]:
    """Each parameter's gradient buffer by the names of the parameter's holdings.

    The buffers stay the same from step to step.
    """
    state = RankState()
    for parameter in module.parameters():
        flat = parameter.main_grad.view(-1)
        state.add(PARAMETER, parts[id(parameter)], flat, (0, flat.numel()))
    return state.tensors


def _add_shares(state: RankState, shards: OwnerShards, inner: Any, *, with_memory: bool) -> None:
    """The optimizer's state of each share, piece by piece."""
    for share in shards.shares:
        if not share.main.numel():
            continue
        tensors = _tensors(share.main, share.main, inner.optimizer.state[share.main])
        if shards.keeps_main:
            tensors[MAIN] = share.main.detach()
        for kind, tensor in tensors.items():
            block = state.blocks.setdefault(share.group.block(kind), [tensor])
            if kind == WITH_MAIN and not shards.keeps_main:
                block.append(share.main)
            size = tensor.element_size()
            with present(block, afterwards=with_memory):
                for piece in share.pieces:
                    holding = piece_holding(share.group, piece, kind, size, f"{PARAMETER}.")
                    state.holdings.append(holding)
                    state.tensors[holding.name] = tensor[piece.span[0] : piece.span[1]]


def parts_of(module: Any, view: View, config: Any) -> Parts:
    """The parts of every parameter, by the parameter's id.

    Raises:
        MigrationError: a parameter whose elements the metadata does not cover.
    """
    found: dict[int, list[Part]] = {}
    depths = _Depths(num_layers=config.num_layers, has_input=bool(module.pre_process))
    for leaf in sharded_leaves(module, view, config):
        if isinstance(leaf, ShardedTensorFactory):
            built = nested_values(leaf.build())
            found[id(leaf.data)] = [depths.part(tensor, leaf.data) for tensor in built]
        elif isinstance(leaf, ShardedTensor):
            found[id(leaf.data)] = [depths.part(leaf, leaf.data)]
    for name, parameter in module.named_parameters():
        parts = found.get(id(parameter), [])
        covered = sum(part.box.num_elements for part in parts)
        if covered != parameter.numel():
            raise MigrationError(
                f"{name}: Megatron's checkpoint metadata covers {covered} of {parameter.numel()} "
                "elements; it cannot be moved."
            )
    return found


def sharded_leaves(module: Any, view: View, config: Any) -> list[Any]:
    """What Megatron would write into a checkpoint of this model: tensors, factories, objects."""
    with view.shown_with(config):
        return list(nested_values(module.sharded_state_dict(metadata=_metadata(module))))


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that hold parameters; none on a rank without any."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def step_count(optimizer: Any) -> int:
    """Steps that the optimizer has made; 0 before the first, and on a rank without parameters."""
    counts = [0.0]
    for inner in inner_optimizers(optimizer):
        states = inner.optimizer.state.values()
        counts += [float(state[_STEP]) for state in states if _STEP in state]
        counts += [float(group.get(_STEP, 0)) for group in inner.optimizer.param_groups]
    return int(max(counts))


def set_step_count(optimizer: Any, step: int) -> None:
    """Let an optimizer whose state has been allocated go on after so many steps."""
    for inner in inner_optimizers(optimizer):
        for state in inner.optimizer.state.values():
            if _STEP in state:
                state[_STEP].fill_(step)
        if not isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW) and step:
            # The fused Adam of Transformer Engine and Apex counts per group.
            for group in inner.optimizer.param_groups:
                group[_STEP] = step


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
    """Of the loss scale, which is the same on all ranks; None where there is none."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(inner, "grad_scaler", None) is not None:
            return dict(inner.grad_scaler.state_dict())
    return None


def set_scaler_state(optimizer: Any, state: dict[str, Any] | None) -> None:
    """Let the loss scale go on from there."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if state is not None and getattr(inner, "grad_scaler", None) is not None:
            inner.grad_scaler.load_state_dict(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Depths:
    """Where tensors come in the forward pass."""

    num_layers: int
    has_input: bool

    def part(self, tensor: ShardedTensor, parameter: Tensor) -> Part:
        """One ShardedTensor, whose data is the parameter or a range of its rows."""
        assert tensor.data is not None
        leading = (1,) * tensor.prepend_axis_num
        replica = tensor.replica_id
        return Part(
            key=tensor.key,
            global_shape=tuple(tensor.global_shape),
            box=Box(offset=tuple(tensor.global_offset), shape=(*leading, *tensor.local_shape)),
            start=tensor.data.storage_offset() - parameter.storage_offset(),
            # (pipeline, TP, data): TP ranks that hold the same tensor count up in the middle.
            replica=replica[1] if isinstance(replica, tuple) else int(replica),
            depth=self._depth(tensor),
        )

    def _depth(self, tensor: ShardedTensor) -> int:
        if tensor.key.startswith("embedding.") and self.has_input:
            return 0
        if tensor.prepend_axis_num:
            return int(tensor.global_offset[0]) + 1
        numbered = _LAYER.search(tensor.key)
        return self.num_layers + 1 if numbered is None else int(numbered[1]) + 1


def _metadata(module: Any) -> dict[str, Any]:
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": module.pg_collection.dp_cp,
    }


def _allocate(inner: Any, *, with_memory: bool) -> None:
    adam = inner.optimizer
    for main in [main for group in adam.param_groups for main in group["params"]]:
        # One at a time: together they may be more than there is room for.
        alone = SimpleNamespace(
            param_groups=[{"params": [main]}],
            state=adam.state,
            initialize_state=getattr(adam, "initialize_state", None),
        )
        if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            allocate(alone)
        else:
            inner.init_state_fn(alone, inner.config)
        if not with_memory:
            state = adam.state[main]
            give_back(value for name, value in state.items() if name in MOMENTS)


def _first_name(parts: Sequence[Part]) -> str:
    return tensor_name(parts[0].key, parts[0].box)


def _optimizer_tensors(inner: Any) -> Iterator[tuple[Tensor, Span, dict[str, Tensor]]]:
    """Each parameter with the span of it that the optimizer has here, and the tensors for it."""
    if isinstance(inner, DistributedOptimizer):
        for parameter in inner.model_param_group_index_map:
            flat = inner._get_model_param_range_map(parameter)["param"]  # noqa: SLF001
            tensors = dict(inner._get_main_param_and_optimizer_states(parameter))  # noqa: SLF001
            main = tensors.pop("param")
            yield parameter, (flat.start, flat.end), _tensors(parameter, main, tensors)
        return
    if isinstance(inner, Float16OptimizerWithFloat16Params):
        pairs = [
            pair
            for models, mains in zip(
                inner.float16_groups, inner.fp32_from_float16_groups, strict=True
            )
            for pair in zip(models, mains, strict=True)
        ]
        pairs += [(same, same) for group in inner.fp32_from_fp32_groups for same in group]
    else:
        pairs = [(p, p) for group in inner.optimizer.param_groups for p in group["params"]]
    for parameter, main in pairs:
        state = inner.optimizer.state[main]
        yield parameter, (0, parameter.numel()), _tensors(parameter, main, state)


def _tensors(parameter: Tensor, main: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """What is kept apart from the parameter; in fp32 the main parameter is the parameter."""
    tensors = {
        name: value for name, value in state.items() if isinstance(value, Tensor) and name != _STEP
    }
    if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        tensors[MAIN] = main
    return tensors
