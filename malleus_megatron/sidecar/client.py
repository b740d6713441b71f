"""Rank 0's end: hands samples over and takes answers without ever waiting for them."""

import logging
import os
import threading
from collections import deque
from dataclasses import replace

from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, JobDescription, Observation
from malleus_megatron.errors import SidecarError
from malleus_megatron.sidecar.conversation import Conversation, Turn
from malleus_megatron.sidecar.process import GivenSidecar, OwnSidecar, Sidecar

_log = logging.getLogger(__name__)
_MAX_REJECTIONS = 16

type _Mail = tuple[JobDescription | None, Observation | None, tuple[tuple[str, str], ...]]


class SidecarClient:
    """A mailbox for the training loop and a thread that talks to the sidecar.

    No method raises or waits for the sidecar, but `close`, which has a time limit. In a process
    forked from this one (a data-loader worker) every method does nothing.
    """

    def __init__(self, sidecar: Sidecar) -> None:
        """Nothing starts before `start`."""
        self._sidecar = sidecar
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._job: JobDescription | None = None
        self._observation: Observation | None = None
        self._rejected: deque[tuple[str, str]] = deque(maxlen=_MAX_REJECTIONS)
        self._decision: Decision | None = None
        self._warnings: list[str] = []

    def start(self, job: JobDescription, policy: Policy | None = None) -> None:
        """Launch the sidecar and tell it about the job, in the background."""
        try:
            self._sidecar.launch()
        except SidecarError as error:
            self._warnings.append(f"{error} Training goes on without re-plans.")
            return
        conversation = Conversation(self._sidecar, job, policy or Policy())
        self._thread = threading.Thread(
            target=self._run, args=(conversation,), name="malleus-sidecar", daemon=True
        )
        self._thread.start()

    def post(self, observation: Observation) -> None:
        """Hand over an iteration. If the one before was not sent yet, the newer one replaces it."""
        if self._is_mine():
            with self._changed:
                self._observation = observation
                self._changed.notify()

    def describe(self, job: JobDescription) -> None:
        """Say that the job has another layout or level now; what was seen before is void."""
        if self._is_mine():
            with self._changed:
                self._job, self._observation, self._decision = job, None, None
                self._rejected.clear()
                self._changed.notify()

    def reject(self, plan_id: str, why: str) -> None:
        """Say that the job does not take an offer."""
        if self._is_mine():
            with self._changed:
                self._rejected.append((plan_id, why))
                self._changed.notify()

    def take_reply(self) -> Decision | None:
        """The newest answer, once. An offer stays in it until taken or replaced by another."""
        if not self._is_mine():
            return None
        with self._changed:
            decision, self._decision = self._decision, None
        return decision

    def take_warnings(self) -> tuple[str, ...]:
        """What went wrong since the last call, and what happens now."""
        if not self._is_mine():
            return ()
        with self._changed:
            warnings, self._warnings = tuple(self._warnings), []
        return warnings

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread, and the sidecar if it is ours; what was not sent is dropped."""
        if not self._is_mine():
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._sidecar.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _is_mine(self) -> bool:
        return os.getpid() == self._pid

    def _run(self, conversation: Conversation) -> None:
        try:
            self._talk(conversation)
        except Exception as error:  # noqa: BLE001  (a fault of ours must not end the job)
            _log.exception("The thread that talks to the sidecar failed.")
            self._deliver(Turn(warnings=(f"No more re-plans: {error!r} in the sidecar's client.",)))
        if not self._closing:
            self._sidecar.stop()

    def _talk(self, conversation: Conversation) -> None:
        self._deliver(conversation.exchange())
        while not conversation.over and self._mail_is_there(conversation.pause_s):
            job, observation, rejected = self._take_mail()
            if job is not None:
                conversation.describe(job)
            self._deliver(conversation.exchange(observation, rejected))

    def _mail_is_there(self, pause_s: float) -> bool:
        """Wait out the pause, then for mail; False when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=pause_s)
            self._changed.wait_for(
                lambda: self._closing or self._job or self._observation or self._rejected
            )
            return not self._closing

    def _take_mail(self) -> _Mail:
        with self._changed:
            mail = self._job, self._observation, tuple(self._rejected)
            self._job = self._observation = None
            self._rejected.clear()
        return mail

    def _deliver(self, turn: Turn) -> None:
        with self._changed:
            if self._closing:  # what fails now was ended by us
                return
            self._warnings.extend(turn.warnings)
            if turn.decision is not None and self._job is None:  # else it is about the former job
                waiting = None if self._decision is None else self._decision.offer
                self._decision = replace(turn.decision, offer=turn.decision.offer or waiting)


def check_setting(setting: str) -> None:
    """Refuse a setting that is neither auto, none nor a URL; nothing is started.

    Raises:
        BadInputError: with the setting and what it may be.
    """
    if setting not in {"auto", "none"}:
        GivenSidecar(setting)


def start_sidecar(setting: str, job: JobDescription) -> SidecarClient | None:
    """Start what `--malleus-sidecar` asks for: auto, none or a URL.

    Raises:
        BadInputError: it is neither of them.
    """
    if setting == "none":
        return None
    client = SidecarClient(OwnSidecar() if setting == "auto" else GivenSidecar(setting))
    client.start(job)
    return client
