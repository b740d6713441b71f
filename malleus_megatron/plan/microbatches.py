"""Which pipeline computes which micro-batch of a step."""

from collections.abc import Sequence

from malleus_megatron.errors import BadInputError


def deal(counts: Sequence[int]) -> list[int]:
    """Name the pipeline of every global micro-batch 0 .. sum(counts) - 1.

    Dealt in turn, like cards, to the pipelines that still want one: with equal counts that is
    Megatron's own order, in which micro-batch k belongs to data-parallel rank k mod DP.
    """
    owners: list[int] = []
    for turn in range(max(counts)):
        owners.extend(pipeline for pipeline, count in enumerate(counts) if count > turn)
    return owners


def spread_counts(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """As `scaled_counts`, also of fewer micro-batches than pipelines: some then get none."""
    if total >= len(counts):
        return scaled_counts(counts, total)
    largest = sorted(range(len(counts)), key=lambda pipeline: (-counts[pipeline], pipeline))
    return tuple(int(pipeline in largest[:total]) for pipeline in range(len(counts)))


def scaled_counts(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """The same shares of another number of micro-batches, each at least 1 (largest remainders).

    Equal counts stay equal where `total` divides.

    Raises:
        BadInputError: fewer micro-batches than pipelines.
    """
    if total < len(counts):
        raise BadInputError(f"{total} micro-batches for {len(counts)} pipelines; need one each.")
    if total == sum(counts):
        return tuple(counts)
    spare = total - len(counts)
    weights = [count - 1 for count in counts]
    if not any(weights):
        weights = list(counts)
    shares = [spare * weight / sum(weights) for weight in weights]
    scaled = [1 + int(share) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: (int(shares[i]) - shares[i], i))
    for pipeline in by_remainder[: total - sum(scaled)]:
        scaled[pipeline] += 1
    return tuple(scaled)
