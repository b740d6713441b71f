"""Which rates become curves, in TensorBoard and W&B: a thousand flat ones help nobody."""

import json
from collections.abc import Collection, Iterator

from malleus_megatron.plan.codec import canonical_json, rates_from_json, rates_to_json
from malleus_megatron.plan.rates import HEALTHY, Rates

_WORST = "malleus/worst-rate"


def curves_payload(rates: Rates, stragglers: Collection[int]) -> bytes:
    """What `Curves` learns from, as rank 0 sends it."""
    body = rates_to_json(rates)
    return canonical_json({"rates": body, "stragglers": sorted(stragglers)}).encode()


class Curves:
    """Curves of stragglers. One that recovers has a last point, so that its curve comes down."""

    def __init__(self) -> None:
        """No rates are known: all GPUs count as healthy."""
        self._rates = Rates()
        self._stragglers: frozenset[int] = frozenset()
        self._drawn: frozenset[int] = frozenset()
        """Those that had a point as stragglers when points were drawn last."""

    def learn(self, payload: bytes) -> None:
        """Take in what rank 0 has sent."""
        body = json.loads(payload)
        self._rates = rates_from_json(body["rates"], "rates")
        self._stragglers = frozenset(body["stragglers"])

    def points(self) -> Iterator[tuple[str, float]]:
        """Names and values to draw now; to be called only when they are drawn."""
        yield _WORST, max((rate for _, rate in self._rates), default=HEALTHY)
        for gpu in sorted(self._stragglers | self._drawn):
            yield f"malleus/rate/gpu-{gpu}", self._rates[gpu]
        self._drawn = self._stragglers
