"""Beside a running job: makes its sidecar suffer when the script says so."""

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import JobDescription
from malleus_megatron.plan.codec import plan_from_json
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.process import OwnSidecar
from tests.chaos.proxy import Proxy
from tests.chaos.script import OFFERS, SIDECAR_FAULTS, Fault, Script

POLL_S = 0.05
DOWN_S = 3.0
"""How long a sidecar that somebody else runs is away after it was killed."""


class Conductor:
    """A thread of the test's process; it knows the iteration from the job's record of losses."""

    def __init__(self, script: Script, folder: Path) -> None:
        self.proxy = Proxy(lambda: self._where().get("port"))
        self.place = folder / "sidecar.json"
        self.errors: list[str] = []
        """What went wrong in the test itself."""
        self._script, self._folder = script, folder
        self._faults = list(script.faults)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._given: OwnSidecar | None = None
        self._set_in: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conductor")

    def __enter__(self) -> "Conductor":
        if not self._script.own_sidecar:
            self._run_a_sidecar()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._given is not None:
            self._given.stop()
        self.proxy.close()

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 the verdict tells of it
                self.errors.append(repr(error))
            time.sleep(POLL_S)
        for _, action in self._later:
            action()

    def _look(self) -> None:
        iteration = self._iteration()
        pid = self._where().get("pid")
        if pid is not None and pid != self._set_in:
            status = self._ask("PUT", "/v1/settings", dict(self._script.settings))
            self._set_in = pid if status == 200 else None
        is_up = pid is not None and pid == self._set_in and _is_a_sidecar(pid)
        for fault in [fault for fault in self._faults if fault.iteration <= iteration]:
            if is_up or fault.kind not in SIDECAR_FAULTS:  # what is not there cannot be killed
                self._faults.remove(fault)
                self._begin(fault)
        due = [entry for entry in self._later if entry[0] <= time.monotonic()]
        for entry in due:
            self._later.remove(entry)
            entry[1]()

    def _iteration(self) -> int:
        """The one that runs now."""
        record = self._folder / "losses.jsonl"
        return 1 + (record.read_bytes().count(b"\n") if record.exists() else 0)

    def _where(self) -> dict[str, int]:
        """Process and port of the sidecar, once there is one."""
        if not self.place.exists():
            return {}
        where: dict[str, int] = json.loads(self.place.read_text(encoding="utf-8"))
        return where

    def _begin(self, fault: Fault) -> None:
        kind, values = fault.kind, fault.values
        if kind in SIDECAR_FAULTS:
            self._hurt(kind, values.get("seconds", 0.0))
        elif kind in {"settings", "bad settings"}:
            self._ask("PUT", "/v1/settings", dict(values["settings"]))
        elif kind == "foreign samples":
            self._ask("POST", "/v1/samples", {"iteration": 10**6, "samples": [], "plan_id": "x"})
        elif kind == "foreign job":
            self._ask("POST", "/v1/job", _foreign_job(self._script))
        elif kind == "plans is a file":
            self._put_a_file_where_plans_go()
        elif kind in OFFERS or "offer" in values or "answers" in values:
            self.proxy.spoil(fault)

    def _hurt(self, kind: str, seconds: float) -> None:
        pid = self._where()["pid"]
        if kind == "shutdown":
            self._ask("POST", "/v1/shutdown", {})
        elif kind == "kill":
            _send(pid, signal.SIGKILL)
        else:
            _send(pid, signal.SIGSTOP)
            end = signal.SIGCONT if kind == "stop" else signal.SIGKILL
            self._later.append((time.monotonic() + seconds, lambda: _send(pid, end)))
        if self._given is not None and kind != "stop":
            self._later.append((time.monotonic() + seconds + DOWN_S, self._run_a_sidecar))

    def _run_a_sidecar(self) -> None:
        if self._given is not None:
            self._given.stop()
        self._given = OwnSidecar()
        self._given.launch()
        port = int(self._given.connect().url.rpartition(":")[2])
        self.place.write_text(json.dumps({"pid": self._given.pid, "port": port}), encoding="utf-8")

    def _put_a_file_where_plans_go(self) -> None:
        plans = self._folder / "log" / "plans"
        if plans.is_dir():
            plans.rename(plans.with_name("plans-before"))
        plans.write_text("in the way", encoding="utf-8")

    def _ask(self, method: str, path: str, document: dict[str, Any]) -> int | None:
        """Speak to the sidecar itself; None if it does not answer."""
        port = self._where().get("port")
        if port is None:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(connection),
        ):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, protocol.encode(document), headers)
            return connection.getresponse().status
        connection.close()
        return None


def _send(pid: int, number: signal.Signals) -> None:
    if _is_a_sidecar(pid):  # no other process that has got its number
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_a_sidecar(pid: int) -> bool:
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return False
    return b"malleus_megatron.sidecar" in words


def _foreign_job(script: Script) -> dict[str, Any]:
    grid = replace(script.grid, pipelines=1, num_layers=2 * script.grid.num_layers)
    plan = plan_from_json(grid.plan([grid.num_microbatches]))
    return protocol.job_to_json(JobDescription(nominal=plan, level=Level.rebalance), Policy())
