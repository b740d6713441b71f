"""`--malleus-record`: the loss and gradient norm of every iteration, in full precision.

Only `train_step` is wrapped, and nothing is communicated: the rank that holds the loss writes it.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from malleus_megatron.errors import BadInputError
from malleus_megatron.events import json_line
from malleus_megatron.runtime.patching import Replacement

_log = logging.getLogger(__name__)

TRAIN_STEP_SIGNATURE = (
    "(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, "
    "forward_backward_func, iteration=, pg_collection=, p2p_communicator=)"
)


def recorder_row(path: Path) -> Replacement:
    """The row that makes every training step leave a line in `path`.

    Raises:
        BadInputError: the file's folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"--malleus-record {path}: {error.strerror}.") from error
    if path.is_dir():
        raise BadInputError(f"--malleus-record {path} is a folder; name a file.")
    return Replacement(
        target="megatron.training.training.train_step",
        make=functools.partial(_recorded, path=path),
        reason="--malleus-record writes what the step returns",
        signature=TRAIN_STEP_SIGNATURE,
    )


class _Record:
    """A file of lines. A disk that is full must not end a training job: that is said, once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._told = False

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, or say why it is not there."""
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json_line(line))
            self._file.flush()
        except OSError as error:
            if not self._told:
                _log.warning(
                    "--malleus-record: from iteration %d on lines are missing in %s: %s",
                    *(line["iteration"], self._path, error.strerror),
                )
            self._told = True


def _recorded(train_step: Callable[..., Any], *, path: Path) -> Callable[..., Any]:
    record = _Record(path)

    @functools.wraps(train_step)
    def recorded_step(*arguments: Any, **options: Any) -> Any:
        result = train_step(*arguments, **options)
        losses, skipped, grad_norm = result[0], result[1], result[5]
        if losses and _is_first_holder_of_the_loss():
            iteration = arguments[7] if len(arguments) > 7 else options["iteration"]
            record.write(
                {
                    "event": "iteration",
                    "iteration": iteration + 1,
                    "loss": _number(next(iter(losses.values()))),
                    "grad_norm": _number(grad_norm),
                    "skipped": bool(skipped),
                }
            )
        return result

    return recorded_step


def _is_first_holder_of_the_loss() -> bool:
    """The nominal last stage's TP rank 0 in the first pipeline."""
    from megatron.core import mpu

    return bool(
        mpu.is_pipeline_last_stage()
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _number(value: Any) -> float | None:
    """A float; None where the step has none."""
    return None if value is None else float(value)
