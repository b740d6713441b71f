"""`python -m malleus_megatron.sidecar`: the sidecar's process.

Its first line on standard output says where it listens: {"port": 43217, "schema_version": 1}.
"""

import argparse
import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import uvicorn

from malleus_megatron.errors import EXIT_BAD_INPUT, BadInputError
from malleus_megatron.sidecar.access import LOOPBACK, Listen, read_token
from malleus_megatron.sidecar.app import create_app
from malleus_megatron.sidecar.protocol import encode
from malleus_megatron.sidecar.service import Service

_OWN_NAMES = ("127.0.0.1", "localhost")
_PARENT_POLL_S = 0.5
_log = logging.getLogger(__name__)


def main() -> int:
    """Serve until told to stop, by request, by signal, or by the parent's death."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="malleus sidecar: %(levelname)s %(message)s")
    listen = Listen(host=arguments.host, port=arguments.port)
    try:
        token = None if arguments.token_file is None else read_token(arguments.token_file)
        listen.check(token, "--token-file FILE")
        listener = _listen(listen)
    except BadInputError as error:
        _log.error("%s", error)
        return EXIT_BAD_INPUT
    except OSError as error:
        _log.error("cannot listen on %s:%d: %s", arguments.host, arguments.port, error)
        return EXIT_BAD_INPUT
    if arguments.parent is not None:
        watch = partial(_end_with_parent, arguments.parent)
        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    server = _server(listen, token)
    _say_where(listener)
    server.run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m malleus_megatron.sidecar", description="The planner's process beside a job."
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help="address to listen on; one that other machines can reach needs --token-file",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="whoever asks anything must show the token in this file: as Authorization: Bearer, "
        "or as the password that a browser asks for",
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--parent", type=int, metavar="PID", help="end when this parent process has ended"
    )
    return parser


def _listen(listen: Listen) -> socket.socket:
    """A socket that takes connections from now on, so the port can be told before serving."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    return socket.create_server((listen.host, listen.port), family=family)


def _server(listen: Listen, token: str | None) -> uvicorn.Server:
    """With a token a foreign page may use any name for us: a browser gives it no token."""
    hosts = [*_OWN_NAMES, listen.host, f"[{listen.host}]"] if listen.is_loopback else ["*"]
    app = create_app(Service(), lambda: setattr(server, "should_exit", True), hosts, token)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    return server


def _say_where(listener: socket.socket) -> None:
    """Tell the port, then let standard output be standard error: nobody reads the pipe further."""
    sys.stdout.write(encode({"port": listener.getsockname()[1]}).decode() + "\n")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _end_with_parent(parent: int) -> None:
    """Leave at once when the parent is gone; there is nothing to save.

    A closed pipe would not tell: data-loader workers inherit the parent's end.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
