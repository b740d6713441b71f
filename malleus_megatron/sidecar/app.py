"""The service over HTTP: routes, limits, and one sentence for every error."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from malleus_megatron.errors import BadInputError, NoJobError
from malleus_megatron.pages.page import content_policy
from malleus_megatron.sidecar.gate import TokenGate
from malleus_megatron.sidecar.protocol import MAX_MESSAGE_BYTES, decode, encode
from malleus_megatron.sidecar.service import Service

type _Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    service: Service,
    shut_down: Callable[[], None],
    allowed_hosts: list[str],
    token: str | None = None,
) -> Starlette:
    """Make the ASGI application.

    Requests are handled one after the other on the event loop: a decision takes milliseconds,
    and the service needs no lock.

    Args:
        service: Who answers.
        shut_down: Called for POST /v1/shutdown.
        allowed_hosts: Values of the Host header that are let in; a web page that points its own
            name at this address is not.
        token: What everybody must show who asks anything; None: nobody is asked for one.
    """

    def stop(_body: dict[str, Any]) -> dict[str, Any]:
        shut_down()
        return {}

    return Starlette(
        routes=[
            Route("/", _page(service.page), methods=["GET"]),
            Route("/metrics", _metrics(service.metrics), methods=["GET"]),
            Route("/v1/health", _reading(service.health), methods=["GET"]),
            Route("/v1/status", _reading(service.status), methods=["GET"]),
            Route("/v1/settings", _reading(service.settings), methods=["GET"]),
            Route("/v1/settings", _writing(service.change_settings), methods=["PUT"]),
            Route("/v1/job", _writing(service.job), methods=["POST"]),
            Route("/v1/samples", _writing(service.samples), methods=["POST"]),
            Route("/v1/rejected", _writing(service.rejected), methods=["POST"]),
            Route("/v1/probe", _writing(service.probe), methods=["POST"]),
            Route("/v1/shutdown", _writing(stop), methods=["POST"]),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts),
            *([] if token is None else [Middleware(TokenGate, token=token)]),
        ],
        exception_handlers={
            BadInputError: _says(HTTPStatus.BAD_REQUEST),
            NoJobError: _says(HTTPStatus.CONFLICT),
            HTTPException: _http_error,
            Exception: _says(HTTPStatus.INTERNAL_SERVER_ERROR),
        },
    )


def _reading(answer: Callable[[], dict[str, Any]]) -> _Endpoint:
    async def endpoint(_request: Request) -> Response:
        return _json(answer())

    return endpoint


def _writing(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        return _json(answer(decode(await _limited_body(request), "The request")))

    return endpoint


def _page(draw: Callable[[], str]) -> _Endpoint:
    headers = {
        "Content-Security-Policy": f"{content_policy(is_live=True)}; frame-ancestors 'none'",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def endpoint(_request: Request) -> Response:
        return Response(draw(), headers=headers, media_type="text/html")

    return endpoint


def _metrics(text: Callable[[], str]) -> _Endpoint:
    async def endpoint(_request: Request) -> Response:
        return Response(text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return endpoint


async def _limited_body(request: Request) -> bytes:
    """The whole body; JSON by its type, which no foreign web page can send unasked."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Send content-type application/json."
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_MESSAGE_BYTES:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"More than {MAX_MESSAGE_BYTES} bytes."
            )
    return bytes(body)


def _json(document: dict[str, Any], status: int = HTTPStatus.OK) -> Response:
    return Response(encode(document), status_code=status, media_type="application/json")


def _says(status: HTTPStatus) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handler(_request: Request, error: Exception) -> Response:
        return _json({"error": str(error)}, status)

    return handler


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)
