"""A job that makes a tour of plans between two steps, and compares what it holds bit for bit.

Before iteration $TOUR_AT every rank goes nominal -> B -> C -> nominal -> B -> C -> B -> nominal.
Each rank leaves in $LOGS what it saw of every move. Before each of $CHECK_AT's iterations all
owners of a slice compare their bits. $BUFFER_BYTES, if set, bounds the buffers of shares.
"""

import gc
import json
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model
from numpy.typing import NDArray
from torch import Tensor

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.job import Job
from malleus_megatron.adapter.reshape import making
from malleus_megatron.adapter.reshape.state import inner_optimizers, state_of
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.migration.codec import holdings_from_bytes, holdings_to_bytes
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.plan.codec import read_plan
from malleus_megatron.plan.plan import Plan
from tests.harness.painting import local_slices, lower_bound_bytes

TOUR_AT = int(os.environ.get("TOUR_AT", "3"))
TOUR = ("B", "C", "nominal", "B", "C", "B", "nominal")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Whole = dict[str, NDArray[Any]]
"""Global tensors by key: the bits of every element, as integers."""


def state_bits(switch: Switch) -> dict[str, Tensor]:
    """All that this rank trains, read from Megatron's module and torch's Adam; copies."""
    (module,) = unwrap_model(list(switch.model))
    found = {f"parameter {name}": value for name, value in module.named_parameters()}
    for number, inner in enumerate(inner_optimizers(switch._optimizer)):
        for index, group in enumerate(inner.optimizer.param_groups):
            for place, main in enumerate(group["params"]):
                where = f"{number}.{index}.{place}"
                found[f"main {where}"] = main
                for kind, value in inner.optimizer.state.get(main, {}).items():
                    found[f"{kind} {where}"] = value
            numbers = {key: value for key, value in group.items() if isinstance(value, float)}
            for key, value in numbers.items():
                found[f"{key} {number}.{index}"] = torch.tensor(value, dtype=torch.float64)
    return {name: value.detach().clone() for name, value in found.items()}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same bits, or on one side only."""
    return [
        name
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or not _same(before[name], after[name])
    ]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(BITS[tensor.element_size()])


class Tour:
    """The moves of one rank, and what it noted."""

    def __init__(self, job: Job) -> None:
        assert job._switch is not None
        self._job = job
        self._switch = job._switch
        self._agreement = job._agreement
        folder = Path(os.environ["PLANS"])
        self._plans: dict[str, Plan] = {
            "nominal": job._current.nominal,
            "B": read_plan(folder / "B.json"),
            "C": read_plan(folder / "C.json"),
        }

    def run(self) -> dict[str, Any]:
        """Make the tour."""
        seen = {"nominal": state_bits(self._switch)}
        whole, disputed = self.whole_state()
        moves = []
        for name in TOUR:
            moves.append({"to": name, **self._move(self._plans[name]), **self._compare(whole)})
            now = state_bits(self._switch)
            moves[-1]["differing"] = differing(seen.setdefault(name, now), now)
        return {
            "disputed": disputed,
            "kinds": sorted({key.split(".")[0] for key in whole}),
            "zero": [key for key, array in whole.items() if not array.any()],
            "moves": moves,
        }

    def whole_state(self) -> tuple[Whole, list[str]]:
        """The global tensors, put together from all ranks; and keys that owners dispute."""
        state = state_of(self._switch._stage(), self._switch._builder.config)
        # Copies: what numpy has once seen in place, torch gives back to nobody.
        tensors = {
            one.name: _bits(state.tensors[one.name]).clone().numpy() for one in state.holdings
        }
        whole: Whole = {}
        known: dict[str, NDArray[np.bool_]] = {}
        disputed = set()
        mine = pickle.dumps((state.holdings, tensors))
        for holdings, bits in map(pickle.loads, self._agreement.gather(mine)):
            for one in holdings:
                values = bits[one.name].reshape(one.box.shape)
                array = whole.setdefault(one.key, np.zeros(one.global_shape, values.dtype))
                mask = known.setdefault(one.key, np.zeros(one.global_shape, bool))
                place = local_slices(one)
                if (mask[place] & (array[place] != values)).any():
                    disputed.add(one.key)
                array[place], mask[place] = values, True
        disputed |= {key for key, mask in known.items() if not mask.all()}
        return whole, sorted(disputed)

    def _move(self, plan: Plan) -> dict[str, Any]:
        """Go, as a change of plan does, and see what came and what the old stage left behind."""
        held, old = self._holdings(), dict(_watched(self._switch))
        migration = self._job._changes._move(plan, TOUR_AT)
        assert migration is not None, "the switch failed"
        gc.collect()
        missing = lower_bound_bytes(held, self._holdings())
        return {
            "alive": [name for name, reference in old.items() if reference() is not None],
            "watched": len(old),
            "extra_bytes": migration.peak_extra_bytes,
            "gave_back": migration.gave_back,
            "received": list(migration.received_bytes),
            "missing": [missing.get(gpu, 0) for gpu in range(self._agreement.world_size)],
        }

    def _compare(self, before: Whole) -> dict[str, list[str]]:
        after, disputed = self.whole_state()
        keys = sorted(before.keys() | after.keys())
        lost = [
            key
            for key in keys
            if key not in before or key not in after or not np.array_equal(before[key], after[key])
        ]
        return {"disputed": disputed, "lost": lost}

    def _holdings(self) -> Holdings:
        state = state_of(self._switch._stage(), self._switch._builder.config)
        payloads = self._agreement.gather(holdings_to_bytes(state.holdings))
        return {gpu: holdings_from_bytes(payload) for gpu, payload in enumerate(payloads)}


def _watched(switch: Switch) -> Iterator[tuple[str, weakref.ref[Any]]]:
    """Weak references to what the rank trains now.

    Not to the outermost wrapper: Megatron's loop keeps its first one in a variable.
    """
    (chunk,) = switch.model
    (module,) = unwrap_model([chunk])
    yield "module", weakref.ref(module)
    for number, buffer in enumerate(chunk.buffers):
        yield f"buffer {number}", weakref.ref(buffer)
        yield f"gradients of buffer {number}", weakref.ref(buffer.grad_data)
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", weakref.ref(parameter)
        yield f"gradient of {name}", weakref.ref(parameter.main_grad)
    for number, inner in enumerate(inner_optimizers(switch._optimizer)):
        yield f"optimizer {number}", weakref.ref(inner)
        yield f"Adam {number}", weakref.ref(inner.optimizer)
        for index, (main, state) in enumerate(inner.optimizer.state.items()):
            yield f"main {number}.{index}", weakref.ref(main)
            for kind, value in state.items():
                yield f"{kind} {number}.{index}", weakref.ref(value)


def touring(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Job.begin_iteration`."""
    checks = [int(word) for word in os.environ["CHECK_AT"].split(",")]
    report: dict[str, Any] = {"disputed": {}}

    def begin_iteration(job: Job, iteration: int) -> None:
        assert job._switch is not None
        job._switch.complete_parameters()
        if iteration == TOUR_AT:
            report["tour"] = Tour(job).run()
        if iteration in checks:
            report["disputed"][iteration] = Tour(job).whole_state()[1]
        if iteration == max(checks):
            path = Path(os.environ["LOGS"], f"rank{job._agreement.rank}.json")
            path.write_text(json.dumps(report), encoding="utf-8")
        original(job, iteration)

    return begin_iteration


def main() -> None:
    if "BUFFER_BYTES" in os.environ:
        making.MAX_BUFFER_BYTES = int(os.environ["BUFFER_BYTES"])
    Job.begin_iteration = touring(Job.begin_iteration)  # type: ignore[method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
