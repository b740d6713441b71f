"""A warning is told once, and anew when it had gone for a long time."""

from functools import partial

import pytest

from malleus_megatron.control.values import Decision
from malleus_megatron.sidecar import protocol
from tests.unit.sidecar_cases import observation
from tests.unit.test_sidecar_client import Answer, FakeSidecar, answering, failing, talk


@pytest.fixture
def sidecar() -> FakeSidecar:
    return FakeSidecar()


def encoded(decision: Decision) -> bytes:
    return protocol.encode(protocol.decision_to_json(decision))


def test_gpus_without_timings_use_up_nothing_that_states_may_tell(sidecar: FakeSidecar) -> None:
    """Each set of GPUs is told, some twenty of them."""
    conversation = talk(sidecar)
    warnings: list[str] = []
    for k in range(1, 41):
        ignored = Decision(iteration=k, ignored=(k % 4, 4 + k))
        sidecar.answer = partial(answering, sidecar, encoded(ignored))
        warnings += conversation.exchange(observation(k)).warnings
    assert len(warnings) == 21
    assert "GPU 1, 5;" in warnings[0]
    assert warnings[-1].startswith("Further warnings of 20 kinds and more are left out")
    sidecar.answer = partial(answering, sidecar, encoded(Decision(iteration=41, warning="Busy.")))
    assert conversation.exchange(observation(41)).warnings == ("Busy.",)


def told_in(sidecar: FakeSidecar, warnings: list[str]) -> list[int]:
    """The iterations in which something is told, if decisions have these warnings."""
    conversation, told = talk(sidecar), []
    for k, warning in enumerate(warnings, start=1):
        decision = encoded(Decision(iteration=k, warning=warning))
        sidecar.answer = partial(answering, sidecar, decision)
        if conversation.exchange(observation(k)).warnings:
            told.append(k)
    return told


@pytest.mark.parametrize(
    ("warnings", "told"),
    [
        (["Busy."] * 350, [1]),  # it lasts
        ((["Busy."] + [""] * 98) * 4, [1]),  # it comes again and again
        ((["Busy."] + [""] * 100) * 3, [1, 102, 203]),
        (["Busy."] + ["Hot."] * 200 + ["Busy."], [1, 2, 202]),
        # The one after the twentieth is that more are left out.
        (["x" * k for k in range(1, 401)], list(range(1, 22))),
        (["x" * k for k in range(1, 31)] + [""] * 100 + ["Busy."], [*range(1, 22), 131]),
        ([f"{one} times as long" for one in (1.2, 1.9, 5.0, 6.1, 40.0, 1.3)], [1, 3, 5]),
    ],
)
def test_a_state_is_told_anew_after_a_long_time_without_it(
    sidecar: FakeSidecar, warnings: list[str], told: list[int]
) -> None:
    assert told_in(sidecar, warnings) == told


def test_an_outage_is_no_quiet_time(sidecar: FakeSidecar) -> None:
    conversation = talk(sidecar)
    busy = partial(answering, sidecar, encoded(Decision(iteration=1, warning="Busy.")))
    calm = partial(answering, sidecar, encoded(Decision(iteration=1)))
    said: list[str] = []
    answers: list[Answer] = [busy, *[calm] * 60, failing, *[calm] * 60, busy]
    for k, answer in enumerate(answers, start=1):
        sidecar.answer = answer
        said += conversation.exchange(observation(k)).warnings
    assert len([one for one in said if one == "Busy."]) == 1
