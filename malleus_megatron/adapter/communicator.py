"""Activations and gradients between stages of unlike TP degree, for Megatron's own schedule.

Takes the place of Megatron's P2PCommunicator in `forward_backward_pipelining_without_interleaving`:
the same properties and methods, one tensor a call.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from malleus_megatron.plan.seats import Flow, Seat, backward_pieces, forward_pieces
from malleus_megatron.runtime.pieces import Incoming, Outgoing, exchange

type Shapes = Sequence[Any]
"""One shape, of this rank's own side: rows, micro-batch size, hidden size."""
type Tensors = Tensor | list[Tensor | None] | None


class StageCommunicator:
    """One rank's end of the exchanges with the stages before and after its own."""

    def __init__(
        self,
        seat: Seat,
        *,
        config: Any,
        device: torch.device,
        seq_length: int,
        sequence_parallel: bool,
    ) -> None:
        """Work out the pieces once; they are the same for every micro-batch.

        Args:
            seat: Of this rank's GPU.
            config: Megatron's TransformerConfig; its `pipeline_dtype` is what travels.
            device: Where received tensors are made.
            seq_length: Rows of the whole sequence.
            sequence_parallel: Whether stages of several GPUs share the rows.
        """
        self.config = config
        self._seat = seat
        self._device = device
        self._forward = forward_pieces(seat, seq_length, sequence_parallel=sequence_parallel)
        self._backward = backward_pieces(seat, seq_length, sequence_parallel=sequence_parallel)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether the embedding is here."""
        return self._seat.is_first

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether the loss is here."""
        return self._seat.is_last

    @property
    def total_stages(self) -> int:
        """Stages of this rank's own pipeline."""
        return self._seat.num_stages

    @property
    def current_stage(self) -> int:
        """This rank's stage."""
        return self._seat.stage

    def recv_forward(self, tensor_shapes: Shapes, is_first_stage: bool) -> list[Tensor | None]:
        """The input of a micro-batch; None at the first stage."""
        if is_first_stage:
            return [None]
        with self._timed("forward-recv"):
            return [self._move(None, self._forward, tensor_shapes, self._forward)]

    def recv_backward(self, tensor_shapes: Shapes, is_last_stage: bool) -> list[Tensor | None]:
        """The gradient of an output; None at the last stage."""
        if is_last_stage:
            return [None]
        with self._timed("backward-recv"):
            return [self._move(None, self._backward, tensor_shapes, self._backward)]

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Hand an output on; nothing at the last stage."""
        if not is_last_stage:
            with self._timed("forward-send"):
                self._move(output_tensors, self._forward, None, self._backward)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Hand the gradient of an input back; nothing at the first stage."""
        if not is_first_stage:
            with self._timed("backward-send"):
                self._move(input_tensor_grads, self._backward, None, self._forward)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shapes, is_last_stage: bool
    ) -> list[Tensor | None]:
        """Both with the next stage at once."""
        if is_last_stage:
            return [None]
        with self._timed("forward-send-backward-recv"):
            return [self._move(output_tensors, self._forward, tensor_shapes, self._backward)]

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shapes, is_first_stage: bool
    ) -> list[Tensor | None]:
        """Both with the previous stage at once."""
        if is_first_stage:
            return [None]
        with self._timed("backward-send-forward-recv"):
            return [self._move(input_tensor_grads, self._backward, tensor_shapes, self._forward)]

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Inside of the timer by which Megatron's own communicator calls the same."""
        timers = getattr(self.config, "timers", None)
        if timers is None:
            yield
            return
        timers(name, log_level=2).start()
        yield
        timers(name).stop()

    def _move(
        self, tensors: Tensors, sent: Flow, shapes: Shapes | None, received: Flow
    ) -> Tensor | None:
        """Send a tensor along one flow and receive another along another, each if there is one."""
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        outgoing = None if tensor is None else Outgoing(tensor=tensor, pieces=sent.sends)
        if shapes is None:
            exchange(outgoing, None)
            return None
        arrived = torch.empty(
            tuple(shapes[0]), dtype=self.config.pipeline_dtype, device=self._device
        )
        exchange(outgoing, Incoming(tensor=arrived, pieces=received.receives))
        return arrived.requires_grad_(received is self._forward)
