"""Where a GPU stands in a plan, and which activation rows it exchanges with its neighbours."""

from dataclasses import dataclass, replace

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Pipeline, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one GPU."""

    gpu: int
    pipeline: int | None
    """None on standby."""
    stage: int
    num_stages: int
    tp_rank: int
    tp_gpus: tuple[int, ...]
    """The TP group, in the order of TP ranks."""
    layers: tuple[int, int]
    """Half open; empty where the stage has only the loss or only the embedding."""
    previous_gpus: tuple[int, ...]
    """TP group of the stage before, in the order of its TP ranks; () at the first stage."""
    next_gpus: tuple[int, ...]
    """TP group of the stage after; () at the last stage."""

    @property
    def tp_degree(self) -> int:
        """Number of GPUs of the TP group."""
        return len(self.tp_gpus)

    @property
    def is_first(self) -> bool:
        """True where the embedding is."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True where the loss is."""
        return self.stage == self.num_stages - 1


def seats(plan: Plan) -> dict[int, Seat]:
    """The seat of every GPU that holds a stage, by GPU."""
    return {
        seat.gpu: seat
        for index, pipeline in enumerate(plan.pipelines)
        for seat in _seats_of(pipeline, index)
    }


def seat_of(plan: Plan, gpu: int) -> Seat | None:
    """The seat of one GPU; None where it is on standby."""
    return seats(plan).get(gpu)


def standby_seat(plan: Plan, gpu: int) -> Seat:
    """Where a GPU on standby sits: in the middle of a pipeline of three, with no layer.

    There it has neither embedding nor loss, and nobody to talk to.
    """
    return Seat(
        gpu=gpu,
        pipeline=None,
        stage=1,
        num_stages=3,
        tp_rank=0,
        tp_gpus=(gpu,),
        layers=(plan.num_layers, plan.num_layers),
        previous_gpus=(),
        next_gpus=(),
    )


def with_ascending_tp_ranks(plan: Plan) -> Plan:
    """The same plan with the GPUs of every stage in ascending order.

    torch numbers the ranks of a group so, whatever order it is given. Which of the members has
    which TP rank does not change what is computed.
    """
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, gpus=tuple(sorted(stage.gpus))) for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines, standby=tuple(sorted(plan.standby)))


def _seats_of(pipeline: Pipeline, index: int) -> list[Seat]:
    groups = [(), *(stage.gpus for stage in pipeline.stages), ()]
    return [
        Seat(
            gpu=gpu,
            pipeline=index,
            stage=number,
            num_stages=len(pipeline.stages),
            tp_rank=tp_rank,
            tp_gpus=stage.gpus,
            layers=stage.layers,
            previous_gpus=groups[number],
            next_gpus=groups[number + 2],
        )
        for number, stage in enumerate(pipeline.stages)
        for tp_rank, gpu in enumerate(stage.gpus)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of the local tensor (its axis 0, the sequence) that pass to or from one GPU."""

    peer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What a GPU sends and receives for one micro-batch in one direction."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]


def forward_pieces(seat: Seat, seq_length: int, *, sequence_parallel: bool) -> Flow:
    """Activations: sends to the next stage, receives from the previous one.

    Without sequence parallelism every GPU of a stage has all rows; receiver j takes them from
    sender j mod (TP degree of the senders). With it, rank i of T has rows [i s/T, (i + 1) s/T).

    Args:
        seat: Of this GPU.
        seq_length: Rows of the whole sequence, s.
        sequence_parallel: True where stages of more than one GPU share the rows.

    Raises:
        BadInputError: the sequence cannot be shared equally by a stage's GPUs.
    """
    rows = _Rows(seq_length=seq_length, shared=sequence_parallel)
    return Flow(
        sends=rows.sent_by(seat.gpu, seat.tp_gpus, seat.next_gpus),
        receives=rows.received_by(seat.gpu, seat.previous_gpus, seat.tp_gpus),
    )


def backward_pieces(seat: Seat, seq_length: int, *, sequence_parallel: bool) -> Flow:
    """Gradients: sends to the previous stage, receives from the next one; else as forward.

    The gradient of a stage's input is whole and the same on all GPUs of its TP group (with
    sequence parallelism: shared like the activation), so the same rule holds mirrored.
    """
    rows = _Rows(seq_length=seq_length, shared=sequence_parallel)
    return Flow(
        sends=rows.sent_by(seat.gpu, seat.tp_gpus, seat.previous_gpus),
        receives=rows.received_by(seat.gpu, seat.next_gpus, seat.tp_gpus),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """How the rows of a sequence lie on the GPUs of a stage."""

    seq_length: int
    shared: bool

    def held(self, tp_rank: int, tp_degree: int) -> tuple[int, int]:
        if not self.shared:
            return 0, self.seq_length
        if self.seq_length % tp_degree:
            raise BadInputError(
                f"A sequence of {self.seq_length} rows cannot be shared equally by a stage of "
                f"TP degree {tp_degree}; sequence parallelism needs that."
            )
        rows = self.seq_length // tp_degree
        return tp_rank * rows, (tp_rank + 1) * rows

    def sent_by(
        self, gpu: int, senders: tuple[int, ...], receivers: tuple[int, ...]
    ) -> tuple[Piece, ...]:
        """In the order of the receivers' TP ranks."""
        i = senders.index(gpu)
        first, _ = self.held(i, len(senders))
        return tuple(
            Piece(peer=peer, start=start - first, end=end - first)
            for j, peer in enumerate(receivers)
            for start, end in self._passed(i, len(senders), j, len(receivers))
        )

    def received_by(
        self, gpu: int, senders: tuple[int, ...], receivers: tuple[int, ...]
    ) -> tuple[Piece, ...]:
        """In the order of the senders' TP ranks."""
        j = receivers.index(gpu)
        first, _ = self.held(j, len(receivers))
        return tuple(
            Piece(peer=peer, start=start - first, end=end - first)
            for i, peer in enumerate(senders)
            for start, end in self._passed(i, len(senders), j, len(receivers))
        )

    def _passed(
        self, sender: int, num_senders: int, receiver: int, num_receivers: int
    ) -> list[tuple[int, int]]:
        """Rows of the whole sequence from a sender to a receiver: one range or none."""
        if not self.shared and receiver % num_senders != sender:
            return []
        start, end = self.held(sender, num_senders)
        needed_start, needed_end = self.held(receiver, num_receivers)
        start, end = max(start, needed_start), min(end, needed_end)
        return [(start, end)] if start < end else []
