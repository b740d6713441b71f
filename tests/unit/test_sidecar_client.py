"""The training process's end with a sidecar in the same process: no socket, no waiting."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from malleus_megatron.config import Level, MalleusConfig
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision
from malleus_megatron.errors import BadInputError, SidecarError
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.client import SidecarClient, start_sidecar
from malleus_megatron.sidecar.conversation import Conversation
from malleus_megatron.sidecar.service import Service
from malleus_megatron.sidecar.transport import HttpTransport, Transport
from tests.unit.sidecar_cases import JOB, SLOW, observation, wait_for

type Answer = Callable[[str, bytes], bytes]


@dataclass
class FakeSidecar:
    """A real service behind a fake transport; `answer` may be replaced by something worse."""

    service: Service = field(default_factory=Service)
    answer: Answer | None = None
    ended: str | None = None
    page: str | None = None
    paths: list[str] = field(default_factory=list)
    stops: int = 0
    launches: int = 0

    def launch(self) -> None:
        self.launches += 1

    def connect(self) -> Transport:
        return self.post

    def end(self) -> str | None:
        return self.ended

    def stop(self) -> None:
        self.stops += 1

    def post(self, path: str, body: bytes) -> bytes:
        self.paths.append(path)
        return (self.answer or self.serve)(path, body)

    def serve(self, path: str, body: bytes) -> bytes:
        document = protocol.decode(body, "request")
        return protocol.encode(getattr(self.service, path.removeprefix("/v1/"))(document))


def talk(sidecar: FakeSidecar) -> Conversation:
    return Conversation(sidecar, JOB, Policy())


@pytest.fixture
def sidecar() -> FakeSidecar:
    return FakeSidecar()


@pytest.fixture
def client(sidecar: FakeSidecar) -> Iterator[SidecarClient]:
    made = SidecarClient(sidecar)
    yield made
    made.close()


def test_the_job_is_described_once_and_then_the_samples_go_over(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    conversation.exchange()
    for k in range(1, 5):
        decision = conversation.exchange(observation(k, SLOW)).decision
    assert sidecar.paths == ["/v1/job"] + ["/v1/samples"] * 4
    assert decision is not None
    assert decision.offer is not None
    assert decision.offer.microbatch_counts == (12, 4)


def test_a_refusal_is_passed_on(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    for k in range(1, 5):
        turn = conversation.exchange(observation(k, SLOW))
    assert turn.decision is not None
    assert turn.decision.offer is not None
    conversation.exchange(rejected=[(plan_id(turn.decision.offer), "another world")])
    assert "refused: another world" in str(sidecar.service.status()["last_offer"])


def failing(path: str, body: bytes) -> bytes:
    raise SidecarError("It did not answer within 2 s.")


def test_failures_are_said_once_and_waited_out_ever_longer(sidecar: FakeSidecar) -> None:
    """A given sidecar may be away for an hour and come back: it is asked again, once a minute."""
    sidecar.answer = failing
    conversation = talk(sidecar)
    pauses: list[float] = []
    warnings: list[str] = []
    for iteration in range(1, 2001):
        warnings += conversation.exchange(observation(iteration)).warnings
        pauses.append(conversation.pause_s)
    assert pauses[:9] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pauses[-1] == 60.0
    assert not conversation.over
    assert warnings == [
        "The sidecar failed: It did not answer within 2 s. "
        "Training goes on under the current plan; it is asked again.",
    ]
    sidecar.answer = None
    assert conversation.exchange(observation(2001)).decision is not None
    assert conversation.pause_s == 0


def test_after_a_failure_the_job_is_described_again(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    conversation.exchange(observation(1))
    sidecar.answer = failing
    conversation.exchange(observation(2))
    sidecar.answer, sidecar.service = None, Service()
    assert conversation.exchange(observation(3)).decision == Decision(iteration=3)
    assert conversation.pause_s == 0
    assert sidecar.paths[-2:] == ["/v1/job", "/v1/samples"]


def test_a_sidecar_that_was_replaced_between_two_exchanges_is_no_failure(
    sidecar: FakeSidecar,
) -> None:
    """Its owner may start it anew; the job tells it what it needs and goes on."""
    conversation = talk(sidecar)
    conversation.exchange(observation(1))
    sidecar.service = Service()
    turn = conversation.exchange(observation(2), rejected=[("a-plan", "of the former process")])
    assert turn.decision == Decision(iteration=2)
    assert turn.warnings == ()
    assert sidecar.paths[2:] == ["/v1/rejected", "/v1/job", "/v1/rejected", "/v1/samples"]


def test_a_sidecar_that_forgets_the_job_at_once_is_a_failure(sidecar: FakeSidecar) -> None:
    def forget(path: str, body: bytes) -> bytes:
        sidecar.service = Service()
        return sidecar.serve(path, body)

    sidecar.answer = forget
    conversation = talk(sidecar)
    (warning,) = conversation.exchange(observation(1)).warnings
    assert "No job is known here" in warning
    assert sidecar.paths == ["/v1/job", "/v1/samples"] * 2


def test_the_same_description_again_forgets_nothing(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    for k in (1, 2):
        conversation.exchange(observation(k, SLOW))
    sidecar.answer = failing
    conversation.exchange(observation(3, SLOW))
    sidecar.answer = None
    turn = conversation.exchange(observation(4, SLOW))
    assert turn.decision is not None
    assert turn.decision.stragglers == tuple(SLOW)


def test_a_process_that_ended_is_started_again_a_few_times(sidecar: FakeSidecar) -> None:
    sidecar.answer, sidecar.ended = failing, "SIGKILL"
    conversation = talk(sidecar)
    said = [conversation.exchange().warnings[0] for _ in range(4)]
    ended = "The sidecar has ended (SIGKILL). Training goes on under the current plan; "
    assert said == [
        ended + "it is started again (1 of 3).",
        ended + "it is started again (2 of 3).",
        ended + "it is started again (3 of 3).",
        ended + "there are no more re-plans.",
    ]
    assert sidecar.launches == 3
    assert conversation.over


def test_after_a_long_time_without_failures_restarts_and_warnings_count_anew(
    sidecar: FakeSidecar,
) -> None:
    """In a job of months a fourth end is no sign of a sidecar that cannot run."""
    conversation = talk(sidecar)
    iteration = 0
    said: list[str] = []
    for _ in range(5):
        sidecar.answer, sidecar.ended = failing, "SIGKILL"
        said += conversation.exchange().warnings
        sidecar.answer, sidecar.ended = failing, None
        said += conversation.exchange().warnings
        sidecar.answer = None
        for _ in range(100):
            iteration += 1
            assert conversation.exchange(observation(iteration)).warnings == ()
        sidecar.answer = failing
        said += conversation.exchange(observation(iteration)).warnings
    assert not conversation.over
    assert sidecar.launches == 5
    assert [("(1 of 3)" in one, "did not answer" in one) for one in said] == (
        [(True, False), (False, True)] * 5
    )


def test_settings_that_were_changed_outlive_the_process(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    conversation.exchange(observation(1))
    sidecar.service.change_settings({"threshold": 1.9})
    conversation.exchange(observation(2))
    sidecar.answer, sidecar.ended = failing, "SIGKILL"
    conversation.exchange(observation(3))
    sidecar.answer, sidecar.ended, sidecar.service = None, None, Service()
    conversation.exchange(observation(4))
    assert sidecar.service.settings()["threshold"] == 1.9


def test_a_reason_without_a_full_stop_gets_one(sidecar: FakeSidecar) -> None:
    sidecar.answer = partial(raising, "it fails here")
    (warning,) = talk(sidecar).exchange().warnings
    assert warning.startswith("The sidecar failed: it fails here. Training goes on")


def test_a_process_that_was_started_again_decides_again(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    conversation.exchange(observation(1, SLOW))
    sidecar.answer, sidecar.ended = failing, "SIGKILL"
    conversation.exchange(observation(2, SLOW))
    sidecar.answer, sidecar.ended, sidecar.service = None, None, Service()
    decisions = [conversation.exchange(observation(k, SLOW)).decision for k in range(3, 6)]
    assert decisions[-1] is not None
    assert decisions[-1].stragglers == tuple(SLOW)


OTHER_WORLD = nominal_plan(
    num_layers=8,
    num_microbatches=16,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    data_parallel_size=2,
)


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        (b"<html>busy</html>", "is not JSON"),
        (b'{"schema_version": 1}', "'iteration' is missing"),
        (b'{"schema_version": 9}', "schema_version 9 is not known"),
        (
            protocol.encode(protocol.decision_to_json(Decision(iteration=1, offer=OTHER_WORLD))),
            "The plan is for 8 GPUs",
        ),
    ],
)
def test_nonsense_is_a_warning(sidecar: FakeSidecar, nonsense: bytes, message: str) -> None:
    sidecar.answer = lambda path, body: b'{"schema_version": 1}' if path == "/v1/job" else nonsense
    turn = talk(sidecar).exchange(observation(1))
    assert turn.decision is None
    (warning,) = turn.warnings
    assert message in warning
    assert "Training goes on under the current plan" in warning


def test_one_outage_is_one_warning(sidecar: FakeSidecar) -> None:
    """A proxy in between numbers its errors, say: that makes no two faults of one."""

    def numbered(path: str, body: bytes) -> bytes:
        raise SidecarError(f"It answered 503: request {len(sidecar.paths)}.")

    conversation = talk(sidecar)
    warnings: list[str] = []
    for first in (1, 11):
        sidecar.answer = numbered
        for k in range(first, first + 9):
            warnings += conversation.exchange(observation(k)).warnings
        sidecar.answer = None
        warnings += conversation.exchange(observation(first + 9)).warnings
    assert len(warnings) == 2, warnings


def test_an_outage_that_ends_the_process_is_told_as_both(sidecar: FakeSidecar) -> None:
    sidecar.answer = failing
    conversation = talk(sidecar)
    conversation.exchange(observation(1))
    sidecar.ended = "SIGKILL"
    (warning,) = conversation.exchange(observation(2)).warnings
    assert "has ended (SIGKILL)" in warning


def answering(sidecar: FakeSidecar, answer: bytes, path: str, body: bytes) -> bytes:
    return answer if path == "/v1/samples" else sidecar.serve(path, body)


def test_a_warning_with_other_numbers_is_the_same_warning(sidecar: FakeSidecar) -> None:
    """A busy machine makes all GPUs slow, a little more or less in every iteration."""
    conversation = talk(sidecar)
    warnings: list[str] = []
    for k in range(1, 10):
        busy = Decision(iteration=k, warning=f"All GPUs take 1.{k} times as long.")
        answer = protocol.encode(protocol.decision_to_json(busy))
        sidecar.answer = partial(answering, sidecar, answer)
        warnings += conversation.exchange(observation(k)).warnings
    assert warnings == ["All GPUs take 1.1 times as long."]


def test_an_endless_variety_of_nonsense_is_cut_short(sidecar: FakeSidecar) -> None:
    """Between two failures it answers, so it is never given up."""

    def differing(path: str, body: bytes) -> bytes:
        raise SidecarError(f"Nonsense number {len(sidecar.paths)}.")

    conversation = talk(sidecar)
    warnings: list[str] = []
    for k in range(1, 101):
        sidecar.answer = differing if k % 2 else None
        warnings += conversation.exchange(observation(k)).warnings
    assert not conversation.over
    assert len(warnings) == 21
    assert "are left out" in warnings[-1]


def test_the_end_of_the_process_is_told_however_much_was_said_before(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    for k in range(1, 101):
        message = f"Nonsense number {k}."
        sidecar.answer = partial(raising, message) if k % 2 else None
        conversation.exchange(observation(k))
    sidecar.answer, sidecar.ended = failing, "SIGKILL"
    (warning,) = conversation.exchange(observation(101)).warnings
    assert "it is started again (1 of 3)" in warning


def raising(message: str, path: str, body: bytes) -> bytes:
    raise SidecarError(message)


def test_gpus_without_timings_are_named_once(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    warnings: list[str] = []
    for k in range(1, 8):
        warnings += conversation.exchange(observation(k, {2: float("nan")})).warnings
    assert warnings == ["No usable layer timing from GPU 2; earlier ones count, if there are any."]


def test_an_offer_reaches_the_training_loop(client: SidecarClient, sidecar: FakeSidecar) -> None:
    client.start(JOB)
    for k in range(1, 5):
        client.post(observation(k, SLOW))
        decision = wait_for(client.take_reply)
    assert decision is not None
    assert decision.offer is not None
    assert decision.offer.microbatch_counts == (12, 4)
    assert client.take_reply() is None
    assert client.take_warnings() == ()


def test_an_offer_stays_until_it_is_taken(client: SidecarClient, sidecar: FakeSidecar) -> None:
    def all_were_sent() -> bool:
        return sidecar.paths.count("/v1/samples") == iteration

    client.start(JOB)
    for iteration in range(1, 8):
        client.post(observation(iteration, SLOW))
        assert wait_for(all_were_sent)
    client.close()
    decision = client.take_reply()
    assert decision is not None
    assert decision.offer is not None


def test_post_never_waits_and_the_newest_wins(client: SidecarClient, sidecar: FakeSidecar) -> None:
    gate, seen = threading.Event(), []

    def slow(path: str, body: bytes) -> bytes:
        if path == "/v1/samples":
            seen.append(protocol.decode(body, "request")["iteration"])
            gate.wait(5)
        return sidecar.serve(path, body)

    sidecar.answer = slow
    client.start(JOB)
    client.post(observation(1))
    assert wait_for(lambda: seen)
    start = time.perf_counter()
    for k in range(2, 52):
        client.post(observation(k))
    assert time.perf_counter() - start < 0.5
    gate.set()
    assert wait_for(lambda: len(seen) == 2)
    assert seen == [1, 51]


def test_a_job_that_is_described_anew_is_another_one(
    client: SidecarClient, sidecar: FakeSidecar
) -> None:
    client.start(JOB)
    for k in range(1, 4):
        client.post(observation(k, SLOW))
        assert wait_for(client.take_reply)
    client.post(observation(4, SLOW))
    assert wait_for(lambda: sidecar.service.status().get("pending_offer"))
    client.describe(replace(JOB, level=Level.observe))
    assert wait_for(lambda: sidecar.paths.count("/v1/job") == 2)
    assert client.take_reply() is None
    for k in range(5, 12):
        client.post(observation(k, SLOW))
        decision = wait_for(client.take_reply)
    assert decision is not None
    assert decision.stragglers == tuple(SLOW)
    assert decision.offer is None


def test_refusals_are_kept_within_bounds(client: SidecarClient, sidecar: FakeSidecar) -> None:
    for k in range(100):
        client.reject(f"sha256:{k}", "no")
    client.start(JOB)
    assert wait_for(lambda: sidecar.paths.count("/v1/rejected") == 16)


def test_a_fault_of_our_own_is_a_warning(client: SidecarClient, sidecar: FakeSidecar) -> None:
    def broken(path: str, body: bytes) -> bytes:
        raise ZeroDivisionError

    sidecar.answer = broken
    client.start(JOB)
    (warning,) = wait_for(client.take_warnings)
    assert "No more re-plans: ZeroDivisionError()" in warning
    client.post(observation(1))
    assert client.take_reply() is None
    assert wait_for(lambda: sidecar.stops) == 1


def test_what_fails_because_we_close_is_no_warning(
    client: SidecarClient, sidecar: FakeSidecar
) -> None:
    reached, gate = threading.Event(), threading.Event()

    def ended_under_us(path: str, body: bytes) -> bytes:
        reached.set()
        gate.wait(5)
        raise SidecarError("Connection reset by peer.")

    sidecar.answer = ended_under_us
    client.start(JOB)
    assert reached.wait(5)
    threading.Timer(0.1, gate.set).start()
    client.close()
    assert client.take_warnings() == ()


def test_close_is_bounded_and_harmless_twice(client: SidecarClient, sidecar: FakeSidecar) -> None:
    gate = threading.Event()
    sidecar.answer = lambda path, body: bytes(gate.wait(5))
    client.start(JOB)
    start = time.perf_counter()
    client.close(timeout_s=0.1)
    client.close(timeout_s=0.1)
    assert time.perf_counter() - start < 2
    gate.set()


def test_a_client_that_never_started_is_harmless(client: SidecarClient) -> None:
    client.post(observation(1))
    client.reject("sha256:0", "no")
    assert client.take_reply() is None
    assert client.take_warnings() == ()


def test_a_sidecar_that_cannot_be_launched_is_a_warning(
    client: SidecarClient, sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch() -> None:
        raise SidecarError("No such file.")

    monkeypatch.setattr(sidecar, "launch", launch)
    client.start(JOB)
    client.post(observation(1))
    assert client.take_warnings() == ("No such file. Training goes on without re-plans.",)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_leaves_the_client_alone(
    client: SidecarClient, sidecar: FakeSidecar
) -> None:
    """Forked while the lock is held, as can happen to a data-loader worker."""
    client.start(JOB)
    with client._changed:
        child = os.fork()
        if child == 0:
            silent = False
            try:
                client.post(observation(1))
                client.reject("sha256:0", "no")
                client.close()
                silent = client.take_reply() is None and client.take_warnings() == ()
            finally:
                os._exit(0 if silent else 1)
    assert wait_for(lambda: [end for end in [os.waitpid(child, os.WNOHANG)] if end[0]]) == [
        (child, 0)
    ]
    assert sidecar.stops == 0


def test_no_sidecar_is_wanted() -> None:
    assert start_sidecar(MalleusConfig(sidecar="none"), JOB) is None


@pytest.mark.parametrize(
    "setting",
    ["", "yes", "https://127.0.0.1:80", "http://127.0.0.1", "http://:80", "http://h:port", "h:80",
     "http://h:80/path", "http://[::1"],
)  # fmt: skip
def test_a_setting_that_is_no_sidecar_is_refused(setting: str) -> None:
    with pytest.raises(BadInputError, match="Sidecar"):
        start_sidecar(MalleusConfig(sidecar=setting), JOB)


@pytest.mark.parametrize("url", ["http://127.0.0.1:80", "http://head-node:8123/", "http://[::1]:9"])
def test_a_url_is_taken_as_it_is(url: str) -> None:
    assert HttpTransport(url).url == url.rstrip("/")


def test_events_go_with_the_samples_and_again_after_a_failure(sidecar: FakeSidecar) -> None:
    sent: list[list[int]] = []

    def serve(path: str, body: bytes) -> bytes:
        if path == "/v1/samples":
            events = protocol.events_from_json(protocol.decode(body, "request"))
            sent.append([event["iteration"] for event in events or []])
            if len(sent) == 1:
                raise SidecarError("gone")
        return sidecar.serve(path, body)

    sidecar.answer = serve
    conversation = talk(sidecar)
    conversation.exchange(events=[{"event": "level", "iteration": 0}])
    for k in range(1, 4):
        event = {"event": "warning", "iteration": k, "message": "m"}
        conversation.exchange(observation(k), events=[event])
    assert sent == [[0, 1], [0, 1, 2], [3]]


def test_a_client_passes_events_on_but_rates(client: SidecarClient, sidecar: FakeSidecar) -> None:
    client.start(JOB)
    for kind in ("level", "rates", "iteration"):
        client.tell({"event": kind, "iteration": 1, "rates": {}})
    client.post(observation(1))
    assert wait_for(client.take_reply) is not None
    told = sidecar.service._monitor.history
    assert [event.kind for event in told.events] == ["level"]
    assert told.num_iterations == 1


def test_where_the_page_is_is_news_once_for_each_place(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    assert conversation.exchange().news == ()
    sidecar.page = "http://127.0.0.1:1/"
    assert conversation.exchange(observation(1)).news == ("status page: http://127.0.0.1:1/",)
    assert conversation.exchange(observation(2)).news == ()
    sidecar.page = "http://127.0.0.1:2/"
    assert conversation.exchange(observation(3)).news == ("status page: http://127.0.0.1:2/",)
