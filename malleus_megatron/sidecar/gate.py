"""The token at the door: nothing is answered without it."""

import base64
import binascii
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from malleus_megatron.sidecar.protocol import encode

_ASK = 'Basic realm="malleus", charset="UTF-8"'
"""Makes a browser ask: any user name, the token as password."""


class TokenGate:
    """Lets through `Authorization: Bearer TOKEN`, and Basic with the token as password."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """Guard an application."""
        self._app = app
        self._expected = _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 to whoever does not have it."""
        if scope["type"] == "http" and not self._knows(Headers(scope=scope).get("authorization")):
            body = encode({"error": "Not without the token: Authorization: Bearer TOKEN."})
            headers = {"WWW-Authenticate": _ASK}
            refusal = Response(body, 401, headers, media_type="application/json")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, header: str | None) -> bool:
        """Takes as long for a wrong token as for the right one."""
        return hmac.compare_digest(_digest(_given(header or "")), self._expected)


def _given(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode(errors="replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _digest(token: bytes) -> bytes:
    """Of one length, whatever the token's is."""
    return hashlib.sha256(token).digest()
