"""The offers' book: one at a time is out, and each ends in one of four ways."""

import logging

from malleus_megatron.control.values import Observation

_MOST_DOUBLINGS = 10
_log = logging.getLogger(__name__)


class Offers:
    """Knows whether an offer is out, and which plans the job does not want for now."""

    def __init__(self) -> None:
        self.pending: str | None = None
        """Plan id of the offer that is out."""
        self.last_outcome: str | None = None
        """How the offer before ended, in words."""
        self._made_at = 0
        self._num_microbatches = 0
        self._rests_until: dict[str, int] = {}
        self._refusals: dict[str, int] = {}

    def may_make(self, plan_id: str, iteration: int) -> bool:
        """True if none is out and the job has not just refused this plan."""
        return self.pending is None and not self.rests(plan_id, iteration)

    def rests(self, plan_id: str, iteration: int) -> bool:
        """True if the job has just refused this plan."""
        return iteration < self._rests_until.get(plan_id, 0)

    def rest(self, plan_id: str, first: int) -> int:
        """Iterations that a plan rests after a refusal: twice as many each time.

        Args:
            plan_id: Of the plan.
            first: After its first refusal.
        """
        return int(first * 2 ** min(self._refusals.get(plan_id, 0), _MOST_DOUBLINGS))

    def make(self, plan_id: str, observation: Observation) -> None:
        """Note that an offer went out with the answer to this observation."""
        self.pending = plan_id
        self._made_at = observation.iteration
        self._num_microbatches = observation.num_microbatches

    def settle(self, observation: Observation, timeout_iterations: int) -> None:
        """End the offer that is out if the job runs under it, has outgrown it, or is silent."""
        if self.pending is None:
            return
        waited = observation.iteration - self._made_at
        if observation.plan_id == self.pending:
            self._end("taken")
        elif observation.num_microbatches != self._num_microbatches:
            self._end("void: the number of micro-batches of the step changed")
        elif waited >= timeout_iterations:
            self._end(f"not taken within {waited} iterations")

    def reject(self, plan_id: str, why: str, *, rests_until: int) -> None:
        """End the offer as refused; this plan is not offered again before that iteration."""
        self._rests_until[plan_id] = rests_until
        self._refusals[plan_id] = self._refusals.get(plan_id, 0) + 1
        if plan_id == self.pending:
            self._end(f"refused: {why}")

    def _end(self, outcome: str) -> None:
        self.last_outcome = f"{self.pending} {outcome}"
        self.pending = None
        _log.info("Offer %s", self.last_outcome)
