"""Rank 0 writes traces, with what it takes to ask the planner about them."""

from pathlib import Path

from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.trace import TracedStep
from malleus_megatron.control.policy import Policy
from malleus_megatron.sidecar.protocol import encode, job_to_json, observation_to_json
from malleus_megatron.whatif.joining import Joined
from malleus_megatron.whatif.trace_folder import JOB, OBSERVATION, StepFile, write_step


class TraceWriter:
    """Writes a file for each traced iteration, until that fails."""

    def __init__(self, folder: Path, reporter: Reporter) -> None:
        """Write nothing yet."""
        self._folder = folder
        self._reporter = reporter
        self._has_failed = False

    def write(self, step: TracedStep, operations: list[Joined], clock_error_s: float) -> None:
        """A disk that fills up must not end a training job: it is said once."""
        if self._has_failed:
            return
        file = StepFile(
            iteration=step.iteration,
            generation=step.generation,
            plan=step.plan,
            operations=operations,
            documents=self._documents(),
        )
        try:
            write_step(self._folder, file)
        except OSError as error:
            self._has_failed = True
            self._reporter.warning(f"No more traces are written to {self._folder}: {error}.")
            return
        self._reporter.traced(step.iteration, len(operations), clock_error_s)

    def _documents(self) -> dict[str, bytes]:
        """The job, and what its GPUs measured in the iteration that has just been reported."""
        job, observation = self._reporter.job, self._reporter.observation
        found = {}
        if job is not None:
            found[JOB] = encode(job_to_json(job, Policy()))
        if observation is not None:
            found[OBSERVATION] = encode(observation_to_json(observation))
        return found
