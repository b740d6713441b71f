"""Between the job and its sidecar: passes requests on, and spoils the answers when told to."""

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from malleus_megatron.sidecar.protocol import MAX_MESSAGE_BYTES
from tests.chaos.script import ANSWER_FAULTS, Fault

SAMPLES = "/v1/samples"
DRIP_S = 0.5

numbers = itertools.count()


class Proxy:
    """Listens on a port of its own; `port_behind` says where the sidecar is now, if anywhere."""

    def __init__(self, port_behind: Callable[[], int | None]) -> None:
        self._port_behind = port_behind
        self._due: deque[Fault] = deque()
        self._left = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def spoil(self, fault: Fault) -> None:
        """Let a fault show in the next answers."""
        with self._lock:
            self._due.append(fault)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str) -> Fault | None:
        """The fault that this answer shows; offers are answers to samples."""
        with self._lock:
            if not self._due or ("offer" in self._due[0].values and path != SAMPLES):
                return None
            fault = self._due[0]
            self._left = (self._left or int(fault.values.get("answers", 1))) - 1
            if not self._left:
                self._due.popleft()
            return fault

    def pass_on(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        """The sidecar's answer; None if there is none."""
        port = self._port_behind()
        if port is None:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        proxy = self.server.proxy
        answer = proxy.pass_on(self.path, body)
        fault = proxy.take(self.path) if answer is not None and answer[0] == 200 else None
        with contextlib.suppress(OSError):  # the client has given up
            if answer is None or (fault is not None and fault.kind == "no answer"):
                self.close_connection = True
            elif fault is None:
                self._send(*answer)
            elif fault.kind == "slow headers":
                self._drip(b"HTTP/1.0 200 OK\r\n" + b"X-Slow: 1\r\n" * 1000, fault)
            elif fault.kind == "slow body":
                self._head(200, len(answer[1]))
                self._drip(answer[1], fault)
            else:
                self._send(*spoilt(fault, answer[1]))

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, body: bytes) -> None:
        self._head(status, len(body))
        self.wfile.write(body)

    def _drip(self, text: bytes, fault: Fault) -> None:
        """A byte now and then, then all the rest."""
        end = time.monotonic() + fault.values["seconds"]
        for index in range(len(text)):
            if time.monotonic() > end:
                self.wfile.write(text[index:])
                return
            self.wfile.write(text[index : index + 1])
            time.sleep(DRIP_S)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def spoilt(fault: Fault, body: bytes) -> tuple[int, bytes]:
    """Status and body in the place of a good answer."""
    if "offer" in fault.values:
        return 200, json.dumps(json.loads(body) | {"offer": fault.values["offer"]}).encode()
    if fault.kind == "errors that differ":
        return 503, f"request {next(numbers)} failed at {time.time()}".encode()
    assert fault.kind in ANSWER_FAULTS
    return {
        "status 500": (500, b"it broke"),
        "truncated": (200, body[: len(body) // 2]),
        "no JSON": (200, b"<html>busy</html>"),
        "NaN": (200, b'{"schema_version": 1, "iteration": NaN}'),
        "wrong version": (200, b'{"schema_version": 9}'),
        "wrong types": (200, b'{"schema_version": 1, "iteration": "x", "rates": 3}'),
        "huge": (200, b"0" * (MAX_MESSAGE_BYTES + 2)),
    }[fault.kind]
