"""The operations of a traced step: names, and what is true of each kind."""

from typing import NamedTuple

FORWARD = "forward-compute"
BACKWARD = "backward-compute"
COMPUTE = (FORWARD, BACKWARD)

FORWARD_SEND = "forward-send"
FORWARD_RECV = "forward-recv"
BACKWARD_SEND = "backward-send"
BACKWARD_RECV = "backward-recv"
BETWEEN_STAGES = (FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV)

PARAMS = "params-all-gather"
GRADS = "grads-reduce-scatter"
SEPARATE_GRADS = "separate-grads-all-reduce"
COLLECTION = "gc"
LAYERNORM = "layernorm-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = "optimizer"

ACROSS_PIPELINES = frozenset({PARAMS, GRADS, SEPARATE_GRADS, CLIP})
"""Collectives that start when the last pipeline has come."""

COMMUNICATION = frozenset(
    {*BETWEEN_STAGES, PARAMS, GRADS, SEPARATE_GRADS, LAYERNORM, EMBEDDING, CLIP}
)
"""Typical is their median. Of all others, which compute, it is the mean."""

KINDS = frozenset({*COMPUTE, *COMMUNICATION, COLLECTION, OPTIMIZER})

FAMILIES = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""The two ends of a transfer are looked at together. Every other kind is by itself."""


class Operation(NamedTuple):
    """One operation that a pipeline runs in every step."""

    stage: int
    kind: str
    number: int
    """Counted from 0 among those of its kind and stage; of compute, the micro-batch."""

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.kind} {self.number} of stage {self.stage}"
