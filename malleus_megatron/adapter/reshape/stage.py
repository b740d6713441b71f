"""A rank's model and optimizer under a view, made by Megatron's own builders."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.extensions import transformer_engine
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import Float16Module
from megatron.training import get_args, get_timers, training
from megatron.training.initialize import _set_random_seed
from megatron.training.vocab_utils import calculate_padded_vocab_size

from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.adapter.reshape.shards import OwnerShards
from malleus_megatron.adapter.reshape.view import View, changed

type _TeArguments = Callable[[Any], dict[str, Any]]
"""Megatron's: from its configuration to what Transformer Engine's layers are made with."""

_SEEDS_APART = 1_000_003
"""Between the seeds of one iteration and the next: far more than Megatron adds for a stage."""
_NUM_SEEDS = 2**31
"""numpy takes seeds below 2**32, and Megatron adds to what it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStage:
    """What one rank trains: its model chunks and their optimizer, and the view they belong to."""

    view: View
    model: list[Any]
    optimizer: Any
    buckets: OwnerBuckets | None = None
    """Sums and gathers what the optimizer updates under a plan; None under the nominal one."""

    @property
    def shards(self) -> OwnerShards | None:
        """What the optimizer updates; None: Megatron's own way."""
        return None if self.buckets is None else self.buckets.shards

    @property
    def module(self) -> Any:
        """The model inside all wrappers. There is one chunk: no virtual stages."""
        return training.unwrap_model(self.model)[0]


class StageBuilder:
    """Builds stages of the job's model the way Megatron built the first one."""

    def __init__(
        self,
        containers: Any,
        collection: ProcessGroupCollection | None,
        *,
        tp_degree: int,
        num_pipelines: int,
    ) -> None:
        """Hold what Megatron was given.

        Args:
            containers: Megatron's PretrainConfigContainer.
            collection: What `pretrain` handed to Megatron's own build.
            tp_degree: Of the nominal plan; the vocabulary stays padded for it under every plan.
            num_pipelines: Of the nominal plan; gradients are averaged over so many.
        """
        self.config = containers.model.transformer
        self.collection = collection
        self._containers = containers
        self._num_pipelines = num_pipelines
        self._model = copy.copy(containers.model)
        if self._model.should_pad_vocab:
            self._model.vocab_size = calculate_padded_vocab_size(
                self._model.vocab_size, self._model.make_vocab_size_divisible_by, tp_degree
            )
            self._model.should_pad_vocab = False

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, over all TP ranks."""
        return int(self._model.vocab_size)

    def model(self, view: View) -> list[Any]:
        """Model chunks on the device, in Megatron's wrappers, with values yet to be filled in."""
        collection = self.collection if view.collection is None else view.collection
        settings = self._containers
        with view.shown_with(self.config), _without_initialisation(self.config):
            builder = self._model.get_builder_cls()(self._model)
            chunks = builder.build_distributed_models(
                pg_collection=collection,
                ddp_config=copy.copy(settings.ddp),
                overlap_param_gather_with_optimizer_step=(
                    settings.optimizer.overlap_param_gather_with_optimizer_step
                ),
                use_megatron_fsdp=settings.dist.use_megatron_fsdp,
                use_torch_fsdp2=settings.dist.use_torch_fsdp2,
                wrap_with_ddp=True,
                data_parallel_random_init=False,
            )
        for chunk in chunks:
            chunk.train()
        return list(chunks)

    def outline(self, view: View) -> Any:
        """The model of a plan's stage without memory on the device: names, shapes, metadata."""
        config = self.config
        settings = {"use_cpu_initialization": True, "init_model_with_meta_device": True}
        te_arguments = transformer_engine._get_extra_te_kwargs  # noqa: SLF001
        te_settings = {"_get_extra_te_kwargs": described_alone(te_arguments)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(view.shown_with(config))
            stack.enter_context(_without_initialisation(config))
            stack.enter_context(changed(config, settings))
            stack.enter_context(torch.device("meta"))
            stack.enter_context(changed(transformer_engine, te_settings))
            module = self._model.get_builder_cls()(self._model).build_model(view.collection)
        in_half = config.bf16 or config.fp16
        return Float16Module(config, module) if in_half else module

    @property
    def gradient_bytes(self) -> int | None:
        """Of an element of a gradient buffer; None: as its parameter."""
        return 4 if self._containers.ddp.grad_reduce_in_fp32 else None

    @property
    def gradient_weight(self) -> float:
        """Of a pipeline's gradients in the sum over pipelines, as in Megatron's DDP."""
        if self.config.calculate_per_token_loss:
            return 1.0  # the sum is divided by the step's tokens
        return 1.0 / self._num_pipelines

    @property
    def copies_parameters(self) -> bool:
        """Whether Megatron's DDP lays a new stage's parameters into another buffer."""
        return bool(self._containers.ddp.use_distributed_optimizer)

    def stock_optimizer(self, view: View, model: list[Any]) -> Any:
        """Megatron's optimizer for the nominal stage, as Megatron makes it; a collective."""
        args = get_args()
        config, overrides = _optimizer_config()
        with view.shown_with(self.config):
            return training.get_megatron_optimizer(
                config,
                model,
                config_overrides=overrides,
                use_gloo_process_groups=args.use_gloo_process_groups,
            )

    def parameter_groups(self, view: View, model: list[Any]) -> list[dict[str, Any]]:
        """Megatron's groups of parameters by learning rate and weight decay; a collective.

        All ranks have the same groups in the same order; some are empty on some.
        """
        config, overrides = _optimizer_config()
        with view.shown_with(self.config):
            return list(core_optimizer._get_param_groups(model, config, overrides))  # noqa: SLF001

    def optimizer(
        self,
        view: View,
        model: list[Any],
        groups: Sequence[dict[str, Any]],
        buckets: OwnerBuckets,
    ) -> Any:
        """Megatron's optimizer over a rank's shares, in the place of whole parameters."""
        shards = buckets.shards
        config, _ = _optimizer_config()
        config = replace(config, use_distributed_optimizer=False)
        config.timers = get_timers()  # no field: a copy lacks it
        groups = [
            group | {"params": shards.by_optimizer_group(number)}
            for number, group in enumerate(groups)
        ]
        with view.shown_with(self.config):
            inner = core_optimizer._get_megatron_optimizer_based_on_param_groups(  # noqa: SLF001
                config=config,
                model_chunks=model,
                param_groups=groups,
                model_parallel_group=view.collection.mp if view.collection else None,
                pg_collection=view.collection,
            )
        if hasattr(inner, "_dummy_overflow_buf"):
            # No half-precision copies to fill: apex refuses to copy an empty list by its kernel.
            inner._dummy_overflow_buf = None  # noqa: SLF001
        update = inner.step_with_ready_grads

        def update_and_gather() -> bool:
            done = update()
            config.timers("params-all-gather", log_level=1).start()
            buckets.gather()
            config.timers("params-all-gather").stop()
            shards.drop_gradients()
            return bool(done)

        inner.step_with_ready_grads = update_and_gather
        inner.get_grads_for_grad_norm = shards.gradients_for_norm
        return core_optimizer.ChainedOptimizer([inner])


@torch.no_grad()
def complete_parameters(model: Sequence[Any], optimizer: Any) -> None:
    """Let all parameters have their values of now: with overlap, gathers may be under way.

    All ranks together: Megatron's own stages gather here what they would before a layer.
    """
    hooked = [chunk for chunk in model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    if hooked:
        training.force_param_sync(hooked, optimizer=optimizer)


def _optimizer_config() -> tuple[Any, Any]:
    config, overrides = training.get_megatron_optimizer_config(get_args())
    config.timers = get_timers()
    return config, overrides


def seed_at(seed: int, iteration: int) -> int:
    """The seed of a job's random streams after a switch at this iteration; above 0."""
    return 1 + (seed - 1 + _SEEDS_APART * iteration) % _NUM_SEEDS


def reseed(view: View, iteration: int) -> None:
    """Start the random streams of a rank's new place.

    Members of a TP group must draw alike where they hold the same tensor, wherever they come from.
    Another seed for each iteration: no mask is drawn a second time after a switch.
    """
    args = get_args()
    collection = view.collection
    groups = {}
    if collection is not None:
        groups = {"pp_group": collection.pp, "tp_group": collection.tp}
    with view.shown():
        _set_random_seed(
            seed_at(args.seed, iteration),
            args.data_parallel_random_init,
            args.te_rng_tracker,
            args.inference_rng_tracker,
            use_cudagraphable_rng=False,
            **groups,
        )


def described_alone(te_arguments: _TeArguments) -> _TeArguments:
    """Transformer Engine's layers get no memory, though Megatron says that the CPU makes them.

    Megatron's own layers need CPU initialization to keep off the device; for Transformer Engine's
    it outweighs `init_model_with_meta_device`.
    """

    def with_meta_device(config: Any) -> dict[str, Any]:
        return te_arguments(config) | {"device": "meta"}

    return with_meta_device


@contextlib.contextmanager
def _without_initialisation(config: Any) -> Iterator[None]:
    """No time for values that are about to be overwritten, and no random number drawn."""
    initialises = config.perform_initialization
    config.perform_initialization = False
    try:
        with random_streams_kept():
            yield
    finally:
        config.perform_initialization = initialises


@contextlib.contextmanager
def random_streams_kept() -> Iterator[None]:
    """All random streams go on afterwards as if nothing had been drawn or seeded inside."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracked = get_cuda_rng_tracker().get_states()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
        get_cuda_rng_tracker().set_states(tracked)
