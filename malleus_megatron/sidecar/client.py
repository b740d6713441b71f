"""Rank 0's end: hands samples over and takes answers without ever waiting for them."""

import logging
import os
import threading
from collections import deque
from dataclasses import replace
from typing import Any

from malleus_megatron.config import MalleusConfig
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, JobDescription, Observation
from malleus_megatron.errors import BadInputError, SidecarError, sentence
from malleus_megatron.sidecar.access import Listen, listen_from_text, read_token
from malleus_megatron.sidecar.conversation import MOST_EVENT_BYTES, Conversation, Turn
from malleus_megatron.sidecar.outbox import Outbox
from malleus_megatron.sidecar.process import GivenSidecar, OwnSidecar, Sidecar

_log = logging.getLogger(__name__)
_MAX_REJECTIONS = 16

type _Mail = tuple[
    JobDescription | None,
    Observation | None,
    tuple[tuple[str, str], ...],
    list[dict[str, Any]],
]


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
        self._asks_probe = False
        self._warnings: list[str] = []
        self._news: list[str] = []
        self._events = Outbox(MOST_EVENT_BYTES)

    def start(self, job: JobDescription, policy: Policy | None = None) -> None:
        """Launch the sidecar and tell it about the job, in the background."""
        try:
            self._sidecar.launch()
        except SidecarError as error:
            self._warnings.append(f"{sentence(error)} Training goes on without re-plans.")
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

    def tell(self, event: dict[str, Any]) -> None:
        """Pass on an event of the job's log, for those who look at the sidecar's page.

        Rates are left out: the sidecar has them from its own decisions.
        """
        if self._is_mine() and event.get("event") != "rates":
            with self._changed:  # nobody is woken: it goes with the next iteration
                self._events.add(event)

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

    def take_probe_request(self) -> bool:
        """Whether somebody has asked for a probe of all GPUs since the last call."""
        if not self._is_mine():
            return False
        with self._changed:
            asked, self._asks_probe = self._asks_probe, False
        return asked

    def take_news(self) -> tuple[str, ...]:
        """What is good to know since the last call."""
        if not self._is_mine():
            return ()
        with self._changed:
            news, self._news = tuple(self._news), []
        return news

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
            job, observation, rejected, events = self._take_mail()
            if job is not None:
                conversation.describe(job)
            self._deliver(conversation.exchange(observation, rejected, events))

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
            mail = self._job, self._observation, tuple(self._rejected), self._events.take()
            self._job = self._observation = None
            self._rejected.clear()
        return mail

    def _deliver(self, turn: Turn) -> None:
        with self._changed:
            if self._closing:  # what fails now was ended by us
                return
            self._warnings.extend(turn.warnings)
            self._news.extend(turn.news)
            if turn.decision is not None and turn.decision.asks_probe:
                self._asks_probe = True
            if turn.decision is not None and self._job is None:  # else it is about the former job
                waiting = None if self._decision is None else self._decision.offer
                self._decision = replace(turn.decision, offer=turn.decision.offer or waiting)


def make_sidecar(config: MalleusConfig) -> Sidecar | None:
    """The sidecar that the settings ask for, not yet started; None: none.

    Raises:
        BadInputError: a setting of the sidecar's that has no sense, or would be ignored.
    """
    token_file = config.token_file
    if config.sidecar != "auto" and config.listen is not None:
        raise BadInputError(
            f"--malleus-listen {config.listen} is for the sidecar that the job starts; with "
            f"--malleus-sidecar {config.sidecar} there is none."
        )
    if config.sidecar == "none" and token_file is not None:
        raise BadInputError(f"--malleus-token-file {token_file}, but --malleus-sidecar none.")
    if config.sidecar == "none":
        return None
    if config.sidecar != "auto":
        return GivenSidecar(config.sidecar, None if token_file is None else read_token(token_file))
    listen = Listen() if config.listen is None else listen_from_text(config.listen)
    sidecar = OwnSidecar(listen=listen, token_file=token_file)
    listen.check(None if token_file is None else str(token_file), "--malleus-token-file FILE")
    return sidecar


def start_sidecar(config: MalleusConfig, job: JobDescription) -> SidecarClient | None:
    """Start what the settings ask for.

    Raises:
        BadInputError: as `make_sidecar`.
    """
    sidecar = make_sidecar(config)
    if sidecar is None:
        return None
    client = SidecarClient(sidecar)
    client.start(job)
    return client
