"""The real process: what it answers, how it ends, and what the training process notices of it."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.config import MalleusConfig
from malleus_megatron.control.policy import Policy
from malleus_megatron.errors import SidecarError
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.client import SidecarClient, start_sidecar
from malleus_megatron.sidecar.process import OwnSidecar
from tests.unit.sidecar_cases import JOB, PLAN, SLOW, observation, wait_for

JSON = {"Content-Type": "application/json"}


class Server:
    """A running sidecar, asked without the client."""

    def __init__(self) -> None:
        self.sidecar = OwnSidecar()
        self.sidecar.launch()
        self.url = self.sidecar.connect().url

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] = JSON
    ) -> tuple[int, dict[str, Any]]:
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer

    def tell(self, method: str, path: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return self.ask(method, path, protocol.encode(document))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.sidecar.stop()
    assert running.sidecar.end() is not None


def describe(server: Server, **settings: Any) -> None:
    document = protocol.job_to_json(JOB, Policy(**settings))
    assert server.tell("POST", "/v1/job", document) == (200, {"schema_version": 1})


def post(server: Server, iteration: int) -> dict[str, Any]:
    document = protocol.observation_to_json(observation(iteration, SLOW))
    status, answer = server.tell("POST", "/v1/samples", document)
    assert status == 200
    return answer


def test_before_the_job_is_known(server: Server) -> None:
    assert server.ask("GET", "/v1/health") == (200, {"schema_version": 1, "status": "ok"})
    assert server.ask("GET", "/v1/status") == (200, {"schema_version": 1, "job": None})
    status, answer = server.tell("POST", "/v1/rejected", {"plan_id": "sha256:0", "why": "no"})
    assert status == 409
    assert "POST /v1/job" in answer["error"]


def test_samples_bring_rates_and_then_an_offer(server: Server) -> None:
    describe(server, window=4)
    answers = [post(server, iteration) for iteration in range(1, 6)]
    assert [answer["offer"] is None for answer in answers] == [True] * 4 + [False]
    assert [p["num_microbatches"] for p in answers[-1]["offer"]["pipelines"]] == [12, 4]
    _, status = server.ask("GET", "/v1/status")
    assert status["decision"]["stragglers"] == list(SLOW)
    assert status["microbatch_counts"] == [8, 8]
    assert status["pending_offer"].startswith("sha256:")


def test_settings_are_read_and_changed_while_it_runs(server: Server) -> None:
    describe(server, window=5)
    _, settings = server.ask("GET", "/v1/settings")
    assert settings == {"schema_version": 1} | protocol.policy_to_json(Policy(window=5))
    assert server.tell("PUT", "/v1/settings", {"window": 2})[1]["window"] == 2
    assert post(server, 1)["rates"] == {}
    assert post(server, 2)["rates"] != {}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/samples", b"<html>", 400, "The request is not JSON"),
        ("POST", "/v1/samples", b'{"schema_version": 3}', 400, "schema_version 3 is not known"),
        ("POST", "/v1/samples", b'{"schema_version": 1}', 400, "'microbatch_counts' is missing"),
        ("PUT", "/v1/settings", b'{"schema_version": 1, "threshold": 0.5}', 400, "threshold 0.5"),
        ("PUT", "/v1/settings", b'{"schema_version": 1, "colour": 1}', 400, "Known: threshold"),
        ("POST", "/v1/job", b" " * (protocol.MAX_MESSAGE_BYTES + 1), 413, "More than 8388608"),
        ("GET", "/v1/samples", None, 405, "Method Not Allowed"),
        ("GET", "/metric", None, 404, "Not Found"),
    ],
)
def test_a_bad_request_gets_one_sentence(
    server: Server, method: str, path: str, body: bytes | None, status: int, message: str
) -> None:
    describe(server)
    got, answer = server.ask(method, path, body)
    assert got == status
    assert message in answer["error"]


def test_a_foreign_web_page_cannot_steer_the_job(server: Server) -> None:
    body = protocol.encode({})
    assert server.ask("POST", "/v1/shutdown", body, {"Content-Type": "text/plain"})[0] == 415
    foreign = HTTPConnection(server.url.removeprefix("http://"), timeout=5)
    foreign.request("POST", "/v1/shutdown", body, JSON | {"Host": "evil.example"})
    assert foreign.getresponse().status == 400
    foreign.close()
    assert server.ask("GET", "/v1/health")[0] == 200


def test_a_client_with_a_url_leaves_the_process_alone(server: Server) -> None:
    client = start_sidecar(MalleusConfig(sidecar=server.url), JOB)
    assert client is not None
    for iteration in range(1, 5):
        client.post(observation(iteration, SLOW))
        decision = wait_for(client.take_reply)
    client.close()
    assert decision is not None
    assert decision.offer is not None
    assert server.ask("GET", "/v1/health")[0] == 200


def test_shutdown_ends_it() -> None:
    server = Server()
    assert server.tell("POST", "/v1/shutdown", {})[0] == 200
    assert wait_for(server.sidecar.end) == "exit status 0"


def start_client(reply_timeout_s: float = 60.0) -> tuple[SidecarClient, OwnSidecar]:
    """A client that has had its first answer."""
    sidecar = OwnSidecar(reply_timeout_s=reply_timeout_s)
    client = SidecarClient(sidecar)
    client.start(JOB)
    client.post(observation(1, SLOW))
    assert wait_for(client.take_reply) is not None
    return client, sidecar


def check_that_nothing_waits(client: SidecarClient) -> None:
    """Of eleven iterations most take a moment, and none takes as long as an answer's limit."""
    times_s = []
    for iteration in range(2, 13):
        sent = observation(iteration, SLOW)
        start = time.perf_counter()
        client.post(sent)
        client.take_reply()
        times_s.append(time.perf_counter() - start)
        time.sleep(0.01)
    assert statistics.median(times_s) < 0.005
    assert max(times_s) < 1


def test_the_whole_way_and_nothing_is_left_over() -> None:
    client, sidecar = start_client()
    assert sidecar.pid is not None
    assert os.getsid(sidecar.pid) != os.getsid(0)
    for iteration in range(2, 5):
        client.post(observation(iteration, SLOW))
        decision = wait_for(client.take_reply)
    assert decision is not None
    assert decision.offer is not None
    assert decision.offer.same_layout(PLAN)
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < 2
    assert sidecar.end() is not None
    assert client.take_warnings() == ()


def test_killed() -> None:
    client, sidecar = start_client()
    assert sidecar.pid is not None
    os.kill(sidecar.pid, signal.SIGKILL)
    check_that_nothing_waits(client)

    def warnings_to_the_end() -> bool:
        client.post(observation(20))
        said.extend(client.take_warnings())
        return any("has ended (SIGKILL)" in warning for warning in said)

    said: list[str] = []
    assert wait_for(warnings_to_the_end)
    assert all("Training goes on under the current plan" in warning for warning in said)
    assert len(said) <= 2
    client.post(observation(21))
    assert client.take_reply() is None
    client.close()


def test_suspended() -> None:
    client, sidecar = start_client(reply_timeout_s=2.0)
    assert sidecar.pid is not None
    os.kill(sidecar.pid, signal.SIGSTOP)
    check_that_nothing_waits(client)
    (warning,) = wait_for(client.take_warnings)
    assert "did not answer within 2 s. Training goes on under the current plan" in warning
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < 2
    assert sidecar.end() == "SIGKILL"


ORPHAN = """
import os, sys, time
from malleus_megatron.sidecar.process import OwnSidecar
sidecar = OwnSidecar()
sidecar.launch()
if os.fork() == 0:  # a data-loader worker that outlives its parent and has its pipes
    os.close(1)
    time.sleep(20)
    os._exit(0)
sidecar.connect()
print(sidecar.pid, flush=True)
time.sleep(20)
"""


def test_it_ends_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        assert wait_for(lambda: not is_running(pid), within_s=3)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()


def is_running(pid: int) -> bool:
    """An orphan that has ended may stay a zombie where nobody reaps."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "said no port: it ended"),
        ("echo hello", "said no port: its first line is not JSON"),
        ("""echo '{"schema_version": 1, "port": "high"}'""", "port: expected a whole number"),
        ("exec sleep 20", "nothing within 0.5 s"),
    ],
)
def test_a_process_that_does_not_say_where_it_listens(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    sidecar = OwnSidecar(ready_timeout_s=0.5)
    sidecar.launch()
    with pytest.raises(SidecarError, match=message):
        sidecar.connect()
    assert sidecar.end() is not None


def test_a_process_that_is_about_to_end_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process's connections are reset a moment before it can be seen to have ended."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec >&-\nsleep 0.1\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    sidecar = OwnSidecar()
    sidecar.launch()
    assert sidecar._process is not None
    assert sidecar._process.stdout is not None
    assert sidecar._process.stdout.read() == b""
    assert sidecar.end() == "SIGKILL"


def test_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SidecarError, match=r"/nowhere/python.*cannot be started"):
        OwnSidecar().launch()


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "malleus_megatron.sidecar", "--port", port],
            capture_output=True,
            check=False,
            text=True,
            timeout=20,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("malleus_megatron.sidecar.__main__", ("torch", "megatron", "numpy", "ortools")),
        ("malleus_megatron.sidecar.client", ("torch", "megatron", "starlette", "uvicorn")),
    ],
)
def test_nothing_heavy_is_imported(module: str, absent: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=20)
    assert done.strip() == "[]"
