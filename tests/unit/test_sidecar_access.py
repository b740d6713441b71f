"""Who may talk to a sidecar: addresses, tokens, and a real process that asks for one."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from malleus_megatron.config import MalleusConfig
from malleus_megatron.errors import BadInputError, SidecarError
from malleus_megatron.pages.page import content_policy
from malleus_megatron.sidecar.access import Listen, listen_from_text, read_token
from malleus_megatron.sidecar.client import make_sidecar, start_sidecar
from malleus_megatron.sidecar.process import OwnSidecar
from malleus_megatron.sidecar.transport import HttpTransport
from tests.harness.exposition import read_exposition
from tests.unit.sidecar_cases import JOB, observation, wait_for
from tests.unit.test_pages import Reader

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("head-node:8321", "head-node", 8321),
     ("[::1]:80", "::1", 80), ("0.0.0.0:65535", "0.0.0.0", 65535)],
)  # fmt: skip
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    assert listen_from_text(text) == Listen(host=host, port=port)


@pytest.mark.parametrize(
    "text", ["", "8321", ":8321", "host:", "host:http", "::1:80", "h:65536", "h:-1", "[h]:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="is not HOST:PORT"):
        listen_from_text(text)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.5", False), ("head-node", False)],
)  # fmt: skip
def test_other_machines_need_a_token(host: str, is_loopback: bool) -> None:
    listen = Listen(host=host)
    assert listen.is_loopback == is_loopback
    listen.check(TOKEN, "--token-file FILE")
    if is_loopback:
        listen.check(None, "--token-file FILE")
    else:
        with pytest.raises(BadInputError, match=rf"on {host} .*--token-file FILE is needed"):
            listen.check(None, "--token-file FILE")


@pytest.mark.parametrize(
    "text",
    ["", "short", "two words that are long", "name:and-a-password-in-it", "ü" * 20, "a\nb" * 9],
)
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match="at least 16") as error:
        read_token(path)
    assert not text or text not in str(error.value)
    with pytest.raises(BadInputError, match="nowhere"):
        read_token(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MalleusConfig(listen="0.0.0.0:80"), "--malleus-token-file FILE is needed"),
        (MalleusConfig(listen="80"), "is not HOST:PORT"),
        (
            MalleusConfig(listen="127.0.0.1:0", sidecar="none"),
            "--malleus-sidecar none there is none",
        ),
        (MalleusConfig(listen="127.0.0.1:0", sidecar="http://h:1"), "there is none"),
        (MalleusConfig(token_file=Path("t"), sidecar="none"), "but --malleus-sidecar none"),
        (MalleusConfig(token_file=Path("no/where")), "The token in no/where"),
    ],
)
def test_settings_without_sense_are_refused(config: MalleusConfig, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make_sidecar(config)


def test_a_process_that_others_could_reach_does_not_start_without_a_token() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "malleus_megatron.sidecar", "--host", "0.0.0.0"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "lets other machines look at the job and steer it" in done.stderr


class Guarded:
    """A sidecar with a token, on all addresses."""

    def __init__(self, token_file: Path) -> None:
        listen = Listen(host="0.0.0.0")
        self.sidecar = OwnSidecar(listen=listen, token_file=token_file)
        self.sidecar.launch()
        self.transport = self.sidecar.connect()
        assert isinstance(self.transport, HttpTransport)
        self.url = self.transport.url

    def get(
        self, path: str, authorization: str | None = None, method: str = "GET"
    ) -> tuple[int, str, dict[str, str]]:
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=20)
        headers = {} if authorization is None else {"Authorization": authorization}
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text, {k.lower(): v for k, v in response.getheaders()}


@pytest.fixture(scope="module")
def guarded(token_file: Path) -> Iterator[Guarded]:
    running = Guarded(token_file)
    yield running
    running.sidecar.stop()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/status", "/v1/health", "/nowhere"])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Token {TOKEN}", "Basic", "Basic ?",
     basic("user", "wrong"), basic(TOKEN, ""), f"Bearer {'x' * 9000}"],
)  # fmt: skip
def test_nothing_is_told_without_the_token(
    guarded: Guarded, path: str, authorization: str | None
) -> None:
    status, text, headers = guarded.get(path, authorization)
    assert status == 401
    assert "malleus_" not in text
    assert json.loads(text)["error"].startswith("Not without the token")
    assert headers["www-authenticate"].startswith("Basic realm=")


def test_nothing_is_changed_without_the_token(guarded: Guarded) -> None:
    assert guarded.get("/v1/shutdown", method="POST")[0] == 401
    assert guarded.get("/v1/health", f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize(
    "authorization", [f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic("", TOKEN), basic("me", TOKEN)]
)
def test_the_token_opens_everything(guarded: Guarded, authorization: str) -> None:
    status, text, headers = guarded.get("/", authorization)
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["content-security-policy"].startswith(content_policy(is_live=True))
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert Reader(text).found[0][0] == "html"
    status, text, headers = guarded.get("/metrics", authorization)
    assert headers["content-type"] == CONTENT_TYPE_LATEST
    assert "malleus_build_info" in read_exposition(text)


def test_a_job_shows_the_token_by_itself(guarded: Guarded, token_file: Path) -> None:
    client = start_sidecar(MalleusConfig(sidecar=guarded.url, token_file=token_file), JOB)
    assert client is not None
    client.tell({"event": "iteration", "iteration": 1, "step_time_s": 0.625, "loss": 3.5})
    client.post(observation(1))
    assert wait_for(client.take_reply, within_s=60) is not None
    assert client.take_warnings() == ()
    assert client.take_news() == (f"status page: {guarded.url}/",)
    client.close()
    metrics = read_exposition(guarded.get("/metrics", f"Bearer {TOKEN}")[1])
    assert metrics["malleus_step_time_seconds"] == {(): 0.625}
    assert metrics["malleus_iteration"] == {(): 1}
    assert "0.6250 s" in Reader(guarded.get("/", f"Bearer {TOKEN}")[1]).text


def test_a_wrong_token_is_one_sentence_without_it(guarded: Guarded) -> None:
    with pytest.raises(SidecarError, match="answered 401.*Not without the token") as error:
        HttpTransport(guarded.url, token="another-long-token")("/v1/job", b"{}")
    assert "another" not in str(error.value)
