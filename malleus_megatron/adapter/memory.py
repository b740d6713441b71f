"""What a job's steps take of each GPU's memory: exact sizes once, then a measured step a plan."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import get_args

from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.control.memory import JobMemory, MemoryLimit
from malleus_megatron.control.memory_model import GpuMemory, ModelSizes
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.render import in_mib
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.memory import CpuMeter, CudaMeter, Meter
from malleus_megatron.runtime.storages import storage_bytes

_MIB = 2**20
_STATE_BYTES = 12
"""Of a parameter's element in the shares of a plan: fp32 value and two moments."""
_UPDATE_BYTES = 4
"""Of a parameter's element in the shares while they are updated: the sum of its gradients."""
_KEPT_FREE = 0.05
"""Of a device: what fragments of the allocator's blocks leave unused."""
_MEASURED_AT = 2
"""The iteration under a layout that is measured: in the first one things are still allocated."""
_AGAIN_EVERY = 50
"""Where measuring costs nothing: peaks may rise later."""


def memory_limit(agreement: Agreement, wanted_mib: float | None) -> MemoryLimit | None:
    """Memory of a GPU that plans may use; None: without a limit. A collective.

    Args:
        agreement: The ranks' control channel.
        wanted_mib: What the user asks for; None: all of the smallest device, if it is a GPU.

    Raises:
        BadInputError: on all ranks, if the user asks for more than a device has.
    """
    device_mib = torch.cuda.mem_get_info()[1] / _MIB if torch.cuda.is_available() else 0.0
    totals = [row[0] for row in agreement.exchange([device_mib])]
    smallest = min(totals)
    if wanted_mib is None:
        if not smallest:
            return None
        return MemoryLimit(
            memory_mib=smallest, reserve_mib=_KEPT_FREE * smallest, source="the device's total"
        )
    if 0 < smallest < wanted_mib:
        agreement.raise_together(
            BadInputError(
                f"--malleus-memory {in_mib(wanted_mib)} MiB, but GPU {totals.index(smallest)} has "
                f"{in_mib(smallest)} MiB. Ask for less, or leave the flag out."
            )
        )
    return MemoryLimit(memory_mib=wanted_mib, reserve_mib=0.0, source="--malleus-memory")


def job_memory(
    agreement: Agreement, switch: Switch, nominal: Plan, limit: MemoryLimit, *, largest_tp: int
) -> JobMemory:
    """The job's memory model before its first step; a collective.

    Args:
        agreement: The ranks' control channel.
        switch: Holds the stage that Megatron has built.
        nominal: The recipe's plan.
        limit: Of each GPU.
        largest_tp: The largest TP degree that a plan may have.
    """
    args = get_args()
    mine = agreement.together(
        "measuring the parameters", lambda: _stage_sizes(switch.module, largest_tp)
    )
    rows = [_StageSizes(*row) for row in agreement.exchange(mine)]
    tied = not args.untie_embeddings_and_output_weights
    heads = [row.head + (row.words if tied else 0.0) for row in rows]
    states = [row.head_state + (row.words_state if tied else 0.0) for row in rows]
    return JobMemory(
        ModelSizes(
            layer_mib=max(row.layer for row in rows),
            embedding_mib=max(row.embedding for row in rows),
            head_mib=max(heads),
            layer_shared_mib=max(row.layer_state for row in rows),
            layer_update_mib=max(row.layer_state for row in rows) * _UPDATE_BYTES / _STATE_BYTES,
            embedding_shared_mib=max(row.embedding_state for row in rows),
            head_shared_mib=max(states),
            replicated_mib=_replicated_bytes(args) / _MIB,
        ),
        limit,
        nominal,
        nominal_shares=bool(args.use_distributed_optimizer),
    )


@dataclass(frozen=True, slots=True)
class _StageSizes:
    """In MiB, over the TP group: parameters with gradients, and optimizer state if kept whole.

    The state of the ends has the sum of their gradients with it.
    """

    layer: float
    layer_state: float
    embedding: float
    embedding_state: float
    head: float
    head_state: float
    words: float
    """The word embedding, of which a tied last stage has a copy."""
    words_state: float


def _stage_sizes(module: Any, largest_tp: int) -> list[float]:
    """In the order of `_StageSizes`; a layer's are the mean of this rank's."""
    tp_degree = get_args().tensor_model_parallel_size
    num_layers = max(1, len(module.decoder.layers))
    kept, state = dict.fromkeys(_PARTS, 0.0), dict.fromkeys(_PARTS, 0.0)
    for name, parameter in module.named_parameters():
        # What each GPU of a TP group has whole weighs more with every degree.
        over = tp_degree if getattr(parameter, "tensor_model_parallel", False) else largest_tp
        elements = parameter.numel() * over / _MIB
        element_bytes = parameter.element_size() + parameter.main_grad.element_size()
        for part in _parts_of(name, has_input=bool(module.pre_process)):
            kept[part] += elements * element_bytes
            state[part] += elements * (_STATE_BYTES + _UPDATE_BYTES * (part != "layer"))
    for sizes in (kept, state):
        sizes["layer"] /= num_layers
    return [sizes[part] for part in _PARTS for sizes in (kept, state)]


_PARTS = ("layer", "embedding", "head", "words")


def _parts_of(name: str, *, has_input: bool) -> Iterator[str]:
    if name.startswith("decoder.layers."):
        yield "layer"
    elif name.startswith("embedding.") and has_input:
        yield "embedding"
        if name.startswith("embedding.word_embeddings."):
            yield "words"
    else:
        yield "head"


def _replicated_bytes(args: Any) -> float:
    """Activations of a layer and micro-batch that no TP group shares out, in bytes.

    Inputs of both norms and of both linear blocks and two dropout masks, the 10 in
    s b h (10 + 24 / t + 5 a s / (h t)) of Korthikanti et al., arXiv 2205.05198, section 4.2;
    with full recomputation only a layer's input is left.
    """
    if args.sequence_parallel:
        return 0.0
    hidden = _hidden_elements(args)
    if args.recompute_granularity == "full":
        return 0.0 if args.distribute_saved_activations else hidden * _element_bytes(args)
    return hidden * (4 * _element_bytes(args) + 2 * (args.hidden_dropout > 0))


def _hidden_elements(args: Any) -> float:
    return float(args.seq_length * args.micro_batch_size * args.hidden_size)


def _element_bytes(args: Any) -> int:
    return int(torch.empty(0, dtype=args.params_dtype, device="cpu").element_size())


class StepMemory:
    """Measures one step under each layout, where it costs something, and more where it does not.

    On every rank the same steps are measured.
    """

    def __init__(self, switch: Switch) -> None:
        """Nothing is measured yet; the switch holds the stage that this rank trains."""
        on_gpu = torch.cuda.is_available()
        self.meter: Meter = CudaMeter() if on_gpu else CpuMeter()
        self._again_every = _AGAIN_EVERY if on_gpu else None
        self._switch = switch
        self._age = 0
        self._marks: list[int] | None = None
        self._reading: GpuMemory | None = None

    def moved(self) -> None:
        """Another stage is in place."""
        self._age = 0

    def take(self) -> GpuMemory | None:
        """The measured step, once; on all ranks at the same boundary."""
        reading, self._reading = self._reading, None
        return reading

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step."""
        if self._age == 0:
            self.meter.restart()
        self._age += 1
        again = self._again_every is not None and self._age % self._again_every == 0
        if self._age != _MEASURED_AT and not again:
            yield
            return
        self._marks = []
        # Gathers under way would end, and give their buffers back, in the middle of what is marked.
        self._switch.complete_parameters()
        with self.meter.watched():
            yield
        self._reading = self._read(self._marks)
        self._marks = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a stage's forward pass of a micro-batch: the first of a measured step counts."""
        marks = self._marks
        if marks is None or marks:
            yield
            return
        marks.append(self.meter.now_bytes())
        hook = self._switch.module.decoder.register_forward_hook(
            lambda *_: marks.append(self.meter.now_bytes())
        )
        try:
            yield
        finally:
            hook.remove()
        marks.append(self.meter.now_bytes())

    def _read(self, marks: Sequence[int]) -> GpuMemory:
        outside, peak = self.meter.outside_bytes(), self.meter.peak_bytes()
        saved = head = 0
        if len(marks) == 3:  # a standby GPU runs no micro-batch
            before, after_layers, after = marks
            saved = max(0, after_layers - before) + self._input_bytes()
            head = max(0, after - after_layers)
        held = storage_bytes(self._switch.tensors())
        in_bytes = (outside + peak, outside, held, saved, head)
        return GpuMemory.of([value / _MIB for value in in_bytes])

    def _input_bytes(self) -> int:
        """Of what the stage before has sent, which was there before the forward pass."""
        module, args = self._switch.module, get_args()
        if module.pre_process:
            return 0
        shared = module.config.sequence_parallel
        tp_degree = module.config.tensor_model_parallel_size if shared else 1
        return int(_hidden_elements(args) * _element_bytes(args) / tp_degree)
