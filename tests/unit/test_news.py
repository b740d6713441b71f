"""How much a job of a thousand GPUs tells: what has changed, and little of what has not."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.adapter.curves import Curves, curves_payload
from malleus_megatron.adapter.memory_news import MemoryNews
from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.straggler_news import StragglerNews
from malleus_megatron.control.telemetry import GpuReading, likely_reason
from malleus_megatron.control.values import Decision, Detection
from malleus_megatron.events import EventLog
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.rate_news import RateNews
from malleus_megatron.plan.rates import Rates
from tests.harness.training import read_lines

GPUS = 1024


def noisy(random_: random.Random, noise: float, **slow: float) -> Rates:
    rates = {gpu: math.exp(random_.gauss(0, noise)) for gpu in range(GPUS)}
    return Rates.of(rates | {int(name.removeprefix("gpu")): rate for name, rate in slow.items()})


def test_the_noise_of_healthy_gpus_is_told_now_and_then() -> None:
    news, drawn = RateNews(), random.Random(1)
    told = [k for k in range(3, 304) if news.take(k, noisy(drawn, 0.1), ())]
    assert told == [3, 103, 203, 303]


def test_a_job_that_begins_again_tells_its_rates_and_is_quiet_then() -> None:
    random_ = random.Random(1)
    news = RateNews()
    assert news.take(5000, noisy(random_, 0.1), ())
    told = [news.take(k, noisy(random_, 0.1), ()) for k in range(100, 160)]
    assert told == [True] + [False] * 59


def test_quiet_rates_are_told_once() -> None:
    news, rates = RateNews(), Rates.of({0: 1.0, 1: 1.02})
    assert not news.take(1, Rates(), ())
    assert [k for k in range(2, 500) if news.take(k, rates, ())] == [2]


def test_a_straggler_is_told_at_once_in_every_change() -> None:
    news, drawn = RateNews(), random.Random(2)

    def take(iteration: int, rate: float, *stragglers: int) -> bool:
        return news.take(iteration, noisy(drawn, 0.1, gpu7=rate), stragglers)

    assert take(3, 1.0)
    assert not take(4, 2.0)  # not yet sure
    assert take(5, 2.0, 7)
    assert not take(6, 2.08, 7)
    assert take(7, 2.12, 7)
    assert take(8, math.inf, 7)
    assert not take(9, math.inf, 7)
    assert take(10, 2.0, 7)
    assert not take(22, 2.15, 7)  # it has settled
    assert take(23, 2.25, 7)
    assert not take(24, 2.4, 7)
    assert take(123, 2.4, 7)
    assert take(124, 1.0)


def test_only_stragglers_have_curves_and_they_come_down_again() -> None:
    curves, drawn = Curves(), random.Random(3)
    assert dict(curves.points()) == {"malleus/worst-rate": 1.0}
    curves.learn(curves_payload(noisy(drawn, 0.01), ()))
    assert [name for name, _ in curves.points()] == ["malleus/worst-rate"]
    curves.learn(curves_payload(noisy(drawn, 0.01, gpu7=2.5, gpu9=math.inf), (7, 9)))
    for _ in range(2):
        assert dict(curves.points()) == {
            "malleus/worst-rate": math.inf,
            "malleus/rate/gpu-7": 2.5,
            "malleus/rate/gpu-9": math.inf,
        }
    curves.learn(curves_payload(noisy(drawn, 0.0, gpu7=1.02), ()))
    last = {"malleus/worst-rate": 1.02, "malleus/rate/gpu-7": 1.02, "malleus/rate/gpu-9": 1.0}
    assert dict(curves.points()) == last
    assert dict(curves.points()) == {"malleus/worst-rate": 1.02}


def test_memory_is_news_in_a_new_layout_and_where_a_peak_has_moved() -> None:
    def plan(pipelines: int, stages: int) -> Any:
        return nominal_plan(
            num_layers=4,
            num_microbatches=8,
            tensor_parallel_size=1,
            pipeline_parallel_size=stages,
            data_parallel_size=pipelines,
        )

    news, wide, deep = MemoryNews(), plan(4, 1), plan(2, 2)
    assert news.take(wide, [100.0] * 4)
    assert not any(news.take(wide, [100.0 + 0.01 * k, 101, 100, 99]) for k in range(100))
    assert not news.take(wide.with_counts((5, 1, 1, 1)), [100.0] * 4)
    assert news.take(wide, [100.0, 100.0, 103.0, 100.0])
    assert not news.take(wide, [101.0, 100.0, 102.0, 100.0])
    assert news.take(deep, [101.0, 100.0, 102.0, 100.0])
    assert news.take(wide, [101.0, 100.0, 102.0, 100.0])


class Mailbox:
    """A sidecar's client with one answer for every iteration."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def take_warnings(self) -> tuple[str, ...]:
        return ()

    def take_news(self) -> tuple[str, ...]:
        return ()

    def tell(self, event: dict[str, Any]) -> None:
        pass

    def take_reply(self) -> Decision:
        return self.decision


def test_a_job_of_many_noisy_gpus_writes_little(tmp_path: Path) -> None:
    drawn, mailbox = random.Random(4), Mailbox(Decision(iteration=0))
    client: Any = mailbox
    reporter = Reporter(events=EventLog(tmp_path), say=lambda _: None, sidecar=client)
    payloads = []
    for iteration in range(1, 101):
        mailbox.decision = Decision(iteration=iteration, rates=noisy(drawn, 0.1))
        reporter.take_offer()
        payloads.append(reporter.take_rates())
    assert [bool(payload) for payload in payloads] == [True] + [False] * 99
    assert (tmp_path / "events.jsonl").stat().st_size < 30_000


def reading(slow: bool, **more: float) -> GpuReading:
    known = {"clock_reasons": 0.0, "other_processes": 0.0, "corrected_ecc": 0.0}
    return GpuReading(sm_mhz=1200 if slow else 1900, max_sm_mhz=1980, **known | more)


def decision(iteration: int, *slow: int) -> Decision:
    return Decision(
        iteration=iteration,
        rates=Rates.of({gpu: 1.5 + gpu / GPUS if gpu in slow else 1.0 for gpu in range(GPUS)}),
        stragglers=slow,
        detections=tuple(Detection(gpu=gpu, since=2, named=4) for gpu in slow),
    )


@pytest.mark.parametrize(("count", "num_lines"), [(16, 16), (17, 1), (400, 1)])
def test_many_changes_at_a_time_are_one_line_and_an_event_each(
    tmp_path: Path, count: int, num_lines: int
) -> None:
    lines: list[str] = []
    news = StragglerNews(EventLog(tmp_path), lines.append)
    readings = [reading(gpu < count) for gpu in range(GPUS)]
    news.take(decision(4, *range(count)), 4)
    assert news.asks_readings
    news.explain(readings, 4)
    assert not news.asks_readings
    assert len(lines) == num_lines
    news.take(decision(20), 20)
    assert len(lines) == 2 * num_lines
    if num_lines == 1:
        assert f"{count} GPUs have become stragglers, with rates from 1.50 to" in lines[0]
        assert f"13, 14, 15 and {count - 16} more" in lines[0]
        assert f"The slowest is GPU {count - 1}; likely: SM clock 1200" in lines[0]
        assert lines[1].startswith(f"{count} GPUs have recovered: GPU 0, 1, 2")
    events = read_lines(tmp_path / "events.jsonl")
    named = [event for event in events if event["event"] == "straggler"]
    assert [event["gpu"] for event in named] == list(range(count))
    assert {event["reason"] for event in named} == {likely_reason(0, readings)}
    assert sum(event["event"] == "recovered" for event in events) == count


def test_a_straggler_is_told_again_when_it_is_much_slower() -> None:
    lines: list[str] = []
    news = StragglerNews(EventLog(None), lines.append)
    for k, rate in enumerate([1.2, 1.3, 12.5, 13.0, math.inf, math.inf], start=4):
        slow = Decision(iteration=k, rates=Rates.of({0: 1.0, 1: rate}), stragglers=(1,))
        news.take(slow, k)
        news.explain([GpuReading()] * 2, k)
    assert [line.split(";")[0] for line in lines] == [
        "GPU 1 is a straggler: rate 1.20",
        "GPU 1 is slower yet: rate 12.50",
        "GPU 1 is slower yet: rate inf",
    ]


def test_a_gpu_of_which_nothing_is_known_has_not_recovered() -> None:
    """A sidecar that was started anew has seen too little at first."""
    lines: list[str] = []
    news = StragglerNews(EventLog(None), lines.append)
    slow = Decision(iteration=4, rates=Rates.of({0: 1.0, 1: 4.0}), stragglers=(1,))
    for k, decided in enumerate([slow, Decision(iteration=5), Decision(iteration=6), slow], 4):
        news.take(decided, k)
        news.explain([GpuReading()] * 2, k)
    assert lines == ["GPU 1 is a straggler: rate 4.00"]
    news.take(Decision(iteration=9, rates=Rates.of({0: 1.0, 1: 1.01})), 9)
    assert lines[1:] == ["GPU 1 has recovered: rate 1.01"]


def test_gpus_of_many_are_compared_with_their_own_kind(tmp_path: Path) -> None:
    news = StragglerNews(EventLog(tmp_path), lambda _: None)
    other = GpuReading(sm_mhz=1200, max_sm_mhz=1210, clock_reasons=0.0)
    waiting = reading(slow=True, clock_reasons=1.0)
    hot = reading(slow=True, clock_reasons=64.0, temperature_c=93.0)
    readings = [hot, GpuReading(), *[other] * 30, *[waiting] * 30, *[reading(slow=False)] * 20]
    news.take(decision(4, *range(32)), 4)
    news.explain(readings, 4)
    reasons = [event["reason"] for event in read_lines(tmp_path / "events.jsonl")]
    assert reasons[0] == likely_reason(0, readings)
    assert "thermal slowdown" in reasons[0]
    assert set(reasons[1:]) == {None}


def test_what_curves_learn_is_json() -> None:
    assert json.loads(curves_payload(Rates.of({1: math.inf}), (1,)))["stragglers"] == [1]
