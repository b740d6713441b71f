"""Slow links: measured where a receiver waits, compared with links of the same kind."""

import random
from dataclasses import replace

import pytest

from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.whatif.joining import Joined, Recorded, Recording
from malleus_megatron.whatif.links import LASTS, Link, LinkNews, LinkTime, LinkWatch, link_times
from tests.unit.whatif_pipeline import Pipelines, slower

PLAN = nominal_plan(
    num_layers=4,
    num_microbatches=12,
    tensor_parallel_size=1,
    pipeline_parallel_size=2,
    data_parallel_size=3,
)
"""Stages are GPUs 0, 1, 2 and 3, 4, 5."""
ONE_NODE = dict.fromkeys(range(6), 0)
JOB = Pipelines(num_pipelines=3, num_stages=2, num_microbatches=4, steps=(1,), transfer_s=0.02)
EMPTY = Recording(operations=())


def operations(job: Pipelines) -> list[Joined]:
    return [
        Joined(dp_rank, stage, kind, number, start_s, start_s + duration_s)
        for dp_rank, stage, _, kind, number, start_s, duration_s in job.rows()
    ]


def measured(job: Pipelines, plan: Plan = PLAN) -> list[LinkTime]:
    return link_times(plan, operations(job), [EMPTY] * 6, ONE_NODE)


def test_a_transfer_takes_from_its_start_to_its_arrival_without_waiting() -> None:
    found = measured(JOB)
    assert [one.link for one in found] == [
        Link(gpus=(number,), peers=(number + 3,)) for number in range(3)
    ]
    assert [one.seconds for one in found] == [pytest.approx(0.02)] * 3
    assert len({one.kind for one in found}) == 1
    assert {one.transfers for one in found} == {8}


@pytest.mark.parametrize("worker", [(0, 0), (1, 1), (2, 0)])
def test_a_slow_gpu_makes_no_link_slow(worker: tuple[int, int]) -> None:
    """Its peers wait for it, and that is no transfer."""
    found = measured(slower(JOB, *worker, 5.0))
    assert [one.seconds for one in found] == [pytest.approx(0.02)] * 3
    watch = LinkWatch()
    assert not any(look(watch, found) for _ in range(2 * LASTS))


def test_links_inside_a_node_and_between_nodes_are_of_two_kinds() -> None:
    apart = {**ONE_NODE, 5: 1}
    kinds = [one.kind for one in link_times(PLAN, operations(JOB), [EMPTY] * 6, apart)]
    assert kinds[0] == kinds[1] != kinds[2]


def look(watch: LinkWatch, times: list[LinkTime], **changed: float) -> list[LinkNews]:
    return watch.look(times, **({"step_s": 10.0, "clock_error_s": 0.001} | changed))


def with_seconds(*seconds: float) -> list[LinkTime]:
    return [replace(one, seconds=own_s) for one, own_s in zip(measured(JOB), seconds, strict=True)]


SLOW = with_seconds(0.02, 0.1, 0.02)


def test_a_link_is_named_after_three_traced_iterations_and_once() -> None:
    watch = LinkWatch()
    told = [look(watch, SLOW) for _ in range(6)]
    assert [len(news) for news in told] == [0, 0, 1, 0, 0, 0]
    [news] = told[2]
    assert (news.link, news.is_slow) == (Link(gpus=(1,), peers=(4,)), True)
    assert news.seconds == 0.1
    assert news.usual_s == pytest.approx(0.02)
    assert str(news.link) == "between GPU 1 and GPU 4"


def test_a_link_that_comes_back_is_told_so() -> None:
    watch = LinkWatch()
    told = [news for times in [SLOW] * 3 + [measured(JOB)] * 4 for news in look(watch, times)]
    assert [(news.link.gpus, news.is_slow) for news in told] == [((1,), True), ((1,), False)]


def test_a_slow_iteration_now_and_then_is_none() -> None:
    watch = LinkWatch()
    for times in [SLOW, SLOW, measured(JOB)] * 5:
        assert not look(watch, times)


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"step_s": 100.0}, "0.64 s of a step of 100 s"), ({"clock_error_s": 0.09}, "the clocks")],
)
def test_what_does_not_matter_or_is_not_sure_is_not_told(
    changed: dict[str, float], why: str
) -> None:
    watch = LinkWatch()
    assert not any(look(watch, SLOW, **changed) for _ in range(6)), why


def test_of_two_links_the_slower_one_is_slow_and_one_alone_never() -> None:
    pair, alone = LinkWatch(), LinkWatch()
    assert [len(look(pair, SLOW[:2])) for _ in range(3)] == [0, 0, 1]
    assert not any(look(alone, SLOW[1:2]) for _ in range(6))


def test_noise_of_half_a_transfer_names_nobody() -> None:
    rng = random.Random(3)
    watch = LinkWatch()
    for _ in range(200):
        assert not look(watch, with_seconds(*(0.1 * rng.uniform(1, 1.5) for _ in range(3))))


def sums(start_s: float, end_s: float) -> Recording:
    return Recording(operations=(Recorded("grads-reduce-scatter", 0, start_s, end_s),))


def test_a_gradient_group_takes_from_the_last_members_start() -> None:
    plan = nominal_plan(
        num_layers=4,
        num_microbatches=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        data_parallel_size=2,
    )
    recordings = [sums(1.0, 5.1), sums(1.0, 6.0), sums(5.0, 5.1), sums(5.0, 6.0)]
    found = link_times(plan, [], recordings, ONE_NODE)
    assert [one.link for one in found] == [Link(gpus=(0, 2)), Link(gpus=(1, 3))]
    assert [one.seconds for one in found] == pytest.approx([0.1, 1.0])
    assert found[0].kind == found[1].kind
    watch = LinkWatch()
    told = [news for _ in range(3) for news in look(watch, found)]
    assert [str(news.link) for news in told] == ["among GPUs 1,3, which sum gradients"]


def test_first_and_last_stages_sum_more_than_others_and_are_no_peers_of_theirs() -> None:
    plan = nominal_plan(
        num_layers=4,
        num_microbatches=8,
        tensor_parallel_size=1,
        pipeline_parallel_size=4,
        data_parallel_size=2,
    )
    found = link_times(plan, [], [sums(0.0, 1.0)] * 8, dict.fromkeys(range(8), 0))
    kinds = [one.kind for one in found]
    assert kinds[1] == kinds[2]
    assert len({*kinds}) == 3
