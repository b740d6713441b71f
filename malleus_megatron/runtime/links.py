"""How fast ranks reach each other: a short exchange between neighbours, at start."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from malleus_megatron.cost.migration import LinkSpeeds
from malleus_megatron.runtime.agreement import Agreement

PROBE_BYTES = 4 * 2**20
_TIMES = 3
_LEAST_S = 1e-6


def measure_links(
    agreement: Agreement, node_of: Mapping[int, int], device: torch.device
) -> LinkSpeeds:
    """Let all ranks send to their neighbours at once; a collective of some milliseconds.

    Args:
        agreement: The ranks' control channel.
        node_of: The node of every rank.
        device: Of this rank.

    Returns:
        The same on all ranks: the median of what they measured.

    Raises:
        MigrationError: on all ranks, if one has no room.
    """
    rank = agreement.rank
    inside = _ring(rank, _inside(rank, node_of))
    between = _ring(rank, _between(rank, node_of))
    probe, into = agreement.together(
        "making room to measure the links",
        lambda: torch.zeros(2, PROBE_BYTES, dtype=torch.uint8, device=device).unbind(),
    )

    def swap_one() -> None:
        _swap(inside, probe[:1], into[:1])
        _swap(between, probe[:1], into[:1])

    # Every rank takes part in every measurement, also one that has no such neighbour.
    row = [
        _seconds(agreement, swap_one, device),
        _seconds(agreement, lambda: _swap(inside, probe, into), device) * bool(inside),
        _seconds(agreement, lambda: _swap(between, probe, into), device) * bool(between),
        _seconds(agreement, lambda: into.copy_(probe), device),
    ]
    columns = list(zip(*agreement.exchange(row), strict=True))
    round_s, inside_s, between_s, copy_s = (
        statistics.median([value for value in column if value] or [0.0]) for column in columns
    )
    return LinkSpeeds(
        inside_bytes_per_s=_speed((inside_s or between_s) - round_s),
        between_bytes_per_s=_speed((between_s or inside_s) - round_s),
        copy_bytes_per_s=_speed(copy_s),
        round_s=round_s,
    )


def _inside(rank: int, node_of: Mapping[int, int]) -> list[int]:
    return [other for other in sorted(node_of) if node_of[other] == node_of[rank]]


def _between(rank: int, node_of: Mapping[int, int]) -> list[int]:
    """The ranks that stand in the same place of their nodes."""
    place = _inside(rank, node_of).index(rank)
    nodes = [_inside(other, node_of) for other in sorted(node_of)]
    return sorted({ranks[place] for ranks in nodes if len(ranks) > place})


def _ring(rank: int, ranks: Sequence[int]) -> tuple[int, int] | None:
    """Whom a rank sends to, and whom it receives from; None where it is alone."""
    if len(ranks) < 2:
        return None
    place = ranks.index(rank)
    return ranks[(place + 1) % len(ranks)], ranks[place - 1]


def _swap(peers: tuple[int, int] | None, out: torch.Tensor, into: torch.Tensor) -> None:
    if peers is not None:
        operations = [
            dist.P2POp(dist.isend, out, peers[0]),
            dist.P2POp(dist.irecv, into, peers[1]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _seconds(agreement: Agreement, step: Callable[[], object], device: torch.device) -> float:
    """The least of some tries, all ranks together; the first one, which connects, is left out."""
    step()
    tries = []
    for _ in range(_TIMES):
        agreement.first_text(None)
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        agreement.first_text(None)
        tries.append(time.perf_counter() - started)
    return max(min(tries), _LEAST_S)


def _speed(seconds: float) -> float:
    return PROBE_BYTES / max(seconds, _LEAST_S)
