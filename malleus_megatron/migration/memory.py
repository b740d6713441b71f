"""How a switch keeps within a bound on memory: both states whole, old state leaving, or not at all.

All bytes are of one GPU and count what comes on top of the larger of its two states. Gradients are
in neither stage while state moves: at an iteration boundary they hold nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.batches import (
    Batch,
    Blocks,
    cut_into_batches,
    in_sequence,
    least_peaks,
    one_batch,
)
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.transfers import TransferPlan
from malleus_megatron.plan.render import in_mib

MIB = 2**20
SLACK_BYTES = MIB
"""For what is not counted: padding of Megatron's buffers, scalars, what messages are aligned to."""
LEAST_ROUND_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The state of all GPUs before or after a switch."""

    blocks: Blocks
    gradients: Mapping[int, int]
    """Bytes of gradient buffers by GPU."""

    def blocks_bytes(self, gpu: int) -> int:
        """All of it but the gradients."""
        return sum(self.blocks.get(gpu, {}).values())

    def all_bytes(self, gpu: int) -> int:
        """While the job trains, activations left out."""
        return self.blocks_bytes(gpu) + self.gradients.get(gpu, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """What building a stage takes for a moment."""

    parameters: str
    """Their block."""
    copies_parameters: bool
    """Megatron's DDP lays them into one buffer, for its distributed optimizer."""
    at_once: str | None = None
    """What begins the names of blocks that an optimizer makes when it is built, all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a switch goes."""

    batches: tuple[Batch, ...]
    frees: bool
    """Old blocks leave on the way: from then on there is no way back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extra:
    """Bytes beyond the larger state on the GPU that has the most, without messages."""

    whole: int
    building: int
    freeing: int


def choose_course(
    moves: TransferPlan,
    needed: Holdings,
    *,
    sides: tuple[Side, Side],
    building: Building,
    bound_bytes: int,
    max_messages: tuple[int, int],
) -> Course:
    """Keep the old state whole where that stays within the bound, else give it back as it moves.

    A quarter of the bound at most goes to messages.

    Args:
        moves: What moves.
        needed: The new state.
        sides: Old and new.
        building: Of the new stages.
        bound_bytes: On every GPU.
        max_messages: Bytes of a round, and of all message buffers in such a round.

    Raises:
        MigrationError: neither way stays within the bound; with the bound that would do.
    """
    old, new = sides
    gpus = sorted(old.blocks.keys() | new.blocks.keys())
    order = in_sequence(moves, needed, old=old.blocks, new=new.blocks, first=building.parameters)
    extra = _extra(sides, building, least_peaks(order), gpus)
    largest_round, largest_buffers = max_messages
    buffers = min(largest_buffers, bound_bytes // 4)
    round_bytes = max(LEAST_ROUND_BYTES, buffers * largest_round // largest_buffers)
    room = bound_bytes - SLACK_BYTES
    if max(extra.whole, extra.building) + buffers <= room:
        return Course(batches=one_batch(moves, round_bytes), frees=False)
    if extra.building > room or extra.freeing + buffers > room:
        raise MigrationError(
            f"beyond the larger of the old and the new state it would take "
            f"{_least(max(extra.whole, extra.building), 0, largest_buffers)} MiB to keep both, or "
            f"{_least(extra.freeing, extra.building, largest_buffers)} MiB to give the old one "
            "back on the way; "
            f"--malleus-migration-memory allows {in_mib(bound_bytes / MIB)} MiB. Give it "
            "as much, or leave it out."
        )
    limits = {gpu: max(old.all_bytes(gpu), new.all_bytes(gpu)) + room - buffers for gpu in gpus}
    return Course(batches=cut_into_batches(order, limits, round_bytes), frees=True)


def _extra(
    sides: tuple[Side, Side], building: Building, peaks: Mapping[int, int], gpus: list[int]
) -> _Extra:
    old, new = sides
    whole, built, freeing = [0], [0], [0]
    for gpu in gpus:
        state = max(old.all_bytes(gpu), new.all_bytes(gpu))
        before = old.blocks_bytes(gpu) - state
        sizes = new.blocks.get(gpu, {})
        parameters = sizes.get(building.parameters, 0)
        at_once = sum(
            size
            for block, size in sizes.items()
            if building.at_once is not None and block.startswith(building.at_once)
        )
        largest = max((s for block, s in sizes.items() if block != building.parameters), default=0)
        copies = 2 if building.copies_parameters else 1
        whole.append(before + new.all_bytes(gpu))
        gradients = new.gradients.get(gpu, 0)
        with_gradients = copies * parameters, parameters + largest
        built.append(before + max(max(with_gradients) + gradients, parameters + at_once + largest))
        freeing.append(peaks[gpu] - state)
    return _Extra(whole=max(whole), building=max(built), freeing=max(freeing))


def _least(moving: int, building: int, largest_buffers: int) -> int:
    """The bound in MiB that has room for one and its messages, and before that for the other."""
    moving += SLACK_BYTES
    with_messages = min(moving * 4 / 3, moving + largest_buffers)
    return max(1, math.ceil(max(with_messages, building + SLACK_BYTES) / MIB))
