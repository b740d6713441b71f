"""Where the sidecar is: a process of our own beside rank 0, or one that somebody else runs."""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import IO, Protocol

import malleus_megatron
from malleus_megatron.errors import BadInputError, SidecarError
from malleus_megatron.plan.fields import as_int, required
from malleus_megatron.sidecar.access import LOOPBACK, Listen, read_token
from malleus_megatron.sidecar.protocol import decode
from malleus_megatron.sidecar.transport import PLANNING_TIMEOUT_S, HttpTransport, Transport

_log = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 2.0
_END_WAIT_S = 0.5
_MAX_LINE_BYTES = 4096


class Sidecar(Protocol):
    """A sidecar that a client can reach. Every method is bounded in time."""

    def launch(self) -> None:
        """Begin; returns at once. Raises SidecarError."""

    def connect(self) -> Transport:
        """Wait until it can be asked. Raises SidecarError."""

    @property
    def page(self) -> str | None:
        """Where its status page is, once connected."""

    def end(self) -> str | None:
        """How it ended, if it never can answer again."""

    def stop(self) -> None:
        """End it if it is ours; harmless twice."""


class GivenSidecar:
    """A sidecar at a URL; who started it stops it."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Refuse a URL that is not http://HOST:PORT."""
        self._transport = HttpTransport(url, token=token)

    @property
    def page(self) -> str:
        """At the same URL."""
        return f"{self._transport.url}/"

    def launch(self) -> None:
        """It runs already."""

    def connect(self) -> Transport:
        """It can be asked as it is."""
        return self._transport

    def end(self) -> str | None:
        """It may come back any time."""
        return None

    def stop(self) -> None:
        """Not ours."""


class OwnSidecar:
    """A process on this machine that ends with us, even if we are killed."""

    def __init__(
        self,
        *,
        listen: Listen | None = None,
        token_file: Path | None = None,
        ready_timeout_s: float = 60.0,
        reply_timeout_s: float = PLANNING_TIMEOUT_S,
    ) -> None:
        """Nothing starts before `launch`.

        Args:
            listen: Where; None: where only this machine reaches it.
            token_file: What others must show; read by both ends.
            ready_timeout_s: From the start to the line that says the port.
            reply_timeout_s: Of an exchange.

        Raises:
            BadInputError: there is no token in the file.
        """
        self._listen = listen or Listen()
        self._token_file = token_file
        self._token = None if token_file is None else read_token(token_file)
        self.page: str | None = None
        self._ready_timeout_s = ready_timeout_s
        self._reply_timeout_s = reply_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Its process id, once launched."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start the process, in a session of its own: Ctrl-C is for the job to handle."""
        module = "malleus_megatron.sidecar"
        if self._stopped:
            raise SidecarError("The sidecar was stopped.")
        words = ["--host", self._listen.host, "--port", str(self._listen.port)]
        words += [] if self._token_file is None else ["--token-file", str(self._token_file)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--parent", str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=_environment(),
            )
        except OSError as error:
            raise SidecarError(
                f"{sys.executable} -m {module} cannot be started: {error}."
            ) from error

    def connect(self) -> HttpTransport:
        """Wait for the line that says where it listens; a process that says none is ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            with self._process.stdout as pipe:
                line = _read_line(pipe, self._ready_timeout_s)
            port = as_int(required(decode(line, "its first line"), "port", "it"), "port")
        except BadInputError as error:
            self._kill()
            raise SidecarError(f"The sidecar's process said no port: {error}") from error
        host, is_everywhere = self._listen.host, self._listen.is_everywhere
        own = ("::1" if ":" in host else LOOPBACK) if is_everywhere else host
        self.page = f"http://{_in_url(socket.gethostname() if is_everywhere else host)}:{port}/"
        return HttpTransport(
            f"http://{_in_url(own)}:{port}", timeout_s=self._reply_timeout_s, token=self._token
        )

    def end(self) -> str | None:
        """Its exit status or signal, if it has ended or is about to."""
        if self._process is None:
            return None
        try:
            # Its connections end a moment before it does.
            status = self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            return None
        return f"exit status {status}" if status >= 0 else f"{signal.Signals(-status).name}"

    def stop(self) -> None:
        """Kill it for good: it has nothing to save, and it may be suspended."""
        self._stopped = True
        self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("Sidecar process %d does not end.", self._process.pid)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _environment() -> dict[str, str]:
    """Ours, with this package importable from wherever the job runs."""
    root = str(Path(malleus_megatron.__file__).parent.parent)
    if root == sysconfig.get_path("purelib"):
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if known is None else f"{root}{os.pathsep}{known}"}


def _read_line(pipe: IO[bytes], timeout_s: float) -> bytes:
    """Read up to a line's end, the pipe's end, or the time limit, whichever is first."""
    deadline = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise BadInputError(f"nothing within {timeout_s:g} s.")
            chunk = os.read(pipe.fileno(), _MAX_LINE_BYTES)
            if not chunk:
                raise BadInputError("it ended.")
            line += chunk
    return line
