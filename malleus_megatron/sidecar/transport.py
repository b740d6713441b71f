"""One HTTP exchange with the sidecar, bounded in time and size."""

import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

from malleus_megatron.errors import BadInputError, SidecarError
from malleus_megatron.sidecar.protocol import MAX_MESSAGE_BYTES

type Transport = Callable[[str, bytes], bytes]
"""POST a body to a path and return the answer's body; raises SidecarError."""

_CHUNK_BYTES = 65536

REPLY_TIMEOUT_S = 60.0
"""A plan for a thousand GPUs with many unlike stragglers takes some of it; training never waits."""


class HttpTransport:
    """POSTs JSON over a connection of its own each time.

    The standard library's client: it follows no redirect, heeds no proxy variable and keeps no
    connection that a forked process could inherit.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        max_reply_bytes: int = MAX_MESSAGE_BYTES,
        token: str | None = None,
    ) -> None:
        """Check the URL; nothing is sent yet.

        Args:
            url: http://HOST:PORT.
            timeout_s: Of an exchange.
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
            SidecarError: no answer in time, none at all, too long a one, or a refusal.
        """
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            answer = self._read(response)
        except TimeoutError as error:
            raise self._late() from error
        except (OSError, HTTPException, ValueError) as error:
            raise SidecarError(f"{self.url} cannot be used: {_reason(error)}.") from error
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            text = answer[:200].decode(errors="replace")
            raise SidecarError(f"{self.url}{path} answered {response.status}: {text!r}.")
        return answer

    def _read(self, response: HTTPResponse) -> bytes:
        answer = bytearray()
        deadline = time.monotonic() + self._timeout_s
        while chunk := response.read1(_CHUNK_BYTES):
            answer += chunk
            if len(answer) > self._max_reply_bytes:
                raise SidecarError(f"{self.url} answered more than {self._max_reply_bytes} bytes.")
            if time.monotonic() > deadline:
                raise self._late()
        return bytes(answer)

    def _late(self) -> SidecarError:
        return SidecarError(f"{self.url} did not answer within {self._timeout_s:g} s.")


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
