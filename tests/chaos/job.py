"""A training job that is hurt from the inside: switches that fail on one rank, a log that is full.

Its own sidecar is asked through the proxy of the test, which must know where it is.

Environment: CHAOS, the faults as JSON; CHAOS_PROXY, its URL; CHAOS_SIDECAR, the file for the
process that is the sidecar now.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.job import Job
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.sidecar.process import OwnSidecar
from malleus_megatron.sidecar.transport import HttpTransport
from tests.chaos.script import FAILING_SWITCH

REPLY_TIMEOUT_S = 15.0
GROUPING = "grouping the parameters"


class Saboteur:
    """Counts the steps of each switch, on every rank alike, and fails the one that is due."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self._failures = [fault for fault in faults if fault["kind"] == FAILING_SWITCH]
        self._full_at = [f["iteration"] for f in faults if f["kind"] == "log is full"]
        self._due: dict[str, Any] | None = None
        self._steps = 0

    def go(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def go(switch: Switch, see: Any, plan: Any, iteration: int) -> Any:
            due = [fault for fault in self._failures if fault["iteration"] <= iteration]
            self._due, self._steps = (due[0] if due else None), 0
            try:
                return original(switch, see, plan, iteration)
            finally:
                if self._due is None and due:
                    self._failures.remove(due[0])
                self._due = None

        return go

    def together(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def together(agreement: Agreement, what: str, step: Callable[[], Any]) -> Any:
            due = self._due
            # Megatron compares all ranks' parameter groups in that step: it cannot fail alone.
            if due is None or due["values"]["step"] > self._steps or what == GROUPING:
                self._steps += 1
                return original(agreement, what, step)
            self._due = None
            fails = agreement.rank == due["values"]["rank"]
            return original(agreement, what, _fail if fails else step)

        return together

    def begin_iteration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin_iteration(job: Job, iteration: int) -> Any:
            if iteration in self._full_at:
                _fill_the_disk_under("events.jsonl")
            return original(job, iteration)

        return begin_iteration


def _fail() -> None:
    raise RuntimeError("it fails here")


def _fill_the_disk_under(name: str) -> None:
    """From now on what this process writes to the file meets a device that is full."""
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.readlink().name == name:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, int(link.name))
            os.close(full)


def by_proxy(connect: Callable[[OwnSidecar], HttpTransport]) -> Callable[..., HttpTransport]:
    def connect_by_proxy(sidecar: OwnSidecar) -> HttpTransport:
        port = int(connect(sidecar).url.rpartition(":")[2])
        place = Path(os.environ["CHAOS_SIDECAR"])
        draft = place.with_suffix(".new")
        draft.write_text(json.dumps({"pid": sidecar.pid, "port": port}), encoding="utf-8")
        draft.replace(place)
        return HttpTransport(os.environ["CHAOS_PROXY"], timeout_s=REPLY_TIMEOUT_S)

    return connect_by_proxy


def given(transport: type[HttpTransport]) -> None:
    """A sidecar at a URL is waited for as long as one of our own."""
    keywords = transport.__init__.__kwdefaults__
    assert keywords is not None
    keywords["timeout_s"] = REPLY_TIMEOUT_S


def main() -> None:
    saboteur = Saboteur(json.loads(os.environ["CHAOS"]))
    Switch._go = saboteur.go(Switch._go)  # type: ignore[method-assign]
    Agreement.together = saboteur.together(Agreement.together)  # type: ignore[method-assign]
    Job.begin_iteration = saboteur.begin_iteration(Job.begin_iteration)  # type: ignore[method-assign]
    OwnSidecar.connect = by_proxy(OwnSidecar.connect)  # type: ignore[method-assign]
    given(HttpTransport)
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
