"""What is written is read back, and nothing else is let in."""

import json
import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Decision, Detection, Freedom
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.plan import PlanningNote, Prediction
from malleus_megatron.plan.problem import MEMORY_PARTS, ModelMemory
from malleus_megatron.plan.rates import Rates
from malleus_megatron.sidecar import protocol
from malleus_megatron.sidecar.conversation import Conversation
from malleus_megatron.sidecar.process import GivenSidecar
from malleus_megatron.sidecar.service import Service
from tests.unit.sidecar_cases import JOB, PLAN, SLOW, observation


def over_the_wire(document: dict[str, Any]) -> dict[str, Any]:
    return protocol.decode(protocol.encode(document), "test")


@pytest.mark.parametrize("level", list(Level))
def test_a_job_comes_back(level: Level) -> None:
    job, policy = replace(JOB, level=level), Policy(window=5, min_gain=0.1)
    assert protocol.job_from_json(over_the_wire(protocol.job_to_json(job, policy))) == (job, policy)


FREEDOM = Freedom(
    cluster=Cluster(gpus_per_node=(2, 2), memory_mib=1000.0),
    tensor_parallel_sizes=(1, 2),
    layer_time_s=((1, 0.03), (2, 0.016)),
    memory=ModelMemory(
        reference_tp=1,
        layer_mib_by_inflight=(10.0, 12.0),
        **{part: 3.0 + number for number, part in enumerate(MEMORY_PARTS)},
    ),
)


@pytest.mark.parametrize(
    "freedom",
    [FREEDOM, Freedom(cluster=Cluster(gpus_per_node=(4,)), tensor_parallel_sizes=(1,)), None],
)
def test_what_a_reshape_may_use_and_the_present_layout_come_back(freedom: Freedom | None) -> None:
    job = replace(JOB, level=Level.reshape, freedom=freedom, present=PLAN.with_counts((12, 4)))
    document = over_the_wire(protocol.job_to_json(job, Policy()))
    assert protocol.job_from_json(document) == (job, Policy())


def test_a_job_of_an_older_writer_has_no_freedom_and_the_nominal_layout() -> None:
    document = protocol.job_to_json(JOB, Policy())
    del document["freedom"], document["present"]
    assert protocol.job_from_json(over_the_wire(document)) == (JOB, Policy())


def test_probes_and_warnings_come_back() -> None:
    sent = replace(observation(3), probes=((2, 1.5), (3, math.inf)))
    assert protocol.observation_from_json(over_the_wire(protocol.observation_to_json(sent))) == sent
    decision = Decision(iteration=3, warning="There is no plan.")
    read = protocol.decision_from_json(over_the_wire(protocol.decision_to_json(decision)))
    assert read == decision


def test_the_service_goes_on_with_another_layout_and_starts_anew_with_another_recipe() -> None:
    service = Service()
    job = replace(JOB, level=Level.reshape)
    service.job(protocol.job_to_json(job, Policy()))
    service.change_settings({"min_gain": 0.5})
    for iteration in range(1, 5):
        service.samples(protocol.observation_to_json(observation(iteration, SLOW)))
    rest = PLAN.pipelines[0].gpus
    present = replace(
        PLAN, pipelines=PLAN.pipelines[1:], num_microbatches=8, standby=tuple(sorted(rest))
    )
    service.job(protocol.job_to_json(replace(job, present=present), Policy()))
    seen = replace(observation(5, SLOW, present), samples=())
    answer = protocol.decision_from_json(service.samples(protocol.observation_to_json(seen)))
    assert answer.stragglers == tuple(SLOW)
    assert service.settings()["min_gain"] == 0.5

    service.job(protocol.job_to_json(replace(job, nominal=PLAN.with_counts((4, 4))), Policy()))
    assert service.status()["decision"] is None
    assert service.settings()["min_gain"] == Policy().min_gain


def test_the_reason_for_no_plan_is_told_once() -> None:
    why = "There is no plan of another layout: too little memory."

    def answer(path: str, _body: bytes) -> bytes:
        decision = Decision(iteration=1, warning=why)
        return protocol.encode(protocol.decision_to_json(decision) if "samples" in path else {})

    sidecar = GivenSidecar("http://127.0.0.1:9")
    with patch.object(sidecar, "connect", lambda: answer):
        conversation = Conversation(sidecar, JOB, Policy())
        turns = [conversation.exchange(observation(iteration)) for iteration in (1, 2, 3)]
    assert [turn.warnings for turn in turns] == [(why,), (), ()]


def test_a_job_without_settings_has_the_defaults() -> None:
    document = protocol.job_to_json(JOB, Policy(window=9))
    del document["settings"]
    assert protocol.job_from_json(over_the_wire(document)) == (JOB, Policy())


def test_samples_come_back_and_an_absent_time_stays_absent() -> None:
    sent = observation(7, SLOW | {0: math.nan})
    read = protocol.observation_from_json(over_the_wire(protocol.observation_to_json(sent)))
    assert read.samples[1:] == sent.samples[1:]
    assert math.isnan(read.samples[0].layer_forward_s)
    assert read.samples[0].num_layers == 4
    assert replace(read, samples=()) == replace(sent, samples=())


def test_a_decision_comes_back_with_its_offer() -> None:
    predicted = Prediction(step_time_s=5.2, lower_bound=5.1, healthy_step_time_s=3.6)
    offer = replace(
        PLAN.with_counts((12, 4), predicted), planning=PlanningNote(seconds=0.1, seed=0)
    )
    decision = Decision(
        iteration=9,
        rates=Rates.of({0: 1.01, 1: math.inf, 2: 3.0}),
        stragglers=(1, 2),
        detections=(Detection(gpu=1, since=4, named=6), Detection(gpu=2, since=1, named=9)),
        common_rate=1.5,
        ignored=(3,),
        step_time_s=9.6,
        offer=offer,
    )
    read = protocol.decision_from_json(over_the_wire(protocol.decision_to_json(decision)))
    assert read == decision
    assert read.offer is not None
    assert (read.offer.predicted, read.offer.planning) == (offer.predicted, offer.planning)


def test_a_decision_that_knows_nothing_comes_back() -> None:
    nothing = Decision(iteration=1)
    assert protocol.decision_from_json(over_the_wire(protocol.decision_to_json(nothing))) == nothing


def test_settings_change_by_name() -> None:
    changed = protocol.changed_policy(
        Policy(), {"schema_version": 1, "threshold": 1.5, "window": 4}
    )
    assert changed == Policy(threshold=1.5, window=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": 1.5}, r"Unknown setting 'tolerance'. Known: threshold, window, patience"),
        ({"window": 2.5}, "window: expected a whole number, got 2.5"),
        ({"threshold": "high"}, "threshold: expected a finite number, got 'high'"),
        ({"window": 0}, "window 0 must be at least 1"),
    ],
)
def test_settings_without_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        protocol.changed_policy(Policy(), changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"<html>busy</html>", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema_version": 1, "step_time_s": NaN}', "NaN is no JSON number"),
        (b'{"schema_version": 1, "step_time_s": Infinity}', "Infinity is no JSON number"),
        (b'{"schema_version": 1, "iteration": 1' + b"0" * 400 + b"}", "401 digits"),
        (b"[1]", "expected an object"),
        (b"{}", "'schema_version' is missing"),
        (b'{"schema_version": 2}', "schema_version 2 is not known"),
    ],
)
def test_what_is_no_document_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        protocol.decode(data, "answer")


def broken_observation(**changes: Any) -> dict[str, Any]:
    return protocol.observation_to_json(observation(1)) | changes


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (broken_observation(iteration="7"), "iteration: expected a whole number"),
        (broken_observation(microbatch_counts=[8, 0]), r"micro-batches \[8, 0\]"),
        (broken_observation(microbatch_counts=[]), r"micro-batches \[\]"),
        (broken_observation(samples={}), "samples: expected an array"),
        (broken_observation(samples=[7]), r"samples\[0\]: expected an object"),
        (broken_observation(samples=[{"gpu": 0}]), r"samples\[0\]: the field 'iteration'"),
    ],
)
def test_broken_samples_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        protocol.observation_from_json(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "high"}, "'high' is none of observe, rebalance, reshape"),
        ({"level": []}, "is none of"),
        ({"nominal": None}, "job.nominal: expected an object"),
        ({"settings": []}, "job.settings: expected an object"),
        ({"present": {}}, "job.present: the field 'schema_version' is missing"),
        ({"freedom": {}}, "job.freedom: the field 'gpus_per_node' is missing"),
        (
            {"freedom": {"gpus_per_node": [3], "tensor_parallel_sizes": [1]}},
            "The cluster has 3 GPUs; the job has 4",
        ),
        (
            {
                "freedom": {
                    "gpus_per_node": [4],
                    "tensor_parallel_sizes": [1],
                    "layer_time_s": {"one": 1.0},
                }
            },
            "'one' is not a TP degree",
        ),
    ],
)
def test_a_broken_job_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        protocol.job_from_json(protocol.job_to_json(JOB, Policy()) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": {"0": -1.0}}, "GPU 0: rate -1.0 must be above 0"),
        ({"rates": None}, "rates: expected an object"),
        ({"stragglers": [0.5]}, "stragglers: expected a whole number"),
        ({"step_time_s": "soon"}, "step_time_s: expected a finite number"),
        ({"step_time_s": json.loads("1e999")}, "step_time_s: expected a finite number"),
        ({"offer": {}}, "offer: the field 'schema_version' is missing"),
    ],
)
def test_a_broken_decision_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        protocol.decision_from_json(protocol.decision_to_json(Decision(iteration=1)) | change)


def test_ten_thousand_gpus_fit_into_a_message() -> None:
    sample = replace(observation(1, {0: 1 / 3}).samples[0], gpu=10_000)
    sent = protocol.observation_to_json(replace(observation(1), samples=(sample,)))
    assert 10_000 * len(protocol.encode(sent)) < protocol.MAX_MESSAGE_BYTES
