"""Rank 0 writes traces, with what it takes to ask the planner about them."""

from collections.abc import Sequence
from pathlib import Path

from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.trace import TracedStep
from malleus_megatron.control.policy import Policy
from malleus_megatron.sidecar.protocol import encode, job_to_json, observation_to_json
from malleus_megatron.whatif.joining import Joined, Recording, joined
from malleus_megatron.whatif.links import LinkWatch, Nodes, link_times
from malleus_megatron.whatif.trace_folder import JOB, OBSERVATION, StepFile, write_step


class TraceWriter:
    """Writes a file for each traced iteration, until that fails, and watches the links."""

    def __init__(self, folder: Path, reporter: Reporter, nodes: Nodes) -> None:
        """Write nothing yet.

        Args:
            folder: Of all traces.
            reporter: Says what is found.
            nodes: Where each GPU is.
        """
        self._folder = folder
        self._reporter = reporter
        self._nodes = nodes
        self._links = LinkWatch()
        self._has_failed = False

    def write(self, step: TracedStep, recordings: list[Recording], clock_error_s: float) -> None:
        """Write an iteration's file, and say which links have become slow in it."""
        operations = joined(step.plan, recordings)
        if operations:
            self._watch_links(step, operations, recordings, clock_error_s)
        self._keep(step, operations, clock_error_s)

    def _watch_links(
        self,
        step: TracedStep,
        operations: Sequence[Joined],
        recordings: Sequence[Recording],
        clock_error_s: float,
    ) -> None:
        first_s = min(row.start_s for row in operations)
        last_s = max(row.end_s for row in operations)
        news = self._links.look(
            link_times(step.plan, operations, recordings, self._nodes),
            step_s=last_s - first_s,
            clock_error_s=clock_error_s,
        )
        for one in news:
            self._reporter.link(one, step.iteration)

    def _keep(self, step: TracedStep, operations: Sequence[Joined], clock_error_s: float) -> None:
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
