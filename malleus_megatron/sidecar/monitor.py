"""What the sidecar keeps for those who look at it: the job's history, and counts."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from malleus_megatron.control.values import Decision, Observation
from malleus_megatron.errors import BadInputError
from malleus_megatron.pages.history import Bounds, History, begins_a_run, number
from malleus_megatron.pages.story import Story, tell
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rate_news import RateNews

BOUNDS = Bounds(steps=5000, events=1000, rates=1_000_000)
"""A job may run for months; this is some 10 MiB."""
_MOST_PLANS = 16


class Monitor:
    """Fed with what the job says and what the controller decides; nothing of it decides anything.

    A job of an older version sends no events: then iterations and stragglers are taken from its
    samples and from the decisions on them.
    """

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self.history = History(BOUNDS)
        self.plans: dict[int, Plan] = {}
        """The latest generations."""
        self.counts: Counter[str] = Counter()
        """Events by kind; offers and refusals; sums of seconds and bytes."""
        self._rates = RateNews()
        self._stragglers: frozenset[int] = frozenset()

    def hear(self, events: list[Any]) -> None:
        """Take in events of the job; rates come from the decisions, and what is none is counted."""
        for event in events:
            if not isinstance(event, Mapping):
                self.counts["bad events"] += 1
            elif event.get("event") != "rates":
                self._add(event)

    def decided(
        self, observation: Observation, decision: Decision, layout: Plan, *, has_events: bool
    ) -> None:
        """Take in an iteration and what the controller makes of it.

        Args:
            observation: As the job sent it.
            decision: The answer.
            layout: In force in that iteration.
            has_events: Whether the job tells its events itself.
        """
        self.plans[observation.generation] = layout.with_counts(observation.microbatch_counts)
        for generation in sorted(self.plans)[:-_MOST_PLANS]:
            del self.plans[generation]
        if not has_events:
            self._say_for_the_job(observation, decision)
        if self._rates.take(observation.iteration, decision.rates, decision.stragglers):
            self.history.add_rates(observation.iteration, decision.rates)
        if decision.offer is not None:
            self.counts["offers"] += 1
            note = decision.offer.planning
            self.counts["planning_us"] += 0 if note is None else round(1e6 * note.seconds)

    def refused(self) -> None:
        """The job did not take an offer."""
        self.counts["refusals"] += 1

    def story(self) -> Story:
        """What a page shows now."""
        return tell(self.history, self.plans)

    def _say_for_the_job(self, observation: Observation, decision: Decision) -> None:
        iteration = observation.iteration
        self._add(
            {
                "event": "iteration",
                "iteration": iteration,
                "generation": observation.generation,
                "plan": observation.plan_id,
            }
        )
        now = frozenset(decision.stragglers)
        since = {found.gpu: found.since for found in decision.detections}
        for gpu in sorted(now ^ self._stragglers):
            kind = "straggler" if gpu in now else "recovered"
            rate = decision.rates[gpu]
            self._add({"event": kind, "iteration": iteration, "gpu": gpu, "rate": rate}
                      | ({"since": since[gpu]} if gpu in since else {}))  # fmt: skip
        self._stragglers = now

    def _add(self, event: Mapping[str, Any]) -> None:
        if begins_a_run(event, self.history) and self.history.version:
            self._start_over()
        try:
            self.history.add(event)
        except BadInputError:
            self.counts["bad events"] += 1
            return
        kind = str(event["event"])
        self.counts[f"event {kind}"] += 1
        if kind == "migration":
            self.counts["migration_us"] += round(1e6 * _amount(event.get("seconds")))
            self.counts["migration_bytes"] += round(_amount(event.get("bytes")))

    def _start_over(self) -> None:
        """The job has started again, from a checkpoint say; counts go on."""
        self.history = History(BOUNDS)
        self.plans.clear()
        self._rates, self._stragglers = RateNews(), frozenset()


def _amount(value: object) -> float:
    """What a counter may grow by."""
    amount = number(value)
    return amount if amount is not None and 0 <= amount < math.inf else 0.0
