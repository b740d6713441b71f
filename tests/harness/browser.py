"""A headless browser and a small server for pages: what a reader sees after scripts have run."""

import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_GET_ONE = (
    f"no browser on PATH ({', '.join(NAMES)}); on Debian: apt-get install --yes chromium"
)
_LIMIT_S = 100
_FRAME = """<!doctype html><meta charset="utf-8"><title>frame</title>
<iframe id="frame" src="{path}" width="{width}" height="{height}"></iframe><pre id="result"></pre>
<script>
const frame = document.getElementById("frame");
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
frame.addEventListener("load", async () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  let result;
  try {{ result = await (async () => {{ {script} }})(); }}
  catch (error) {{ result = String(error); }}
  document.getElementById("result").textContent = JSON.stringify(result);
}});
</script>"""

type Page = Callable[[], str]


def browser() -> str:
    """The browser's program; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(HOW_TO_GET_ONE)
    return found


def rendered(url: str, *, budget_ms: int = 10_000) -> str:
    """The document after its scripts have run for so many milliseconds of their own time."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-dev-shm-usage",
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={budget_ms}",
                "--dump-dom",
                url,
            ],
            capture_output=True,
            check=True,
            text=True,
            timeout=_LIMIT_S,
        )
    return done.stdout


@contextmanager
def served(pages: Mapping[str, Page]) -> Iterator[tuple[str, list[str]]]:
    """Serve pages by path on this machine; yields the URL and the paths that are asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            page = pages.get(self.path)
            body = b"" if page is None else page().encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def asked_of(
    page: Page, script: str, *, width: int = 1000, height: int = 900, path: str = "/report/"
) -> tuple[Any, list[str]]:
    """Show a page in a frame of that width and run a script beside it.

    Args:
        page: Makes the page, each time it is asked for.
        script: The body of an asynchronous function; `page` is the document, `view` its window,
            `wait(ms)` lets the page's own scripts go on. What it returns comes back.
        width: Of the frame, pixels.
        height: Of the frame, pixels.
        path: Where the page lies.

    Returns:
        The script's answer, and the paths that the page asked for.
    """
    frame = _FRAME.format(path=path, width=width, height=height, script=script)
    with served({"/": lambda: frame, path: page}) as (url, asked):
        text = rendered(f"{url}/")
    found = re.search(r'<pre id="result">(.*?)</pre>', text, re.DOTALL)
    assert found is not None, text[:500]
    assert found[1], "the script did not end"
    return json.loads(unescape(found[1])), [path for path in asked if path != "/"]
