"""The control channel: one small collective while all is well, and the reason if it is not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from malleus_megatron.errors import MigrationError
from malleus_megatron.runtime.agreement import Agreement
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The size of what this rank hands to each collective."""
    sizes: list[int] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}
    originals["all_gather_into_tensor"] = dist.all_gather_into_tensor

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            sizes.append(tensor.nbytes)
            return original(tensor, *arguments, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        yield sizes
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def texts_of(cases: list[dict[int, str]]) -> list[str | None]:
    agreement = Agreement(timedelta(seconds=20))
    return [agreement.first_text(case.get(agreement.rank)) for case in cases]


def test_all_ranks_hear_the_lowest_rank_that_has_something_to_say() -> None:
    long = "ä" * 3000
    cases: list[dict[int, str]] = [{}, {2: "two"}, {3: "three", 1: "eins ü"}, {0: ""}, {1: long}]
    cases.append({1: "no character: \udcff"})
    wanted = [None, "two", "eins ü", None, "ä" * 1024, "no character: \\udcff"]
    assert run_ranks(4, texts_of, cases) == [wanted] * 4


def guarded_step() -> tuple[list[int], str]:
    agreement = Agreement(timedelta(seconds=20))
    with counted_bytes() as sizes:
        assert agreement.together("a step", lambda: 7) == 7
    try:
        agreement.together("dividing", lambda: 1 // (agreement.rank - 2))
    except MigrationError as error:
        return sizes, str(error)
    return sizes, "none"


def test_a_step_that_goes_well_costs_eight_bytes_a_rank() -> None:
    for sizes, reason in run_ranks(4, guarded_step):
        assert sizes == [8]
        assert reason.startswith("dividing failed on rank 2: ZeroDivisionError")
