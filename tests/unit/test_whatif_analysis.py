"""What-if analysis on pipelines whose critical path is known."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_megatron.whatif.analysis import Analysis, analyse
from malleus_megatron.whatif.document import to_json
from malleus_megatron.whatif.replay import replay
from malleus_megatron.whatif.report import to_text
from malleus_megatron.whatif.workers import THRESHOLD
from tests.unit.whatif_pipeline import Pipelines, slower, steady, to_rows

FEW = settings(max_examples=12)
"""Each example plays a whole job."""


def analysed(job: Pipelines) -> Analysis:
    return analyse(to_rows(job.rows()))


def heavy(stage: int, factor: float, job: Pipelines) -> Pipelines:
    for dp_rank in range(job.num_pipelines):
        job = slower(job, dp_rank, stage, factor)
    return job


def noisy(job: Pipelines, share: float, seed: int = 0) -> Pipelines:
    """Every compute operation up to `share` longer or shorter, at random but reproducibly."""

    def time_of(kind: str, *place: int) -> float:
        generator = np.random.default_rng([seed, len(kind), *place])
        return job.time_of(kind, *place) * (1 + share * generator.uniform(-1, 1))

    return dataclasses.replace(job, time_of=time_of)


def test_two_pipelines_of_one_stage_of_which_one_is_slow_are_known_by_hand() -> None:
    # Two micro-batches of 1 + 2 s: pipeline 0 takes 6 s, pipeline 1 at half speed 12 s; mean 9 s.
    job = slower(Pipelines(num_stages=1, num_microbatches=2), 1, 0, 2.0)
    found = analysed(job)
    assert found.what_if.step_time_s == pytest.approx(12)
    assert found.what_if.ideal_step_time_s == pytest.approx(9)
    assert found.by_dp_rank == pytest.approx((1, 4 / 3))
    assert found.m_w == pytest.approx(1)
    [straggler] = found.stragglers
    assert (straggler.dp_rank, straggler.stage) == (1, 0)
    assert straggler.rate == pytest.approx(2)


def test_a_heavy_last_stage_is_known_by_hand() -> None:
    # 1F1B of two micro-batches: stage 0 waits for B0 until 7 s and for B1 until 13 s: 15 s in all.
    # With the means, 1.5 s and 3 s, (2 + 2 - 1) x 4.5 s.
    job = heavy(1, 2.0, Pipelines(num_pipelines=1, num_microbatches=2))
    found = analysed(job)
    assert found.what_if.step_time_s == pytest.approx(15)
    assert found.what_if.ideal_step_time_s == pytest.approx(13.5)
    assert found.m_s > 1
    assert not found.stragglers
    assert found.diagnosis.startswith("The last stage (stage 1) is too heavy")
    assert "one pipeline cannot show" in found.diagnosis


def test_waiting_for_peers_is_not_communication() -> None:
    # Pipeline 0 waits 6 s in the collective of 0.5 s; that time is pipeline 1's computing.
    job = slower(Pipelines(num_stages=1, num_microbatches=2, grads_s=0.5), 1, 0, 2.0)
    found = analysed(job)
    assert found.what_if.step_time_s == pytest.approx(12.5)
    assert found.what_if.ideal_step_time_s == pytest.approx(9.5)
    assert found.by_operation["grads-reduce-scatter"] == pytest.approx(1)


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 4, 2), (3, 2, 5), (2, 4, 8), (2, 3, 1)])
def test_a_replay_with_the_real_times_is_the_trace(shape: tuple[int, int, int]) -> None:
    num_pipelines, num_stages, num_microbatches = shape
    job = Pipelines(
        num_pipelines=num_pipelines,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        transfer_s=0.1,
        grads_s=0.3,
    )
    found = analysed(noisy(job, 0.3))
    measured_s = found.what_if.trace.measured_step_s()
    assert found.what_if.step_time_s == pytest.approx(measured_s.mean())
    assert found.causes.gaps == pytest.approx(1)
    again = replay(found.what_if.events, found.what_if.work_s)
    assert again.start_s == pytest.approx(found.what_if.trace.start_s)
    assert again.end_s == pytest.approx(found.what_if.trace.end_s)


@FEW
@given(
    dp_rank=st.integers(0, 3),
    stage=st.integers(0, 2),
    rate=st.floats(1.3, 6.0),
    seed=st.integers(0, 5),
)
def test_exactly_the_slow_worker_is_named(dp_rank: int, stage: int, rate: float, seed: int) -> None:
    healthy = noisy(Pipelines(num_pipelines=4, num_stages=3, grads_s=0.1), 0.02, seed)
    found = analysed(slower(healthy, dp_rank, stage, rate))
    assert [(s.dp_rank, s.stage) for s in found.stragglers] == [(dp_rank, stage)]
    assert found.stragglers[0].rate == pytest.approx(rate, rel=0.05)
    assert found.by_worker.argmax() == stage * 4 + dp_rank
    assert found.m_w > 0.9
    assert found.diagnosis.startswith("A slow GPU")
    assert f"(dp {dp_rank}, stage {stage})" in found.diagnosis


@FEW
@given(
    num_pipelines=st.integers(1, 4),
    num_stages=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    seed=st.integers(0, 5),
)
def test_a_healthy_job_has_no_slowdown_and_nobody_is_named(
    num_pipelines: int, num_stages: int, num_microbatches: int, seed: int
) -> None:
    job = Pipelines(
        num_pipelines=num_pipelines,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        transfer_s=0.01,
        grads_s=0.1,
    )
    found = analysed(noisy(job, 0.01, seed))
    assert found.what_if.slowdown == pytest.approx(1, abs=0.02)
    assert not found.stragglers
    assert (found.m_w, found.m_s) == (0, 0)
    assert found.diagnosis.startswith("Nothing holds the job up")


@FEW
@given(scale=st.floats(1e-6, 1e6))
def test_the_unit_of_time_does_not_matter(scale: float) -> None:
    rows = slower(Pipelines(transfer_s=0.2, grads_s=0.3), 1, 0, 1.7).rows()
    scaled = [(*row[:5], row[5] * scale, row[6] * scale) for row in rows]
    found, again = analyse(to_rows(rows)), analyse(to_rows(scaled))
    assert again.what_if.slowdown == pytest.approx(found.what_if.slowdown)
    assert again.what_if.step_time_s == pytest.approx(scale * found.what_if.step_time_s)
    assert again.by_operation == pytest.approx(found.by_operation)
    assert again.stragglers[0].rate == pytest.approx(found.stragglers[0].rate)
    assert again.diagnosis == found.diagnosis


@FEW
@given(order=st.permutations(range(4)), seed=st.integers(0, 5))
def test_renamed_pipelines_give_renamed_results(order: list[int], seed: int) -> None:
    job = noisy(Pipelines(num_pipelines=4, transfer_s=0.1, grads_s=0.2), 0.2, seed)
    rows = slower(job, 2, 1, 2.0).rows()
    renamed = [(order[row[0]], *row[1:]) for row in rows]
    found, again = analyse(to_rows(rows)), analyse(to_rows(renamed))
    assert again.what_if.slowdown == pytest.approx(found.what_if.slowdown)
    assert again.by_worker[:, order] == pytest.approx(found.by_worker)
    assert again.m_w == pytest.approx(found.m_w)
    assert [(s.dp_rank, s.stage) for s in again.stragglers] == [
        (order[s.dp_rank], s.stage) for s in found.stragglers
    ]


@FEW
@given(seed=st.integers(0, 20))
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    rows = slower(Pipelines(num_pipelines=2), 1, 1, 2.0).rows()
    shuffled = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    assert to_json(analyse(to_rows(shuffled))) == to_json(analyse(to_rows(rows)))


def test_several_slow_gpus_are_all_named() -> None:
    job = noisy(Pipelines(num_pipelines=6, num_stages=2, grads_s=0.1), 0.02)
    found = analysed(slower(slower(job, 1, 0, 1.5), 4, 1, 3.0))
    assert [(s.dp_rank, s.stage) for s in found.stragglers] == [(4, 1), (1, 0)]
    assert found.diagnosis.startswith("Slow GPUs")
    for worker in ("(dp 4, stage 1)", "(dp 1, stage 0)"):
        assert worker in found.diagnosis


def test_a_heavy_stage_names_no_gpu() -> None:
    job = noisy(Pipelines(num_pipelines=2, num_stages=4, num_microbatches=8), 0.02)
    found = analysed(heavy(2, 1.6, job))
    assert not found.stragglers
    assert found.diagnosis.startswith("Stage 2 is too heavy")
    assert "1.6" in found.diagnosis


def test_only_compute_time_decides_where_step_times_are_equal() -> None:
    """0.2 s more in one rank's backward: the collective makes all workers' steps equally long."""

    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        return (0.03 if kind == "forward" else 0.06) + 0.2 * (kind == "backward" and dp_rank == 2)

    job = Pipelines(num_pipelines=4, num_stages=1, num_microbatches=1, time_of=time_of, grads_s=0.1)
    found = analysed(job)
    assert [(s.dp_rank, s.stage) for s in found.stragglers] == [(2, 0)]


def test_a_gpu_that_becomes_slow_later_is_named_with_its_steps() -> None:
    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        slow = 2.5 if (dp_rank, stage) == (1, 1) and step >= 17 else 1.0
        return slow * steady(kind, step, dp_rank, stage, microbatch)

    found = analysed(Pipelines(num_pipelines=3, steps=range(10, 22), time_of=time_of))
    assert [(s.first_step, s.last_step) for s in found.stragglers] == [(17, 21)]
    assert found.stragglers[0].rate == pytest.approx(2.5)
    assert "from step 17 to 21" in found.diagnosis


def test_one_slow_step_is_no_straggler() -> None:
    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        slow = 2.5 if (dp_rank, stage) == (1, 1) and step == 17 else 1.0
        return slow * steady(kind, step, dp_rank, stage, microbatch)

    found = analysed(Pipelines(num_pipelines=3, steps=range(10, 22), time_of=time_of))
    assert not found.stragglers


def lengths(step: int, dp_rank: int, microbatch: int) -> float:
    return float(np.random.default_rng([step, dp_rank, microbatch]).choice([0.6, 1.0, 1.4]))


@pytest.mark.parametrize("num_steps", [1, 3, 12, 40])
def test_unequal_sequence_lengths_are_told_from_slow_gpus(num_steps: int) -> None:
    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        work_s = steady(kind, step, dp_rank, stage, microbatch)
        return work_s * lengths(step, dp_rank, microbatch)

    job = Pipelines(num_pipelines=8, steps=range(num_steps), time_of=time_of, grads_s=0.1)
    found = analysed(job)
    assert not found.stragglers
    assert found.causes.correlation == pytest.approx(1)
    assert found.diagnosis.startswith("Unequal sequence lengths")


def test_a_slow_gpu_is_named_among_unequal_sequence_lengths() -> None:
    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        work_s = steady(kind, step, dp_rank, stage, microbatch)
        return work_s * lengths(step, dp_rank, microbatch)

    job = Pipelines(num_pipelines=4, num_microbatches=8, steps=range(20), time_of=time_of)
    found = analysed(slower(job, 3, 0, 2.5))
    assert [(s.dp_rank, s.stage) for s in found.stragglers] == [(3, 0)]
    assert found.diagnosis.startswith("A slow GPU")


def test_times_that_vary_without_pattern_are_not_called_lengths() -> None:
    found = analysed(noisy(Pipelines(num_pipelines=8, steps=range(12), grads_s=0.1), 0.5))
    assert found.causes.correlation < 0.3
    assert found.diagnosis.startswith("Micro-batches take unequal times")


def test_rare_long_operations_are_pauses() -> None:
    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        paused = kind == "forward" and microbatch == 3 and step % 4 == dp_rank
        return steady(kind, step, dp_rank, stage, microbatch) + (12.0 if paused else 0.0)

    job = Pipelines(
        num_pipelines=4, num_microbatches=8, steps=range(12), time_of=time_of, grads_s=0.1
    )
    found = analysed(job)
    assert not found.stragglers
    assert found.diagnosis.startswith("Pauses: a few compute operations")


def test_long_operations_that_are_usual_are_no_pauses() -> None:
    def time_of(kind: str, step: int, dp_rank: int, stage: int, microbatch: int) -> float:
        long = np.random.default_rng([step, dp_rank, microbatch]).random() < 0.2
        return steady(kind, step, dp_rank, stage, microbatch) * (2.5 if long else 1.0)

    found = analysed(Pipelines(num_pipelines=6, steps=range(12), time_of=time_of, grads_s=0.1))
    assert found.causes.pauses == 1
    assert found.diagnosis.startswith("Unequal sequence lengths")


def test_transfers_that_are_at_times_slow_are_communication() -> None:
    job = Pipelines(steps=range(12), grads_s=0.5)
    rows = [
        (*row[:6], row[6] + (9.0 if row[3].startswith("grads") and row[2] % 3 == 0 else 0.0))
        for row in job.rows()
    ]
    found = analyse(to_rows(rows))
    assert found.diagnosis.startswith("Communication: above all grads-reduce-scatter")


def test_time_between_operations_is_said_and_not_blamed_on_anyone() -> None:
    found = analysed(Pipelines(grads_s=0.5, late_s=lambda _step: 3.0))
    assert found.what_if.slowdown == pytest.approx(1)
    assert found.causes.gaps > 1.15
    assert found.diagnosis.startswith("Pauses between operations")
    assert "longer than the replay" in to_text(found)


def test_gpus_below_the_threshold_are_uneven_and_not_stragglers() -> None:
    job = slower(Pipelines(num_pipelines=4, grads_s=0.1), 3, 1, THRESHOLD - 0.05)
    found = analysed(job)
    assert not found.stragglers
    assert found.diagnosis.startswith("Uneven GPUs")


def test_of_many_workers_each_is_judged_by_its_pipeline_and_its_stage() -> None:
    job = slower(
        Pipelines(num_pipelines=130, num_microbatches=1, steps=(1,), grads_s=0.1), 77, 1, 2.0
    )
    found = analysed(job)
    assert found.by_worker.size > 256
    assert found.by_worker.argmax() == 1 * 130 + 77
    assert found.by_worker[1, 77] == pytest.approx(min(found.by_stage[1], found.by_dp_rank[77]))


def test_the_text_says_what_the_document_says() -> None:
    found = analysed(slower(Pipelines(grads_s=0.1), 0, 1, 2.0))
    text, document = to_text(found), to_json(found)
    assert text.startswith(document["diagnosis"])
    assert f"slowdown {document['slowdown']:.3f}" in text
    assert "dp 0, stage 1" in text
    assert "rate 2.00" in text
    assert document["by_worker"][0]["dp_rank"] == 0
    assert document["by_worker"][0]["stage"] == 1
