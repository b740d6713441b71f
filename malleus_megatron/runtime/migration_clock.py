"""How long switches take and how long they were to take; it learns from each."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from malleus_megatron.cost.migration import LinkSpeeds, corrected
from malleus_megatron.migration.batches import Batch, predicted_seconds
from malleus_megatron.migration.outcome import MigrationTimes
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.links import measure_links

_NEW_WEIGHT = 0.5
"""Of the latest switch in what is expected of the next one."""


class MigrationClock:
    """One rank's; all ranks call it together, and predict the same."""

    def __init__(self) -> None:
        """Nothing is known yet; the first switch measures the links."""
        self._speeds: LinkSpeeds | None = None
        self._rest_s: float | None = None
        self._started = self._prepared_s = self._transfer_s = self._predicted_s = 0.0

    def begin(self, agreement: Agreement, node_of: Mapping[int, int]) -> None:
        """A switch begins; a collective the first time."""
        if self._speeds is None:
            device = torch.device("cuda", torch.cuda.current_device())
            self._speeds = measure_links(agreement, node_of, device)
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def moving(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Around the transfer: predict it, then time it."""
        assert self._speeds is not None, "begin measures them"
        self._predicted_s = predicted_seconds(batches, self._speeds)
        started = time.perf_counter()
        self._prepared_s = started - self._started
        yield
        torch.cuda.synchronize()
        self._transfer_s = time.perf_counter() - started

    def row(self) -> tuple[float, float, float]:
        """This rank's times at the end of a switch: all of it, its preparation, its transfer."""
        return time.perf_counter() - self._started, self._prepared_s, self._transfer_s

    def learn(self, rows: Sequence[Sequence[float]]) -> MigrationTimes:
        """Compare, and do better next time.

        Args:
            rows: Of all ranks; each begins with what `row` gave.
        """
        assert self._speeds is not None, "begin measures them"
        seconds, prepared_s, transfer_s = (max(row[place] for row in rows) for place in range(3))
        rest_s = seconds - transfer_s
        expected_s = prepared_s if self._rest_s is None else self._rest_s
        self._rest_s = (
            rest_s
            if self._rest_s is None
            else _NEW_WEIGHT * rest_s + (1 - _NEW_WEIGHT) * self._rest_s
        )
        self._speeds = corrected(self._speeds, predicted_s=self._predicted_s, measured_s=transfer_s)
        return MigrationTimes(
            seconds=seconds,
            predicted_seconds=self._predicted_s + expected_s,
            transfer_seconds=transfer_s,
            predicted_transfer_seconds=self._predicted_s,
        )
