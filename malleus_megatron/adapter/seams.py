"""The seams: every attribute of Megatron that --malleus replaces, where, and why.

This table is the whole footprint of the plugin in Megatron 0.19. Each replacement is a few lines
that call the job; before the job is set up, and without a plan, they pass everything through.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from malleus_megatron.adapter.plugin import Plugin
from malleus_megatron.adapter.record import TRAIN_STEP_SIGNATURE
from malleus_megatron.adapter.schedule import under_plan, with_loss_divisor
from malleus_megatron.adapter.trace import trace_row
from malleus_megatron.config import add_flags
from malleus_megatron.runtime.patching import Replacement

MEGATRON_VERSIONS = ("0.19",)
"""Minor versions of megatron-core whose signatures stand in the table."""


def seam_rows(plugin: Plugin) -> tuple[Replacement, ...]:
    """The table, with replacements that act for this plugin."""
    rows = (*_training_rows(plugin), *_reshape_rows(plugin), *_schedule_rows(plugin))
    if not plugin.config.trace:
        return rows
    return (*rows, trace_row(lambda: None if plugin.job is None else plugin.job.trace))


def _training_rows(plugin: Plugin) -> tuple[Replacement, ...]:
    """Megatron's training loop."""
    return (
        Replacement(
            target="megatron.training.arguments.add_megatron_arguments",
            signature="(parser)",
            make=_add_flags,
            reason="Megatron's parser knows the --malleus flags.",
        ),
        Replacement(
            target="megatron.training.training.setup_model_and_optimizer",
            signature="(model_type, model_provider_func=, checkpointing_context=, *, "
            "cfg_container=, pg_collection=)",
            make=functools.partial(_set_up, plugin),
            reason="Groups and arguments are known: level, inputs and clocks are set up.",
        ),
        Replacement(
            target="megatron.training.training.build_pretraining_data_loader",
            signature="(dataset, consumed_samples)",
            make=functools.partial(_share_data, plugin),
            reason="The training loader can be split over pipelines in any way.",
        ),
        Replacement(
            target="megatron.training.training.get_forward_backward_func",
            signature="(pp_size=, vp_size=, schedule_pg_collection=)",
            make=functools.partial(_dispatch, plugin),
            reason="Each pipeline runs the plan's number of micro-batches.",
        ),
        Replacement(
            target="megatron.training.training.train_step",
            signature=TRAIN_STEP_SIGNATURE,
            make=functools.partial(_step, plugin),
            reason="The iteration boundary: timings out, plans in, on all ranks together.",
        ),
        Replacement(
            target="megatron.training.training.train",
            signature="(forward_step_func, model, optimizer, opt_param_scheduler, "
            "train_data_iterator, valid_data_iterator, process_non_loss_data_func, config, "
            "checkpointing_context, non_loss_data_func, inference_model=, p2p_communicator=, "
            "pg_collection=)",
            make=functools.partial(_train, plugin),
            reason="The last iteration is reported, and the sidecar is stopped.",
        ),
    )


def _reshape_rows(plugin: Plugin) -> tuple[Replacement, ...]:
    """What Megatron does between training steps, in a job that may be reshaped."""
    return (
        Replacement(
            target="megatron.training.training.evaluate",
            signature="(forward_step_func, data_iterator, model, process_non_loss_data_func, "
            "config, verbose=, non_loss_data_func=, eval_iters=, pg_collection=, "
            "p2p_communicator=)",
            make=functools.partial(_evaluate, plugin),
            reason="A reshaped job evaluates under its plan; every rank knows the loss.",
        ),
        Replacement(
            target="megatron.training.training.save_checkpoint_and_time",
            signature="(iteration, model, optimizer, opt_param_scheduler, "
            "num_floating_point_operations_so_far, checkpointing_context, "
            "non_persistent_ckpt=, train_data_iterator=)",
            make=functools.partial(_save, plugin),
            reason="A reshaped job saves Megatron's checkpoint from its plan's stages.",
        ),
        Replacement(
            target="megatron.core.datasets.blended_megatron_dataset_builder."
            "BlendedMegatronDatasetBuilder.__init__",
            signature="(self, cls, sizes, is_built_on_rank, config)",
            make=functools.partial(_build_data, plugin),
            reason="In a job that may be reshaped any rank may come to read data.",
        ),
    )


def _schedule_rows(plugin: Plugin) -> tuple[Replacement, ...]:
    """The pipeline schedules of Megatron's core."""
    return (
        Replacement(
            target="megatron.core.pipeline_parallel.schedules.forward_step_calc_loss",
            signature="(model, output_tensor, loss_func, config, vp_stage, "
            "collect_non_loss_data, num_microbatches, forward_data_store, cp_group_size=, "
            "is_last_stage=)",
            make=with_loss_divisor,
            reason="The loss is divided by the step's micro-batches, not by the pipeline's own.",
        ),
        Replacement(
            target="megatron.core.pipeline_parallel.schedules.forward_step",
            signature="(forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
            "forward_data_store, config, cp_group_size, collect_non_loss_data=, "
            "checkpoint_activations_microbatch=, is_first_microbatch=, current_microbatch=, "
            "vp_stage=, is_last_stage=)",
            make=functools.partial(_timed, plugin, "stage_forward"),
            reason="A stage's forward time, without the waits between stages.",
        ),
        Replacement(
            target="megatron.core.pipeline_parallel.schedules.backward_step",
            signature="(input_tensor, output_tensor, output_tensor_grad, config)",
            make=functools.partial(_timed, plugin, "stage_backward"),
            reason="A stage's backward time, without the waits between stages.",
        ),
    )


def _add_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_flags(original(parser))

    return add_megatron_arguments


def _set_up(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        plugin.before_model(kwargs.get("cfg_container"), kwargs.get("pg_collection"))
        built = original(*args, **kwargs)
        plugin.set_up(built)
        return built

    return setup_model_and_optimizer


def _share_data(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        return plugin.loader(dataset, consumed_samples, build=original)

    return build_pretraining_data_loader


def _dispatch(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)
        return schedule if plugin.job is None else under_plan(plugin.job, schedule)

    return get_forward_backward_func


def _step(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(*args: Any, iteration: int | None = None, **kwargs: Any) -> Any:
        job = plugin.job
        if job is None or iteration is None:
            return original(*args, iteration=iteration, **kwargs)
        job.begin_iteration(iteration + 1)
        started = time.perf_counter()
        with job.in_step():
            outcome = original(*args, iteration=iteration, **kwargs)
        return job.end_iteration(outcome, time.perf_counter() - started)

    return train_step


def _evaluate(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        job = plugin.job
        if job is None or not job.is_reshaped:
            return original(*args, **kwargs)
        job.evaluation.begin()
        with job.in_view():
            losses, collected, time_is_up = original(*args, **kwargs)
        return None if losses is None else job.evaluation.losses(), collected, time_is_up

    return evaluate


def _save(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint_and_time(
        iteration: int,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        built = model, optimizer, opt_param_scheduler
        if plugin.saves is None:
            original(iteration, *built, *args, **kwargs)
        else:
            plugin.saves.save(original, iteration, built, *args, **kwargs)

    return save_checkpoint_and_time


def _build_data(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(  # noqa: N807 - it replaces the method of that name
        self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any
    ) -> None:
        original(self, cls, sizes, plugin.is_built_here(is_built_on_rank), config)

    return __init__


def _train(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            outcome = original(*args, **kwargs)
        except SystemExit:
            # Megatron's own exits (time, signal, interval) are taken by all ranks together.
            plugin.finish(together=True)
            raise
        except BaseException:
            plugin.finish(together=False)
            raise
        plugin.finish(together=True)
        return outcome

    return train


def _timed(plugin: Plugin, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def timed_step(*args: Any, **kwargs: Any) -> Any:
        if plugin.job is None:
            return original(*args, **kwargs)
        with getattr(plugin.job, part)():
            return original(*args, **kwargs)

    return timed_step
