"""The pages in a real browser: numbers, widths, nothing from outside, news without a jump."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from malleus_megatron.cli.main import main
from malleus_megatron.control.policy import Policy
from malleus_megatron.pages.history import History
from malleus_megatron.pages.page import Frame, make_page
from malleus_megatron.pages.story import tell
from malleus_megatron.plan.rates import Rates
from malleus_megatron.sidecar import protocol
from tests.harness.browser import asked_of, browser, rendered
from tests.harness.logs import HOSTILE, NOMINAL, SLOW_GPU, SLOWS, job_events, write_log
from tests.unit.sidecar_cases import JOB, SLOW, observation
from tests.unit.test_monitor import told
from tests.unit.test_pages import Reader
from tests.unit.test_sidecar_process import Server

PHONE = 375
ICON = "/favicon.ico"
"""Asked for by the browser for every site, not by the page."""


@pytest.fixture(autouse=True)
def _needs_a_browser() -> None:
    browser()


def report(folder: Path) -> str:
    write_log(folder, job_events())
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def show(text: str, script: str, **where: Any) -> Any:
    """What the script finds; the page has asked for nothing but itself."""
    result, asked = asked_of(lambda: text, script, **where)
    assert [path for path in asked if path != ICON] == ["/report/"]
    return result


TABLE = """
const rows = (name) => [...page.querySelectorAll(`.scroll.${name} tbody tr`)]
  .map((row) => [...row.cells].map((cell) => cell.textContent));
const tiles = Object.fromEntries([...page.querySelectorAll(".tiles div")]
  .map((tile) => [tile.children[0].textContent, tile.children[1].textContent]));
return {head: page.querySelector("h1").textContent, tiles, generations: rows("generations"),
  stragglers: rows("stragglers"), migrations: rows("migrations"), events: rows("events")};
"""


def test_the_numbers_shown_are_those_of_the_events(tmp_path: Path) -> None:
    shown = show(report(tmp_path), TABLE)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "iteration"]
    assert shown["tiles"]["iteration"] == str(steps[-1]["iteration"])
    assert shown["tiles"]["step time"] == f"{steps[-1]['step_time_s']:.3f} s"
    assert float(shown["tiles"]["loss"]) == pytest.approx(steps[-1]["loss"], rel=1e-5)
    for row in shown["generations"]:
        own = [s["step_time_s"] for s in steps if s["generation"] == int(row[0])]
        assert (
            row[1]
            == f"{min(own_iterations(steps, row[0]))} to {max(own_iterations(steps, row[0]))}"
        )
        assert float(row[2].removesuffix(" s")) == pytest.approx(median(own), rel=1e-3)
    [named] = [line for line in lines if line["event"] == "straggler"]
    [row] = shown["stragglers"]
    assert row[:5] == [
        str(named["gpu"]),
        "2.57",
        "2.57",
        str(named["since"]),
        str(named["iteration"]),
    ]
    assert row[6] == named["reason"]
    moved = [line for line in lines if line["event"] == "migration"]
    assert [row[2] for row in shown["migrations"]] == [
        f"{m['bytes'] / 2**20:.3f} MiB" for m in moved
    ]
    others = [line for line in lines if line["event"] not in {"iteration", "rates"}]
    assert [(row[0], row[1]) for row in shown["events"]] == [
        (str(line["iteration"]), line["event"]) for line in reversed(others)
    ]
    assert f"GPU {SLOW_GPU} slowed down to rate 2.57 at iteration {SLOWS}" in shown["head"]


def own_iterations(steps: list[dict[str, Any]], generation: str) -> list[int]:
    return [step["iteration"] for step in steps if step["generation"] == int(generation)]


def test_style_and_script_run_and_nothing_else_does(tmp_path: Path) -> None:
    shown = show(
        report(tmp_path),
        """
        const refused = [];
        page.addEventListener("securitypolicyviolation", (event) => refused.push(event.blockedURI));
        const script = page.createElement("script");
        script.textContent = "window.pwned = 'by a script'";
        page.body.append(script);
        const picture = page.createElement("img");
        picture.src = "/picture.png";
        page.body.append(picture);
        page.body.insertAdjacentHTML("beforeend", "<b onclick='window.pwned = 1' id=b>b</b>");
        page.getElementById("b").click();
        await wait(500);
        return {width: view.getComputedStyle(page.querySelector("main")).maxWidth,
          searched: !page.getElementById("find").parentElement.hidden, pwned: view.pwned ?? null,
          refused, text: page.body.innerText};
        """,
    )
    assert shown["width"] == "1040px"
    assert shown["searched"]
    assert shown["pwned"] is None
    assert len(shown["refused"]) == 3
    assert HOSTILE in shown["text"]


def large() -> str:
    """1024 GPUs, 5000 iterations."""
    run = History()
    run.add({"event": "level", "iteration": 0, "level": "reshape", "reason": "r" * 300})
    for iteration in range(1, 5001):
        run.add(told(iteration))
        if iteration % 250 == 0:
            rates = dict.fromkeys(range(1024), 1.0) | dict.fromkeys(range(0, 1024, 50), 3.0)
            run.add_rates(iteration, Rates.of(rates))
            run.add({"event": "warning", "iteration": iteration, "message": "long" * 100})
            layout = " | ".join(f"{gpu}-{gpu + 7}:10" for gpu in range(0, 1024, 8))
            run.add({"event": "plan", "iteration": iteration, "generation": 0, "layout": layout})
    return make_page(tell(run, {0: NOMINAL}), Frame(title="t", source="s" * 200))


WIDTHS = """
for (const details of page.querySelectorAll("details")) details.open = true;
await wait(200);
return {scroll: page.documentElement.scrollWidth, client: page.documentElement.clientWidth};
"""


@pytest.mark.parametrize("width", [320, PHONE, 1000])
def test_a_page_is_no_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    for text in (report(tmp_path), large()):
        shown = show(text, WIDTHS, width=width)
        assert shown["client"] <= width
        assert shown["scroll"] <= shown["client"]


def test_a_large_job_is_drawn_in_few_elements() -> None:
    text = large()
    assert len(text) < 600_000
    shown = show(
        text,
        """
        const rows = [...page.querySelectorAll(".rates > text")].map((text) => text.textContent);
        const heights = [...page.querySelectorAll("svg.rates")].map((map) => map.clientHeight);
        return {rows: rows.filter((row) => row.startsWith("GPU")).length, heights};
        """,
    )
    assert shown["rows"] == 16 + 32
    assert sum(shown["heights"]) < 900


def test_events_are_hidden_by_their_boxes_and_found_by_words(tmp_path: Path) -> None:
    shown = show(
        report(tmp_path),
        """
        const visible = () => [...page.querySelectorAll("tr.event")]
          .filter((row) => row.getClientRects().length).map((row) => row.cells[1].textContent);
        const all = visible();
        page.getElementById("show-plan").click();
        const without = visible();
        const find = page.getElementById("find");
        find.value = "THERMAL";
        find.dispatchEvent(new view.Event("input", {bubbles: true}));
        return {all, without, found: visible()};
        """,
    )
    assert "plan" in shown["all"]
    assert shown["without"] == [kind for kind in shown["all"] if kind != "plan"]
    assert shown["found"] == ["straggler"]


def live() -> Callable[[], str]:
    """A page that has one more iteration each time that it is asked for."""
    numbers = itertools.count(1)
    run = History()

    def page() -> str:
        iteration = next(numbers)
        run.add(told(iteration))
        run.add({"event": "warning", "iteration": iteration, "message": f"number {iteration}"})
        return make_page(tell(run, {0: NOMINAL}), Frame(title="t", source="s", is_live=True))

    return page


def test_news_come_by_themselves_and_leave_the_reader_where_he_is() -> None:
    shown, asked = asked_of(
        live(),
        """
        const value = () => page.querySelector(".tiles .value").textContent;
        const before = value();
        const find = page.getElementById("find");
        find.value = "number";
        find.focus();
        page.getElementById("show-warning").click();
        view.scrollTo(0, 400);
        await wait(5000);
        return {before, after: value(), top: view.scrollY, words: page.getElementById("find").value,
          checked: page.getElementById("show-warning").checked,
          focused: page.activeElement.id, rows: page.querySelectorAll("tr.event").length};
        """,
        height=500,
    )
    assert int(shown["before"]) < int(shown["after"]) == shown["rows"]
    assert shown["top"] == 400
    assert (shown["words"], shown["checked"]) == ("number", False)
    assert set(asked) <= {"/report/", ICON}


def test_a_sidecar_that_is_gone_is_told() -> None:
    shown, _ = asked_of(
        live(),
        """
        view.fetch = () => Promise.reject(new Error("gone"));
        await wait(3000);
        const lost = page.getElementById("lost");
        return {hidden: lost.hidden, text: lost.textContent};
        """,
    )
    assert shown == {
        "hidden": False,
        "text": "No answer from the sidecar (gone); what you see is old.",
    }


def test_the_page_of_a_real_sidecar() -> None:
    server = Server()
    try:
        server.tell("POST", "/v1/job", protocol.job_to_json(JOB, Policy()))
        for iteration in range(1, 6):
            body = protocol.observation_to_json(observation(iteration, SLOW))
            server.tell("POST", "/v1/samples", body | {"events": [told(iteration)]})
        text = Reader(rendered(f"{server.url}/", budget_ms=3000)).text
    finally:
        server.sidecar.stop()
    assert "0.8125 s" in text
    assert "pipeline 1, 8 micro-batches" in text
    assert "Find " in text
