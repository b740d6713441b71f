"""When a rank's shares are summed and gathered: Megatron's bucket groups, over owner groups.

Megatron's DDP tells its bucket groups when a gradient is ready and when a parameter is about to be
read. Under a plan they tell one object of ours, which starts a collective for each share:
in the backward pass with --overlap-grad-reduce, else after it; gathers right after the update,
ended before the first read with --overlap-param-gather.

No rank waits for ever. There is one global order of owner groups; each rank starts the sums of its
own groups in that order, and the gathers in the reverse of it. Take the first group, in that
order, that has not been started by all of its owners. An owner that has not started it waits for no
other sum: all before it have been started by all. It is still computing, and no pass between
stages waits for a sum. So it will start it. What a TP group must sum among itself first comes in
a second half of the order, after Megatron has done that.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from malleus_megatron.adapter.reshape.shards import InFlight, OwnerShards, Share

MAX_IN_FLIGHT = 2
"""Collectives at a time outside of the passes: their buffers need room."""


class OwnerBuckets:
    """All bucket groups of one rank's model chunk, as Megatron's DDP sees them."""

    def __init__(
        self, shards: OwnerShards, chunk: Any, names_of: Mapping[nn.Parameter, Sequence[str]]
    ) -> None:
        """Take the place of a chunk's bucket groups.

        Args:
            shards: This rank's.
            chunk: Megatron's DDP, whose data group holds this rank alone.
            names_of: The holdings of each of its parameters.
        """
        self.is_last_microbatch = True
        """Set by DDP: whether gradients will be complete."""
        self.shards = shards
        self._overlaps_gathers = bool(chunk.ddp_config.overlap_param_gather)
        self._early = [share for share in shards.shares if not share.group.is_replicated]
        self._late = [share for share in shards.shares if share.group.is_replicated]
        self._missing = _Missing(self._early, names_of)
        self._num_started = 0
        self._sums: deque[InFlight] = deque()
        self._gathers: dict[int, InFlight] = {}
        """By the share's place in the order."""
        self._gathers_of = _places(shards.shares, names_of)
        self._ddp_config = chunk.ddp_config
        self._megatrons = [*chunk.bucket_groups]
        self._is_checked = False
        chunk.bucket_groups = [self]
        chunk.param_to_bucket_group = {
            parameter: _Parameter(self, parameter) for parameter in names_of
        }

    def note_ready(self, parameter: nn.Parameter) -> None:
        """A gradient is complete if this is the last micro-batch: start what waited for it."""
        if self.is_last_microbatch:
            self._missing.note(parameter)
            self._start_early(self._missing.num_ready, in_pass=True)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """All gradients are complete: start the sums that need nothing else."""
        del force_all_reduce  # the norm is taken over the shares, never over whole sums
        self._check_gradients()
        self._start_early(len(self._early))

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """As `start_grad_sync`; the sums end in `finish_sums`."""
        self.start_grad_sync(force_all_reduce)

    def finish_sums(self) -> None:
        """After Megatron's own finalisation: every share has its sum."""
        for share in self._late:
            self._start_sum(share)
        while self._sums:
            self._sums.popleft().end()
        self._num_started = 0
        self._is_checked = False
        self._missing.begin_step()

    def gather(self) -> None:
        """After an update: all owners get the new values, now or before their first read."""
        waiting: deque[int] = deque()
        for place, share in reversed([*enumerate(self.shards.shares)]):
            self._gathers[place] = self.shards.start_gather(share)
            waiting.append(place)
            if not self._overlaps_gathers and len(waiting) >= MAX_IN_FLIGHT:
                self._end_gather(waiting.popleft())
        if not self._overlaps_gathers:
            self.start_param_sync(force_sync=True)

    def need(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be read."""
        if self._gathers:
            for place in self._gathers_of[parameter]:
                self._end_gather(place)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Let every parameter have its new value, if that is asked for; gathers are under way."""
        if force_sync:
            for place in [*self._gathers]:
                self._end_gather(place)

    def reset(self) -> None:
        """Before a step."""
        self.is_last_microbatch = True

    def free_overlap_buffers(self) -> None:
        """Before an asynchronous save, whose writer needs room."""
        self.start_param_sync(force_sync=True)

    def _post_param_sync(self) -> None:
        """Nothing is left to do after a gather, as parameters have their own precision."""

    def _start_early(self, end: int, *, in_pass: bool = False) -> None:
        for share in self._early[self._num_started : end]:
            self._start_sum(share, in_pass=in_pass)
        self._num_started = max(self._num_started, end)

    def _start_sum(self, share: Share, *, in_pass: bool = False) -> None:
        # In the backward pass nothing waits: another owner may still compute what comes first.
        while self._sums and (
            self._sums[0].is_done or (not in_pass and len(self._sums) >= MAX_IN_FLIGHT)
        ):
            self._sums.popleft().end()
        self._sums.append(self.shards.start_sum(share))

    def _end_gather(self, place: int) -> None:
        gather = self._gathers.pop(place, None)
        if gather is not None:
            gather.end()

    def _check_gradients(self) -> None:
        config = self._ddp_config
        if self._is_checked:
            return
        self._is_checked = True
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            for group in self._megatrons:
                group.check_grads(
                    check_for_nan_or_inf=config.check_for_nan_in_grad,
                    check_for_large=config.check_for_large_grads,
                )


class _Parameter:
    """What DDP asks for one parameter."""

    def __init__(self, buckets: OwnerBuckets, parameter: nn.Parameter) -> None:
        self._buckets = buckets
        self._parameter = parameter

    def register_grad_ready(
        self, parameter: nn.Parameter, force_all_reduce: bool | None = False
    ) -> None:
        del force_all_reduce
        self._buckets.note_ready(parameter)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        del skip_next_bucket_dispatch
        self._buckets.need(self._parameter)


class _Missing:
    """Which shares still miss gradients.

    A first step counts how often each parameter reports in a backward pass, as Megatron's buckets
    do: with recomputation it can be more than once. Until then no share counts as ready.
    """

    def __init__(
        self, shares: Sequence[Share], names_of: Mapping[nn.Parameter, Sequence[str]]
    ) -> None:
        self._places = _places(shares, names_of)
        numbers = Counter(place for places in self._places.values() for place in places)
        self._num_parameters = [numbers[place] for place in range(len(shares))]
        """How many report for each share."""
        self._expected: Counter[nn.Parameter] | None = None
        self._reported: Counter[nn.Parameter] = Counter()
        self._missing: list[int] = []
        self.num_ready = 0
        """Shares from the first on that miss nothing."""

    def note(self, parameter: nn.Parameter) -> None:
        self._reported[parameter] += 1
        if self._expected is None or self._reported[parameter] != self._expected[parameter]:
            return
        for place in self._places[parameter]:
            self._missing[place] -= 1
        while self.num_ready < len(self._missing) and self._missing[self.num_ready] == 0:
            self.num_ready += 1

    def begin_step(self) -> None:
        if self._expected is None and self._reported:
            self._expected = self._reported
        self._reported = Counter()
        self.num_ready = 0
        self._missing = [*self._num_parameters]


def _places(
    shares: Iterable[Share], names_of: Mapping[nn.Parameter, Sequence[str]]
) -> dict[nn.Parameter, list[int]]:
    """The numbers of the shares that hold a part of each parameter."""
    parameter_of = {name: parameter for parameter, names in names_of.items() for name in names}
    found: dict[nn.Parameter, list[int]] = {parameter: [] for parameter in names_of}
    for number, share in enumerate(shares):
        for name in {placement.holding.name for placement in share.placements}:
            places = found[parameter_of[name]]
            if number not in places:
                places.append(number)
    return found
