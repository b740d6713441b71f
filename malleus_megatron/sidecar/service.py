"""What the sidecar does with each request: documents in, documents out, no network."""

from typing import Any

from malleus_megatron.control.controller import Controller
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import JobDescription
from malleus_megatron.errors import NoJobError
from malleus_megatron.plan.fields import required
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.metrics import metrics_text
from malleus_megatron.sidecar.monitor import Monitor
from malleus_megatron.sidecar.status_page import CachedPage


class Service:
    """One job's controller, driven by requests.

    Every method takes and returns JSON documents and raises BadInputError for a bad one.
    """

    def __init__(self) -> None:
        self._controller: Controller | None = None
        self._described: tuple[JobDescription, Policy] | None = None
        self._monitor = Monitor()
        self._page = CachedPage()

    def health(self) -> dict[str, Any]:
        """Alive."""
        return {"status": "ok"}

    def job(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take up a job, or go on with it under another layout or at another level.

        The same description again, after a lost answer say, changes nothing. Settings that were
        changed here stay unless the job itself asks for others. Another nominal plan is another
        job.
        """
        job, policy = described = protocol.job_from_json(body)
        controller, before = self._controller, self._described
        if controller is None or before is None or before[0].nominal != job.nominal:
            self._controller = Controller(job, policy)
            self._monitor = Monitor()
        elif described != before:
            controller.relaid(job)
            if policy != before[1]:
                controller.policy = policy
        self._described = described
        return {}

    def samples(self, body: dict[str, Any]) -> dict[str, Any]:
        """One iteration's samples: the answer is what the controller decides."""
        observation = protocol.observation_from_json(body)
        events = protocol.events_from_json(body)
        decision = self._known().observe(observation)
        self._monitor.hear(events or [])
        self._monitor.decided(
            observation, decision, self._known().job.layout, has_events=events is not None
        )
        return protocol.decision_to_json(decision) | {"settings": self.settings()}

    def rejected(self, body: dict[str, Any]) -> dict[str, Any]:
        """The job refused an offer."""
        plan_id = str(required(body, "plan_id", "rejected"))
        self._known().reject(plan_id, str(body.get("why", "no reason given")))
        self._monitor.refused()
        return {}

    def settings(self) -> dict[str, Any]:
        """The settings in force."""
        return protocol.policy_to_json(self._known().policy)

    def change_settings(self, body: dict[str, Any]) -> dict[str, Any]:
        """Change the named settings from the next iteration on; the others stay."""
        controller = self._known()
        controller.policy = protocol.changed_policy(controller.policy, body)
        return self.settings()

    def probe(self, _body: dict[str, Any]) -> dict[str, Any]:
        """All GPUs are to be probed; the job's log and events say what came of it."""
        self._known().ask_probe()
        return {"probe": "with the next iteration"}

    def status(self) -> dict[str, Any]:
        """Everything known about the job, for people and pages."""
        controller = self._controller
        if controller is None:
            return {"job": None}
        job, seen, decision = controller.job, controller.seen, controller.decision
        return {
            "job": protocol.job_to_json(job, controller.policy),
            "generation": None if seen is None else seen.generation,
            "plan_id": None if seen is None else seen.plan_id,
            "microbatch_counts": [] if seen is None else list(seen.microbatch_counts),
            "decision": None if decision is None else protocol.decision_to_json(decision),
            "pending_offer": controller.offers.pending,
            "last_offer": controller.offers.last_outcome,
        }

    def page(self) -> str:
        """The status page."""
        return self._page.of(self._monitor, is_known=self._controller is not None)

    def metrics(self) -> str:
        """The same for Prometheus."""
        return metrics_text(self._controller, self._monitor)

    def _known(self) -> Controller:
        if self._controller is None:
            raise NoJobError("No job is known here. Describe it first: POST /v1/job.")
        return self._controller
