"""A probe of all GPUs, asked for at the sidecar: once, told with what the steps show."""

from dataclasses import replace

import pytest

from malleus_megatron.adapter.probes import ProbeWatch, probe_words
from malleus_megatron.adapter.rows import BoundaryRow
from malleus_megatron.control.policy import Policy
from malleus_megatron.errors import NoJobError, SidecarError
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.client import SidecarClient
from malleus_megatron.sidecar.conversation import Turn
from malleus_megatron.sidecar.service import Service
from tests.unit.sidecar_cases import JOB, PLAN, observation

NO_PROBE = BoundaryRow()
STANDBY_0 = replace(
    PLAN,
    num_layers=8,
    pipelines=(
        replace(
            PLAN.pipelines[0],
            num_microbatches=16,
            stages=(replace(PLAN.pipelines[0].stages[1], layers=(0, 8)),),
        ),
    ),
    standby=tuple(g for g in PLAN.all_gpus() if g not in PLAN.pipelines[0].stages[1].gpus),
)


def test_the_next_decision_asks_for_it_once() -> None:
    service = Service()
    service.job(protocol.job_to_json(JOB, Policy()))
    service.probe({})
    asked = [
        protocol.decision_from_json(
            service.samples(protocol.observation_to_json(observation(number)))
        ).asks_probe
        for number in (1, 2)
    ]
    assert asked == [True, False]


def test_without_a_job_nobody_can_be_probed() -> None:
    with pytest.raises(NoJobError, match="Describe it first"):
        Service().probe({})


class NoSidecar:
    page = None

    def launch(self) -> None:
        raise SidecarError("none here")


def test_a_request_outlives_the_decision_that_brought_it() -> None:
    """The plan changes before the job has asked: the decision is void, the wish is not."""
    client = SidecarClient(NoSidecar())  # type: ignore[arg-type]
    service = Service()
    service.job(protocol.job_to_json(JOB, Policy()))
    service.probe({})
    answer = service.samples(protocol.observation_to_json(observation(1)))
    client._deliver(Turn(decision=protocol.decision_from_json(answer)))
    client.describe(JOB)
    assert client.take_reply() is None
    assert [client.take_probe_request(), client.take_probe_request()] == [True, False]


def rows(*rates: float | None) -> list[BoundaryRow]:
    return [NO_PROBE if rate is None else replace(NO_PROBE, probe_rate=rate) for rate in rates]


def test_rates_are_told_once_and_only_when_they_were_asked_for() -> None:
    watch = ProbeWatch()
    assert watch.look(rows(1.0, 1.0, 1.0, 1.0), PLAN) is None
    watch.is_awaited = True
    assert watch.look(rows(None, None, None, None), PLAN) is None
    assert watch.look(rows(3.0, 6.0, None, 3.0), PLAN) == {0: 1.0, 1: 2.0, 3: 1.0}
    assert watch.look(rows(1.0, 2.0, None, 1.0), PLAN) is None


def test_standby_gpus_that_always_tell_are_no_answer() -> None:
    watch = ProbeWatch()
    watch.is_awaited = True
    at_work = PLAN.pipelines[0].stages[1].gpus
    alone = [None if gpu in at_work else 1.0 for gpu in range(4)]
    assert watch.look(rows(*alone), STANDBY_0) is None
    assert watch.look(rows(1.0, 1.0, 1.0, 1.0), STANDBY_0) is not None


@pytest.mark.parametrize(
    ("probed", "in_steps", "words"),
    [
        ({0: 1.0, 1: 1.02}, {}, "probe: all 2 GPUs from 1.00 to 1.02"),
        (
            {0: 1.0, 1: 0.98, 2: 2.6},
            {2: 2.57},
            "probe: GPU 2 at 2.60 (in its steps 2.57), the other 2 from 0.98 to 1.00",
        ),
        (
            {0: 1.0, 1: 1.01},
            {1: 1.6},
            "probe: GPU 1 at 1.01 (in its steps 1.60), the other 1 from 1.00 to 1.00",
        ),
        ({0: 3.0}, {}, "probe: GPU 0 at 3.00"),
    ],
)
def test_words(probed: dict[int, float], in_steps: dict[int, float], words: str) -> None:
    assert probe_words(probed, in_steps) == words


def test_words_do_not_grow_with_the_job() -> None:
    words = probe_words(dict.fromkeys(range(1000), 2.0), {})
    assert words.endswith(", 984 more")
    assert len(words) < 400
