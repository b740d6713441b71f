"""The HTTP client against a server that does everything wrong."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from malleus_megatron.config import MalleusConfig
from malleus_megatron.errors import NoJobError, SidecarError
from malleus_megatron.sidecar import transport
from malleus_megatron.sidecar.client import start_sidecar
from malleus_megatron.sidecar.transport import HttpTransport
from tests.unit.sidecar_cases import JOB, observation, wait_for

type Behaviour = Callable[[socket.socket], None]


@contextmanager
def server(behave: Behaviour) -> Iterator[str]:
    """Takes every connection, reads the request, and misbehaves."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    read_request(connection)
                    behave(connection)
                except OSError:
                    continue

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def read_request(connection: socket.socket) -> None:
    """All of it: closing with some unread would reset the connection under the answer."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    match = re.search(rb"content-length: (\d+)", head.lower())
    length = int(match[1]) if match else 0
    while len(body) < length:
        body += connection.recv(65536)


def says(text: bytes) -> Behaviour:
    return lambda connection: connection.sendall(text)


def page(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(50):
        connection.sendall(b" ")
        time.sleep(0.05)


def drip_the_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for byte in b"X: 1\r\n" * 10:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (says(b"\x00\x01garbage\r\n\r\n"), "cannot be used"),
        (says(b""), "cannot be used: Remote end closed"),
        (says(b"HTTP/1.1 two hundred\r\n\r\n"), "cannot be used"),
        (says(b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 1000 + b"\r\n"), "cannot be used"),
        (
            says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
            "cannot be used",
        ),
        (says(page(b"busy", "503 Busy")), "/v1/job answered 503: 'busy'"),
        (says(page(b"", "302 Found")), "answered 302"),
        (says(page(b"who?", "401 No")), r"401: 'who\?'\. Its token .* --malleus-token-file\."),
        (endless, "answered more than 100000 bytes"),
        (says(page(b"x" * 100_001)), "answered more than 100000 bytes"),
        (drip, "did not answer within 0.3 s"),
        (drip_the_head, "did not answer within 0.3 s"),
        (lambda connection: time.sleep(1.0), "did not answer within 0.3 s"),
    ],
)
def test_each_fault_is_one_sentence(behave: Behaviour, message: str) -> None:
    with server(behave) as url:
        ask = HttpTransport(url, timeout_s=0.3, max_reply_bytes=100_000)
        start = time.monotonic()
        with pytest.raises(SidecarError, match=message):
            ask("/v1/job", b"{}")
        assert time.monotonic() - start < 2


def test_a_sidecar_without_the_job_can_be_told_from_one_that_fails() -> None:
    with (
        server(says(page(b"Describe it first", "409 Conflict"))) as url,
        pytest.raises(NoJobError, match="answered 409: 'Describe it first'"),
    ):
        HttpTransport(url)("/v1/samples", b"{}")


def test_an_answer_that_was_cut_off_is_handed_on_as_it_is() -> None:
    """Half a document is no document, so reading it says what is wrong."""
    with server(says(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"half": ')) as url:
        assert HttpTransport(url)("/v1/job", b"{}") == b'{"half": '


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(SidecarError, match=r"cannot be used.*refused"):
        HttpTransport(url)("/v1/job", b"{}")


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(says(page(b"direct"))) as url:
        assert HttpTransport(url)("/v1/job", b"{}") == b"direct"


@pytest.mark.parametrize(
    "body",
    [
        b"<html>404</html>",
        b'{"schema_version": 1, "iteration": 1, "rates": {"0": NaN}}',
        b'{"schema_version": 1, "iteration": 1, "rates": {}, "stragglers": [], "ignored": [], '
        b'"offer": {"schema_version": 1}}',
    ],
)
def test_the_training_loop_hears_one_sentence_of_nonsense(body: bytes) -> None:
    with server(says(page(body))) as url:
        client = start_sidecar(MalleusConfig(sidecar=url), JOB)
        assert client is not None
        client.post(observation(1))
        (warning,) = wait_for(client.take_warnings)
        assert "Training goes on under the current plan; it is asked again." in warning
        assert client.take_reply() is None
        client.close()


def test_only_what_may_plan_has_long_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REPLY_TIMEOUT_S", 0.1)
    with server(lambda connection: time.sleep(2.0)) as url:
        ask = HttpTransport(url, timeout_s=0.4)
        for path, limit in (("/v1/job", "0.1"), ("/v1/rejected", "0.1"), ("/v1/samples", "0.4")):
            with pytest.raises(SidecarError, match=f"did not answer within {limit} s"):
                ask(path, b"{}")
