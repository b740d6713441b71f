"""What Megatron's globals say to one rank under a plan.

Megatron's layers, builders and schedules ask module globals (parallel_state), the parsed arguments
and one TransformerConfig where they stand. Outside a training step arguments and parallel_state
stay nominal: loaders, checkpoints and logs read them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training import get_args

from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.seats import Seat, seat_of, standby_seat
from malleus_megatron.runtime.groups import Groups

_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Other ways to say how layers lie on stages; a layout says it all."""

_DATA_GROUPS = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
)


class StageNumber:
    """Stands where Megatron wants a pipeline group and only asks its rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        """The stage's number and the number of stages."""
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """The stage."""
        return self._rank

    def size(self) -> int:
        """Stages of the pipeline."""
        return self._size


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One rank's place, as Megatron sees it."""

    seat: Seat | None
    """None: the nominal plan, and nothing of Megatron is changed."""
    collection: ProcessGroupCollection | None
    """Of the model that is built under this view; None: whatever Megatron took at start."""
    parallel_state: Mapping[str, Any]
    args: Mapping[str, Any]
    config: Mapping[str, Any]
    """Fields of the TransformerConfig, which layers read while they run."""

    @property
    def is_nominal(self) -> bool:
        """Whether Megatron's own groups are in use."""
        return self.seat is None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let Megatron's globals say this; outside of it they are nominal."""
        with changed(parallel_state, self.parallel_state), changed(get_args(), self.args):
            yield

    def put_into(self, config: Any) -> None:
        """Let the TransformerConfig say this from now on."""
        for name, value in self.config.items():
            setattr(config, name, value)

    @contextlib.contextmanager
    def shown_with(self, config: Any) -> Iterator[None]:
        """As `shown`, and in the config too; it says afterwards what it said before."""
        with self.shown(), changed(config, self.config):
            yield


def nominal_view(config: Any, collection: ProcessGroupCollection | None) -> View:
    """What everything says now, before any plan."""
    fields = dict.fromkeys(_config_fields(config))
    return View(
        seat=None,
        collection=collection,
        parallel_state={},
        args={},
        config={name: getattr(config, name) for name in fields},
    )


def view_of(plan: Plan, gpu: int, groups: Groups, config: Any) -> View:
    """What a rank is to see under a plan whose TP groups have been made."""
    args = get_args()
    seat = seat_of(plan, gpu) or standby_seat(plan, gpu)
    # The one group that holds nobody else and exists already.
    alone = parallel_state.get_context_parallel_group()
    tp_group = groups.of(seat.tp_gpus) if len(seat.tp_gpus) > 1 else alone
    layout = _layout(plan, seat)
    return View(
        seat=seat,
        collection=_collection(seat, tp_group, alone),
        parallel_state=_parallel_state(plan, seat, tp_group, alone),
        args={
            "pipeline_model_parallel_size": seat.num_stages,
            "pipeline_model_parallel_layout": layout,
            **{name: _nothing(args, name) for name in _UNEVEN_STAGES if hasattr(args, name)},
        },
        config={
            **{name: _nothing(config, name) for name in _config_fields(config)},
            "tensor_model_parallel_size": seat.tp_degree,
            "pipeline_model_parallel_size": seat.num_stages,
            "pipeline_model_parallel_layout": layout,
            "sequence_parallel": bool(args.sequence_parallel and seat.tp_degree > 1),
            "pipeline_dtype": config.pipeline_dtype or config.params_dtype,
        },
    )


def _config_fields(config: Any) -> list[str]:
    return [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "sequence_parallel",
        "pipeline_dtype",
        *(name for name in _UNEVEN_STAGES if hasattr(config, name)),
    ]


def _nothing(owner: Any, name: str) -> Any:
    """What the setting is where nobody gave it."""
    return False if isinstance(getattr(owner, name), bool) else None


def _layout(plan: Plan, seat: Seat) -> PipelineParallelLayerLayout:
    """Megatron's layout of the rank's own pipeline; of a made-up one where it is on standby."""
    if seat.pipeline is None:
        layers = [1, 0, plan.num_layers - 1]
    else:
        layers = [stage.num_layers for stage in plan.pipelines[seat.pipeline].stages]
    stages = [["decoder"] * count for count in layers]
    stages[0] = ["embedding", *stages[0]]
    stages[-1] = [*stages[-1], "loss"]
    return PipelineParallelLayerLayout(stages, len(stages))


def _collection(
    seat: Seat, tp_group: dist.ProcessGroup, alone: dist.ProcessGroup
) -> ProcessGroupCollection:
    """The groups that the rank's model, optimizer and schedule are given.

    Gradients are summed over owners by us, so every data group holds the rank alone. What ranks of
    one pipeline agree on in stock (norm, skipped step), all ranks agree on here, standby too.
    """
    world = dist.group.WORLD
    data = dict.fromkeys(
        (
            *("dp", "dp_cp", "dp_cp_gtp_remat", "intra_dp_cp", "expt_dp", "intra_expt_dp"),
            *("ep", "expt_tp", "tp_ep", "tp_ep_pp"),
        ),
        alone,
    )
    return ProcessGroupCollection(
        tp=tp_group,
        tp_cp=tp_group,
        pp=StageNumber(seat.stage, seat.num_stages),
        mp=world,
        intra_dist_opt=world,
        cp=alone,
        embd=None,
        pos_embd=None,
        gtp_remat=parallel_state.get_gtp_weight_remat_group(),
        expt_gtp_remat=parallel_state.get_expert_gtp_weight_remat_group(),
        **data,
    )


def _parallel_state(
    plan: Plan, seat: Seat, tp_group: dist.ProcessGroup, alone: dist.ProcessGroup
) -> dict[str, Any]:
    if seat.pipeline is None:
        stages = [seat.gpu] * seat.num_stages
    else:
        stages = [stage.gpus[0] for stage in plan.pipelines[seat.pipeline].stages]
    world = dist.group.WORLD
    return {
        **dict.fromkeys(_DATA_GROUPS, alone),
        "_TENSOR_MODEL_PARALLEL_GROUP": tp_group,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": list(seat.tp_gpus),
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": tp_group,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": seat.stage,
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": seat.num_stages,
        "_PIPELINE_GLOBAL_RANKS": stages,
        # Sample counts and learning rates follow the nominal number of pipelines.
        "_MPU_DATA_PARALLEL_WORLD_SIZE": parallel_state.get_data_parallel_world_size(),
        "_MODEL_PARALLEL_GROUP": world,
        "_MODEL_PARALLEL_GLOBAL_RANKS": list(range(dist.get_world_size())),
        "_EMBEDDING_GROUP": None,
        "_EMBEDDING_GLOBAL_RANKS": None,
        "_POSITION_EMBEDDING_GROUP": None,
        "_POSITION_EMBEDDING_GLOBAL_RANKS": None,
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": world,
    }


@contextlib.contextmanager
def changed(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Let an object's attributes have these values for a while."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
