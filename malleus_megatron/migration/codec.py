"""Holdings as bytes: what ranks tell each other of what they hold."""

import json
import zlib
from collections.abc import Iterable
from typing import Any

from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding


def holdings_to_bytes(holdings: Iterable[Holding]) -> bytes:
    """The holdings of one GPU; equal keys and shapes are written once."""
    kinds: dict[tuple[str, tuple[int, ...], int], list[Any]] = {}
    for holding in holdings:
        kind = (holding.key, holding.global_shape, holding.element_bytes)
        box = holding.box
        kinds.setdefault(kind, []).append(
            [
                *(box.offset, box.shape, holding.name),
                *(holding.replica, holding.depth, holding.optimizer_group, holding.block),
            ]
        )
    document = [[*kind, boxes] for kind, boxes in kinds.items()]
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode())


def holdings_from_bytes(payload: bytes) -> tuple[Holding, ...]:
    """Read what `holdings_to_bytes` wrote."""
    return tuple(
        Holding(
            key=key,
            global_shape=tuple(global_shape),
            box=Box(offset=tuple(offset), shape=tuple(shape)),
            element_bytes=element_bytes,
            name=name,
            replica=replica,
            depth=depth,
            optimizer_group=optimizer_group,
            block=block,
        )
        for key, global_shape, element_bytes, boxes in json.loads(zlib.decompress(payload))
        for offset, shape, name, replica, depth, optimizer_group, block in boxes
    )
