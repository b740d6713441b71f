"""torch without a GPU: what asks for a CUDA device gets the CPU.

Megatron names its device "cuda" in hundreds of places. These rows give that name a meaning on a
machine without a GPU: memory is RAM, streams run at once, the CUDA random stream is the CPU's.
`torch.cuda.is_available()` stays honest.
"""

import collections
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from malleus_megatron.runtime.patching import Replacement

CPU = torch.device("cpu")

FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "scalar_tensor"),
    *("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices"),
    *("rand", "randn", "randint", "randperm", "empty_strided", "empty_permuted"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
    *(f"Tensor.new_{kind}" for kind in ("tensor", "empty", "zeros", "ones", "full")),
    "Tensor.new_empty_strided",
)


def on_cpu(device: Any) -> Any:
    """The CPU for any spelling of a CUDA device ("cuda:1", device("cuda"), 1); else unchanged."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


class CpuStream:
    """A stream whose work is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what `torch.cuda.Stream` takes."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority: there is only one."""
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        """Mark this moment."""
        event = CpuEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "CpuStream":
        """Work is never queued, so there is nothing to enter."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class CpuEvent:
    """A moment on the clock of the host, which is the clock of the work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what `torch.cuda.Event` takes."""
        self.at_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Mark this moment."""
        self.at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """All work before the event is done."""
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds from this event to `end`, as torch's own."""
        return 1e3 * (end.at_s - self.at_s)


class CpuProperties(NamedTuple):
    """The fields of torch's device properties that training code reads."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


STREAM = CpuStream()


def cpu_properties(device: Any = None) -> CpuProperties:
    """Describe this machine in the words for a GPU.

    Compute capability 10: from there on Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CpuProperties("cpu", 10, 0, memory, os.cpu_count() or 1)


def local_rank(*_: Any) -> int:
    """The process's place on its machine, which stands for the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes on this machine: one stands for one GPU."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def in_stream(stream: Any) -> Iterator[Any]:
    """Take the place of `with torch.cuda.stream(...)`."""
    yield stream


def _without_cuda(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The same factory for a device that is the CPU, and without pinned memory."""

    @functools.wraps(factory)
    def on_this_machine(*arguments: Any, **options: Any) -> Any:
        if options.get("device") is not None:
            options["device"] = on_cpu(options["device"])
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return factory(*arguments, **options)

    return on_this_machine


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        return original(tensor, *map(on_cpu, arguments), **options)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Name the type as on a GPU, and take such names."""

    @functools.wraps(original)
    def type_(tensor: Any, *arguments: Any, **options: Any) -> Any:
        asked = (
            word.replace(".cuda", "", 1) if isinstance(word, str) else word for word in arguments
        )
        answer = original(tensor, *asked, **options)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def _data_loader_init(original: Callable[..., None]) -> Callable[..., None]:
    """Loaders draw their seed from a generator of their own, and do not pin."""

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        options["pin_memory"] = False
        if options.get("generator") is None:
            options["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        original(self, *arguments, **options)

    return init


def _gloo_for_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    """Groups on gloo where NCCL is asked for; its options and the device to bind to are dropped."""

    @functools.wraps(original)
    def make(*arguments: Any, **options: Any) -> Any:
        if "nccl" in str(options.get("backend")):
            options["backend"] = "gloo"
        options = {
            name: value
            for name, value in options.items()
            if name not in {"pg_options", "device_id"}
        }
        if arguments and isinstance(arguments[0], str) and "nccl" in arguments[0]:
            arguments = ("gloo", *arguments[1:])
        return original(*arguments, **options)

    return make


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather tensors of unequal sizes, padded to the largest: gloo knows equal ones only."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, *group: Any, **options: Any
    ) -> Any:
        longest = max(part.shape[0] if part.dim() else 0 for part in tensor_list)
        if all(not part.dim() or part.shape[0] == longest for part in tensor_list):
            return original(tensor_list, tensor, *group, **options)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        work = original(gathered, padded, *group, **options)
        if work is not None:
            work.wait()
        for part, whole in zip(tensor_list, gathered, strict=True):
            part.copy_(whole[: part.shape[0]])
        return work

    return all_gather


def _instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A new function for each row: torch's tracing keeps a table of functions, by identity."""

    def make(original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def stand_in(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options)

        return stand_in

    return make


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: on a CPU there is nothing to do."""


def _rows(make: Callable[[Any], Any], reason: str, *targets: str) -> tuple[Replacement, ...]:
    return tuple(
        Replacement(target=f"torch.{target}", make=make, reason=reason) for target in targets
    )


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


_RANDOM = "dropout on CPU tensors draws from the CPU's generator, so that is the CUDA stream"
_STREAMS = "work on a CPU is done when the call returns"

ROWS: tuple[Replacement, ...] = (
    *_rows(_without_cuda, "a tensor on a CUDA device is made in RAM, unpinned", *FACTORIES),
    *_rows(_tensor_to, "a move to a CUDA device stays in RAM", "Tensor.to"),
    *_rows(_instead(lambda tensor, *_, **__: tensor), "already where it trains", "Tensor.cuda"),
    *_rows(
        _instead(lambda tensor, *_, **__: tensor), "there is no memory to pin", "Tensor.pin_memory"
    ),
    *_rows(_instead(_nothing), "memory is freed in program order", "Tensor.record_stream"),
    *_rows(_tensor_type, "Megatron's optimizers compare the type with CUDA's names", "Tensor.type"),
    *_rows(_instead(local_rank), "one process stands for one GPU", "cuda.current_device"),
    *_rows(_instead(local_world_size), "one process stands for one GPU", "cuda.device_count"),
    *_rows(_instead(_nothing), "there is one device", "cuda.set_device"),
    *_rows(
        _instead(cpu_properties), "the machine described as a GPU", "cuda.get_device_properties"
    ),
    *_rows(
        _instead(lambda device=None: (10, 0)),
        "the machine described as a GPU",
        "cuda.get_device_capability",
    ),
    *_rows(_instead(lambda device=None: "cpu"), "there is no GPU to name", "cuda.get_device_name"),
    *_rows(lambda _: CpuStream, _STREAMS, "cuda.Stream"),
    *_rows(lambda _: CpuEvent, _STREAMS, "cuda.Event"),
    *_rows(
        _instead(lambda device=None: STREAM), _STREAMS, "cuda.current_stream", "cuda.default_stream"
    ),
    *_rows(_instead(in_stream), _STREAMS, "cuda.stream"),
    *_rows(_instead(_nothing), _STREAMS, "cuda.set_stream", "cuda.synchronize"),
    *_rows(_instead(lambda: False), _STREAMS, "cuda.is_current_stream_capturing"),
    *_rows(
        _instead(_nothing),
        "there is no GPU memory to count",
        "cuda.reset_peak_memory_stats",
        "cuda.reset_max_memory_allocated",
        "cuda.ipc_collect",
    ),
    *_rows(
        _instead(lambda device=None: 0),
        "there is no GPU memory to count",
        "cuda.device_memory_used",
    ),
    *_rows(
        _instead(lambda device=None: collections.defaultdict(int)),
        "Megatron looks up figures that the CPU's empty answer lacks",
        "cuda.memory_stats",
    ),
    *_rows(_instead(_nothing), "NVTX is a GPU profiler's", "cuda.nvtx.range_push"),
    *_rows(_instead(_nothing), "NVTX is a GPU profiler's", "cuda.nvtx.range_pop"),
    *_rows(_instead(_get_rng_state), _RANDOM, "cuda.get_rng_state", "cuda.random.get_rng_state"),
    *_rows(_instead(_set_rng_state), _RANDOM, "cuda.set_rng_state", "cuda.random.set_rng_state"),
    *_rows(_instead(_manual_seed), _RANDOM, "cuda.manual_seed", "cuda.manual_seed_all"),
    *_rows(
        _data_loader_init,
        "only TP rank 0 has a loader, and its draw must not move the shared random stream",
        "utils.data.DataLoader.__init__",
    ),
    *_rows(
        _gloo_for_nccl,
        "NCCL needs GPUs",
        "distributed.init_process_group",
        "distributed.new_group",
    ),
    *_rows(_all_gather, "gloo gathers tensors of one size only", "distributed.all_gather"),
    *_rows(
        lambda _: True, "compiling takes minutes and changes rounding", "_dynamo.config.disable"
    ),
)
