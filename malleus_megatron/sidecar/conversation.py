"""What is said to the sidecar, and what becomes of its failures. No thread, no clock."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, JobDescription, Observation
from malleus_megatron.errors import BadInputError, NoJobError, SidecarError, sentence
from malleus_megatron.plan.plan import check_world
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.once import LONG, Once
from malleus_megatron.sidecar.outbox import Outbox
from malleus_megatron.sidecar.process import Sidecar
from malleus_megatron.sidecar.transport import PLANNING_PATH, Transport

MOST_EVENT_BYTES = 2**20
"""Of events that wait; with the samples of 10,000 GPUs they fit into one message."""

_MAX_RESTARTS = 3
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MAX_NAMED_GPUS = 16
_GOES_ON = "Training goes on under the current plan"
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one exchange brought."""

    decision: Decision | None = None
    warnings: tuple[str, ...] = ()
    news: tuple[str, ...] = ()
    """What is good to know and no trouble."""


class Conversation:
    """Asks the sidecar and checks its answers; whatever it does wrong becomes a warning.

    After a failure it waits, each time twice as long up to a minute. A process of ours that has
    ended is started again, a few times; then it is over. After a long time without a failure the
    next one counts, and is told, like the first.
    """

    def __init__(self, sidecar: Sidecar, job: JobDescription, policy: Policy) -> None:
        """Nothing is sent before the first exchange."""
        self.over = False
        self._sidecar = sidecar
        self._policy = policy
        self._transport: Transport | None = None
        self._failures = 0
        self._restarts = 0
        self._answered = 0
        self._states = Once()
        self._timings = Once()
        self._outages = Once()
        self._said = (self._states, self._timings, self._outages)
        self._unsent = Outbox(MOST_EVENT_BYTES)
        self._page: str | None = None
        self.describe(job)

    def describe(self, job: JobDescription) -> None:
        """Describe the job anew with the next exchange."""
        self._described = job
        self._num_gpus = len(list(job.nominal.all_gpus()))
        self._job_is_known = False

    @property
    def pause_s(self) -> float:
        """How long to wait before the next exchange."""
        if not self._failures:
            return 0.0
        doublings = min(self._failures - 1, 10)
        return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**doublings))

    def exchange(
        self,
        observation: Observation | None = None,
        rejected: Iterable[tuple[str, str]] = (),
        events: Iterable[dict[str, Any]] = (),
    ) -> Turn:
        """Tell what is new and hear what the controller decides.

        Args:
            observation: The newest iteration, if there is a new one.
            rejected: Plan id and reason of offers that the job refused.
            events: What the job has written into its log; sent with the next iteration.
        """
        for event in events:
            self._unsent.add(event)
        try:
            self._introduce()
            for plan_id, why in rejected:
                self._ask("/v1/rejected", {"plan_id": plan_id, "why": why})
            decision = None if observation is None else self._decision(observation)
        except (SidecarError, BadInputError) as error:
            return Turn(warnings=self._failed(str(error)))
        self._failures = 0
        warnings: tuple[str, ...] = ()
        if decision is not None:
            self._went_well()
            warnings = self._timings.say(_unmeasured(decision))
            warnings += self._states.say(decision.warning or None, as_what=_kind(decision.warning))
        return Turn(decision=decision, warnings=warnings, news=self._where())

    def _introduce(self) -> None:
        """Connect and describe the job; after a failure again, since it may be another process."""
        if self._transport is None:
            self._transport = self._sidecar.connect()
        if not self._job_is_known:
            self._send("/v1/job", protocol.job_to_json(self._described, self._policy))
            self._job_is_known = True

    def _decision(self, observation: Observation) -> Decision:
        events = self._unsent.take()
        document = protocol.observation_to_json(observation) | {"events": events}
        try:
            answer = self._ask(PLANNING_PATH, document)
        except SidecarError:  # it may not have heard them
            for event in events:
                self._unsent.add(event)
            raise
        decision = protocol.decision_from_json(answer)
        settings = answer.get("settings")
        if isinstance(settings, dict):  # changed there: another process must hear of them
            self._policy = protocol.changed_policy(self._policy, settings)
        if decision.offer is not None:
            check_world(decision.offer, self._num_gpus)
        return decision

    def _where(self) -> tuple[str, ...]:
        """Where the status page is, whenever that is new."""
        page, self._page = self._page, self._sidecar.page
        return () if self._page is None or self._page == page else (f"status page: {self._page}",)

    def _ask(self, path: str, document: dict[str, object]) -> dict[str, object]:
        try:
            return self._send(path, document)
        except NoJobError:  # it was started anew between two exchanges: nothing has failed
            self._job_is_known = False
            self._introduce()
            return self._send(path, document)

    def _send(self, path: str, document: dict[str, object]) -> dict[str, object]:
        assert self._transport is not None
        body = self._transport(path, protocol.encode(document))
        return protocol.decode(body, "The sidecar's answer")

    def _went_well(self) -> None:
        """One iteration more was answered; after many of them what was before is forgotten."""
        self._answered += 1
        if self._answered == LONG:
            self._restarts = 0
        for said in self._said:
            said.pass_iteration()

    def _failed(self, error: str) -> tuple[str, ...]:
        """Take note of a failure; those that follow it before the next answer are the same one."""
        is_new = not self._failures
        self._failures += 1
        self._answered = 0
        for said in self._said:
            said.interrupt()
        self._job_is_known = False
        end = self._sidecar.end()
        if end is not None:
            return (self._restarted(end),)  # a few times at most
        if not is_new:
            return ()
        told = f"The sidecar failed: {sentence(error)} {_GOES_ON}; it is asked again."
        return self._outages.say(told)

    def _restarted(self, end: str) -> str:
        """Start a process that has ended once more; what it had seen it sees anew."""
        what = f"The sidecar has ended ({end}). {_GOES_ON}"
        if self._restarts < _MAX_RESTARTS:
            self._restarts += 1
            self._transport = None
            try:
                self._sidecar.launch()
            except SidecarError as error:
                what = f"{what}; {error}"
            else:
                return f"{what}; it is started again ({self._restarts} of {_MAX_RESTARTS})."
        self.over = True
        return f"{what}; there are no more re-plans."


def _kind(warning: str) -> str:
    """A state that lasts is one thing to say, until a figure in it has doubled."""
    return _FIGURE.sub(lambda found: str(math.frexp(float(found[0]))[1]), warning)


def _unmeasured(decision: Decision) -> str | None:
    if not decision.ignored:
        return None
    gpus = ", ".join(map(str, decision.ignored[:_MAX_NAMED_GPUS]))
    more = len(decision.ignored) - _MAX_NAMED_GPUS
    named = f"{gpus} and {more} more" if more > 0 else gpus
    return f"No usable layer timing from GPU {named}; earlier ones count, if there are any."
