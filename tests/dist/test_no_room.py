"""A rank without room for what is measured at start tells all: nobody waits for it."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from malleus_megatron.adapter.probes import Probes
from malleus_megatron.errors import MigrationError
from malleus_megatron.runtime import links
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.probe import Probe
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


def full(*sizes: int, **options: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def said_by(measure: Callable[[Agreement], object]) -> str:
    """And the next collective of all ranks still goes through."""
    agreement = Agreement(timedelta(seconds=20))
    try:
        measure(agreement)
    except MigrationError as error:
        assert agreement.exchange([1.0]) == [[1.0]] * agreement.world_size
        return str(error)
    return "measured"


def links_without_room() -> str:
    def measure(agreement: Agreement) -> object:
        if agreement.rank == 1:
            torch.zeros = full  # type: ignore[assignment]
        return links.measure_links(agreement, {0: 0, 1: 0, 2: 0}, CPU)

    return said_by(measure)


def test_links() -> None:
    reason = "making room to measure the links failed on rank 1: OutOfMemoryError: CUDA out of"
    assert [said[: len(reason)] for said in run_ranks(3, links_without_room)] == [reason] * 3


def probe_without_room() -> str:
    def measure(agreement: Agreement) -> None:
        def make() -> Probe:
            if agreement.rank == 2:
                full()
            return Probe(gpu=agreement.rank, device=CPU)

        Probes(agreement, make).learn()

    return said_by(measure)


def test_probe() -> None:
    reason = "probing the GPU failed on rank 2: OutOfMemoryError: CUDA out of memory."
    assert run_ranks(3, probe_without_room) == [reason] * 3
