"""What the sidecar shows of a job: its page, its metrics, in bounded memory."""

from typing import Any

import pytest

from malleus_megatron.control.policy import Policy
from malleus_megatron.pages.history import Bounds
from malleus_megatron.plan.plan import Plan
from malleus_megatron.sidecar import monitor, protocol
from malleus_megatron.sidecar.outbox import Outbox
from malleus_megatron.sidecar.service import Service
from malleus_megatron.sidecar.status_page import CachedPage
from tests.harness.exposition import read_exposition
from tests.harness.logs import HOSTILE
from tests.unit.sidecar_cases import JOB, PLAN, SLOW, observation
from tests.unit.test_pages import Reader

(SLOW_GPU,) = SLOW
STEP_S, LOSS = 0.8125, 4.75


def described() -> Service:
    service = Service()
    service.job(protocol.job_to_json(JOB, Policy()))
    return service


def send(
    service: Service, iteration: int, events: list[Any] | None, *, plan: Plan = PLAN
) -> dict[str, Any]:
    rates = SLOW if iteration >= 10 else None
    body = protocol.observation_to_json(observation(iteration, rates, plan))
    return service.samples(body if events is None else body | {"events": events})


def told(iteration: int, **more: Any) -> dict[str, Any]:
    """As the job tells an iteration."""
    return {
        "event": "iteration",
        "iteration": iteration,
        "step_time_s": STEP_S,
        "loss": LOSS,
        "generation": 0,
        "plan": "sha256:0",
    } | more


def run_job(service: Service, last: int = 14) -> None:
    for iteration in range(1, last + 1):
        send(service, iteration, [told(iteration)])


def value(service: Service, name: str, **labels: str) -> float:
    return read_exposition(service.metrics())[name][tuple(labels.items())]


def test_before_a_job_is_known_there_is_a_page_and_little_to_measure() -> None:
    service = Service()
    assert "No job has described itself" in Reader(service.page()).text
    assert read_exposition(service.metrics()).keys() == {"malleus_build_info", "malleus_job_known"}
    assert value(service, "malleus_job_known") == 0
    service.job(protocol.job_to_json(JOB, Policy()))
    assert "No job has described itself" not in service.page()
    assert "No iteration has ended yet." in service.page()
    assert value(service, "malleus_plans_offered_total") == 0


def test_the_page_shows_what_the_job_told() -> None:
    service = described()
    run_job(service)
    text = Reader(service.page()).text
    assert f"{STEP_S:.4f} s" in text
    assert "4.75000" in text
    assert "No straggler was found in 14 iterations" in text
    assert "pipeline 1, 8 micro-batches" in text
    event = {"event": "straggler", "iteration": 14, "gpu": SLOW_GPU, "rate": 3.0, "since": 10}
    send(service, 15, [event, {"event": "warning", "iteration": 14, "message": HOSTILE}])
    service._page = CachedPage()
    page = service.page()
    assert f"GPU {SLOW_GPU} slowed down to rate 3.00 at iteration 10" in Reader(page).text
    assert HOSTILE not in page


def test_metrics_say_what_was_decided_and_what_was_told() -> None:
    service = described()
    run_job(service)
    assert value(service, "malleus_gpu_rate", gpu=str(SLOW_GPU)) == pytest.approx(3.0, rel=1e-6)
    assert value(service, "malleus_gpu_rate", gpu="0") == pytest.approx(1.0, rel=1e-6)
    assert value(service, "malleus_gpu_straggler", gpu=str(SLOW_GPU)) == 1
    assert value(service, "malleus_gpu_straggler", gpu="0") == 0
    for name, expected in {
        "malleus_stragglers": 1, "malleus_iteration": 14, "malleus_generation": 0,
        "malleus_step_time_seconds": STEP_S, "malleus_loss": LOSS, "malleus_standby_gpus": 0,
        "malleus_plans_offered_total": 1, "malleus_plans_rejected_total": 0,
        "malleus_common_rate": 1.0,
    }.items():  # fmt: skip
        assert value(service, name) == expected, name
    assert value(service, "malleus_pipeline_microbatches", pipeline="1") == 8
    assert value(service, "malleus_level", level="rebalance") == 1
    decision = service.status()["decision"]
    assert value(service, "malleus_predicted_step_time_seconds") == decision["step_time_s"]


def test_counters_count() -> None:
    service = described()
    offer = None
    for iteration in range(1, 20):
        answer = send(service, iteration, [told(iteration)])
        offer = offer or answer["offer"]
    assert offer is not None
    pending = service.status()["pending_offer"]
    service.rejected({"plan_id": pending, "why": "no"})
    move = {"event": "migration", "iteration": 19, "seconds": 1.5, "bytes": 1000}
    odd = {"event": "migration", "iteration": 19, "seconds": "inf", "bytes": -1}
    warning = {"event": "warning", "iteration": 19, "message": "w"}
    send(service, 20, [told(20), move, move, odd, warning, 7, {"event": "plan"}])
    for name, expected in {
        "malleus_plans_rejected_total": 1, "malleus_migrations_total": 3,
        "malleus_migration_seconds_total": 3.0, "malleus_migration_bytes_total": 2000,
        "malleus_warnings_total": 1, "malleus_bad_events_total": 2,
    }.items():  # fmt: skip
        assert value(service, name) == expected, name


def test_a_job_of_an_older_version_is_shown_by_its_samples() -> None:
    service = described()
    for iteration in range(1, 15):
        send(service, iteration, None)
    text = Reader(service.page()).text
    assert f"GPU {SLOW_GPU} slowed down to rate 3.00 at iteration 10" in text
    assert "an older version" in text
    assert "malleus_step_time_seconds" not in read_exposition(service.metrics())
    assert value(service, "malleus_iteration") == 14


def test_a_job_that_starts_again_is_another_run() -> None:
    service = described()
    run_job(service)
    send(service, 5, [{"event": "level", "iteration": 0, "level": "rebalance"}, told(5)])
    text = Reader(service.page()).text
    assert "No straggler was found in 1 iteration;" in text


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Bounds(steps=10, events=5, rates=40)
    monkeypatch.setattr(monitor, "BOUNDS", bounds)
    service = described()
    for iteration in range(1, 101):
        rates = {SLOW_GPU: 1.0 + 0.2 * (iteration % 2)}
        body = protocol.observation_to_json(observation(iteration, rates))
        warning = {"event": "warning", "iteration": iteration, "message": "w"}
        generation = iteration // 2
        body |= {
            "generation": generation,
            "events": [told(iteration, generation=generation), warning],
        }
        service.samples(body)
    history = service._monitor.history
    assert (len(history.steps), len(history.events)) == (10, 5)
    assert sum(len(rates.by_gpu) for rates in history.rates) <= 40
    assert len(service._monitor.plans) <= 16
    assert "The last 10 of 100 iterations are kept here." in Reader(service.page()).text


def test_memory_events_leave_room_for_others_and_the_latest_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "BOUNDS", Bounds(steps=10, events=5, rates=40))
    service = described()
    send(service, 1, [told(1), {"event": "warning", "iteration": 1, "message": "early"}])
    used = {"event": "memory", "generation": 0, "usable_mib": 100.0}
    for iteration in range(2, 10):
        peaks = {"iteration": iteration, "measured_mib": [50.0 + iteration] * 4}
        send(service, iteration, [told(iteration), used | peaks])
    history = service._monitor.history
    assert [event.kind for event in history.events] == ["warning", "memory"]
    for iteration in range(10, 16):
        warning = {"event": "warning", "iteration": iteration, "message": "w"}
        send(service, iteration, [told(iteration), warning])
    assert {event.kind for event in history.events} == {"warning"}
    assert value(service, "malleus_gpu_memory_peak_bytes", gpu="3") == 59.0 * 2**20


def test_the_noise_of_healthy_gpus_takes_little_of_the_history() -> None:
    service = described()
    for iteration in range(1, 151):
        rates = {0: 1.0 + 0.08 * (iteration // 20 % 2)}
        body = protocol.observation_to_json(observation(iteration, rates))
        service.samples(body | {"events": [told(iteration)]})
    assert len(service._monitor.history.rates) == 2


def test_a_page_is_drawn_when_there_is_news_and_not_for_everybody() -> None:
    service, now = described(), [0.0]
    service._page = CachedPage(clock=lambda: now[0])
    run_job(service, 2)
    first = service.page()
    send(service, 3, [told(3)])
    assert service.page() is first
    now[0] = 1.5
    second = service.page()
    assert second != first
    now[0] = 100.0
    assert service.page() is second


def test_events_wait_within_bounds_and_the_latest_stay() -> None:
    box = Outbox(most_bytes=100)
    assert not box
    for number in range(50):
        box.add({"n": number})
    box.add({"n": "x" * 200})
    taken = [event["n"] for event in box.take()]
    assert taken == list(range(50 - len(taken), 50))
    assert 8 <= len(taken) <= 12
    assert (bool(box), box.take()) == (False, [])
