"""One HTTP exchange with the sidecar, bounded in time and size."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

from malleus_megatron.errors import BadInputError, NoJobError, SidecarError
from malleus_megatron.sidecar.protocol import MAX_MESSAGE_BYTES

type Transport = Callable[[str, bytes], bytes]
"""POST a body to a path and return the answer's body; raises SidecarError."""

_CHUNK_BYTES = 65536

PLANNING_TIMEOUT_S = 60.0
"""A plan for a thousand GPUs with many unlike stragglers takes some of it; training never waits."""
REPLY_TIMEOUT_S = 20.0
"""Of what takes no planning, on a busy host."""
PLANNING_PATH = "/v1/samples"

_REMEDIES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: " Its token is to be in the job's --malleus-token-file."
}


class HttpTransport:
    """POSTs JSON over a connection of its own each time.

    The standard library's client: it follows no redirect, heeds no proxy variable and keeps no
    connection that a forked process could inherit.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = PLANNING_TIMEOUT_S,
        max_reply_bytes: int = MAX_MESSAGE_BYTES,
        token: str | None = None,
    ) -> None:
        """Check the URL; nothing is sent yet.

        Args:
            url: http://HOST:PORT of the sidecar.
            timeout_s: Of an answer that may take planning; others have less.
            max_reply_bytes: A longer answer is an error.
            token: Shown with every request, if there is one.

        Raises:
            BadInputError: the URL is not http://HOST:PORT.
        """
        self.url = url.rstrip("/")
        self._host, self._port = _split(url)
        self._timeout_s = timeout_s
        self._max_reply_bytes = max_reply_bytes
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def __call__(self, path: str, body: bytes) -> bytes:
        """Exchange one document.

        Raises:
            NoJobError: it knows no job, as one that was started a moment ago does.
            SidecarError: no answer in time, none at all, too long a one, or a refusal.
        """
        timeout_s = self._timeout_s
        if path != PLANNING_PATH:
            timeout_s = min(timeout_s, REPLY_TIMEOUT_S)
        deadline = time.monotonic() + timeout_s
        connection = HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            with _cut_off_at(deadline, connection):
                connection.request("POST", path, body, self._headers)
                response = connection.getresponse()
            answer = self._read(response, timeout_s, deadline)
        except TimeoutError as error:
            raise self._late(timeout_s) from error
        except (OSError, HTTPException, ValueError) as error:
            if time.monotonic() > deadline:
                raise self._late(timeout_s) from error
            raise SidecarError(f"{self.url} cannot be used: {_reason(error)}.") from error
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            text = answer[:200].decode(errors="replace")
            kind = NoJobError if response.status == HTTPStatus.CONFLICT else SidecarError
            raise kind(
                f"{self.url}{path} answered {response.status}: {text!r}."
                f"{_REMEDIES.get(response.status, '')}"
            )
        return answer

    def _read(self, response: HTTPResponse, timeout_s: float, deadline: float) -> bytes:
        answer = bytearray()
        while time.monotonic() < deadline:
            chunk = response.read1(_CHUNK_BYTES)
            if not chunk:
                return bytes(answer)
            answer += chunk
            if len(answer) > self._max_reply_bytes:
                raise SidecarError(f"{self.url} answered more than {self._max_reply_bytes} bytes.")
        raise self._late(timeout_s)

    def _late(self, timeout_s: float) -> SidecarError:
        return SidecarError(f"{self.url} did not answer within {timeout_s:g} s.")


@contextmanager
def _cut_off_at(deadline: float, connection: HTTPConnection) -> Iterator[None]:
    """End the connection at the deadline.

    A socket's time limit is one of each byte: a head that drips would hold its reader for hours.
    """

    def cut_off() -> None:
        with suppress(OSError):  # the other end was faster
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(deadline - time.monotonic(), cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _split(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadInputError(f"Sidecar {url!r}: {error}.") from error
    if parts.scheme != "http" or not host or port is None or parts.path.strip("/"):
        raise BadInputError(f"Sidecar {url!r}: must be auto, none or http://HOST:PORT.")
    return host, port


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
