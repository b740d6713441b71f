"""What-if analysis of a job whose plan is uneven: its pipelines have unlike stages or counts.

The published method asks how fast the job were, did all operations of a kind take the same time.
Under an uneven plan they are meant not to. The question here is: were all GPUs healthy, under this
plan? A compute operation then takes its real time over its worker's rate, and a transfer or
collective the median of its kind. Rates come from layer times that the GPUs measured themselves.

Each pipeline is replayed with dependencies of its own, without waiting for others; the step is
the slowest pipeline's. Gradient sums and gathers of a plan go over owners in all stages, so they
are taken to begin when the last worker of the job has come.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.whatif.operations import ACROSS_PIPELINES, COMMUNICATION, COMPUTE
from malleus_megatron.whatif.replay import replay
from malleus_megatron.whatif.rows import Flags, Floats, Rows
from malleus_megatron.whatif.steps import complete_steps
from malleus_megatron.whatif.trace import SkippedStep
from malleus_megatron.whatif.what_if import WhatIf
from malleus_megatron.whatif.workers import THRESHOLD

WORST_SHARE = 0.03
"""Workers that M_W repairs, rounded up."""

type Worker = tuple[int, int]
"""Data-parallel rank and stage."""
type RateOf = Mapping[Worker, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenAnalysis:
    """Answers to the questions that an uneven plan allows."""

    plan: Plan
    steps: tuple[int, ...]
    skipped: tuple[SkippedStep, ...]
    measured_step_time_s: float
    step_time_s: float
    """Replayed."""
    ideal_step_time_s: float
    """Replayed, were all GPUs healthy under this plan."""
    by_worker: dict[Worker, float]
    """Slowdown with this worker's operations real and all others ideal."""
    by_operation: dict[str, float]
    rates: RateOf
    """Of every worker."""
    m_w: float
    m_s: float
    stage_times_s: tuple[tuple[float, ...], ...]
    """Forward plus backward of one micro-batch, per pipeline and stage."""
    pipeline_times_s: tuple[float, ...]
    """Replayed: what each pipeline takes by itself."""

    @property
    def slowdown(self) -> float:
        """Step / ideal step."""
        return self.step_time_s / self.ideal_step_time_s

    @property
    def stragglers(self) -> list[tuple[Worker, float]]:
        """Workers above the threshold, the slowest first."""
        slow = [(worker, rate) for worker, rate in self.rates.items() if rate > THRESHOLD]
        return sorted(slow, key=lambda found: -found[1])


def is_uneven(plan: Plan) -> bool:
    """Whether its pipelines differ in micro-batches, or in a stage's layers or TP degree."""
    shapes = {
        (
            pipeline.num_microbatches,
            tuple((len(stage.gpus), stage.num_layers) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    }
    return len(shapes) > 1


def analyse_uneven(rows: Rows, plan: Plan, rates: RateOf) -> UnevenAnalysis:
    """Replay each pipeline of the plan, with real times and with those of healthy GPUs.

    Args:
        rows: Of steps under this plan.
        plan: That they ran under.
        rates: Of the workers; one that is not there is healthy.

    Raises:
        BadInputError: no step is complete in all pipelines, or one shows no pipeline schedule.
    """
    traces = [complete_steps(rows_of(rows, dp_rank)) for dp_rank in _dp_ranks(rows, plan)]
    asked = [WhatIf.of(trace) for trace in traces]
    steps = sorted(set.intersection(*(set(one.trace.steps) for one in asked)))
    if not steps:
        raise BadInputError("no step is complete in all pipelines.")
    return _Question(rows, plan, rates, asked, tuple(steps)).answer()


def rows_of(rows: Rows, dp_rank: int) -> Rows:
    """One pipeline's rows as those of a job of one pipeline; collectives without their waiting."""
    start_s, duration_s = _without_waiting(rows)
    own = rows.dp_rank == dp_rank
    return replace(
        rows,
        dp_rank=np.zeros(int(own.sum()), dtype=np.int64),
        start_s=start_s[own],
        duration_s=duration_s[own],
        **{name: getattr(rows, name)[own] for name in ("stage", "step", "kind", "number", "chunk")},
    )


def _without_waiting(rows: Rows) -> tuple[Floats, Floats]:
    """Starts and durations; a collective over pipelines starts when its last member has come."""
    across = np.isin(rows.kind, [rows.kinds.index(k) for k in ACROSS_PIPELINES & {*rows.kinds}])
    start_s, end_s = rows.start_s.copy(), rows.start_s + rows.duration_s
    keys = np.stack([rows.step, rows.kind, rows.number])[:, across]
    _, group = np.unique(keys, axis=1, return_inverse=True)
    latest_s = np.full(int(group.max(initial=-1)) + 1, -math.inf)
    np.maximum.at(latest_s, group, start_s[across])
    start_s[across] = np.minimum(latest_s[group], end_s[across])
    return start_s, end_s - start_s


def _dp_ranks(rows: Rows, plan: Plan) -> range:
    expected = range(len(plan.pipelines))
    found = {int(dp_rank) for dp_rank in np.unique(rows.dp_rank)}
    if found != {*expected}:
        raise BadInputError(
            f"it has dp ranks {sorted(found)}; its plan has {len(plan.pipelines)} pipelines."
        )
    return expected


class _Question:
    """Pipelines with their real and their ideal times, of the steps that all of them have."""

    def __init__(
        self, rows: Rows, plan: Plan, rates: RateOf, asked: Sequence[WhatIf], steps: tuple[int, ...]
    ) -> None:
        self.rows, self.plan, self.asked, self.steps = rows, plan, asked, steps
        self.rates = {
            (dp_rank, stage): max(1.0, rates.get((dp_rank, stage), 1.0))
            for dp_rank, one in enumerate(asked)
            for stage in range(one.trace.num_stages)
        }
        kept = [np.isin(one.trace.steps, steps) for one in asked]
        self.work_s = [one.work_s[:, keep] for one, keep in zip(asked, kept, strict=True)]
        self.usual_s = self._medians()
        self.ideal_s = [self._ideal(dp_rank) for dp_rank in range(len(asked))]

    def answer(self) -> UnevenAnalysis:
        real_s, ideal_s = self._step_s(self.work_s), self._step_s(self.ideal_s)
        if not ideal_s > 0:
            raise BadInputError("none of its operations takes any time.")
        by_worker = {
            worker: self._step_s(self._mixed(self.ideal_s, self.work_s, [worker])) / ideal_s
            for worker in self.rates
        }
        worst = sorted(by_worker, key=lambda worker: -by_worker[worker])
        last = [(dp_rank, one.trace.num_stages - 1) for dp_rank, one in enumerate(self.asked)]
        within = np.isin(self.rows.step, self.steps)
        return UnevenAnalysis(
            plan=self.plan,
            steps=self.steps,
            skipped=self._skipped(),
            measured_step_time_s=self._measured_s(within),
            step_time_s=real_s,
            ideal_step_time_s=ideal_s,
            by_worker=by_worker,
            by_operation=self._by_operation(ideal_s),
            rates=self.rates,
            m_w=self._share(worst[: math.ceil(WORST_SHARE * len(worst))], real_s, ideal_s),
            m_s=self._share(last, real_s, ideal_s),
            stage_times_s=tuple(
                tuple(
                    float(sum(np.median(work_s[one.trace.of(stage, kind)]) for kind in COMPUTE))
                    for stage in range(one.trace.num_stages)
                )
                for one, work_s in zip(self.asked, self.work_s, strict=True)
            ),
            pipeline_times_s=tuple(
                float(replay(one.events, work_s).step_s.mean())
                for one, work_s in zip(self.asked, self.work_s, strict=True)
            ),
        )

    def _medians(self) -> dict[str, float]:
        """Of each kind of communication, over all pipelines."""
        found: dict[str, list[Floats]] = {}
        for one, work_s in zip(self.asked, self.work_s, strict=True):
            for index, operation in enumerate(one.trace.operations):
                if operation.kind in COMMUNICATION:
                    found.setdefault(operation.kind, []).append(work_s[index].ravel())
        return {kind: float(np.median(np.concatenate(values))) for kind, values in found.items()}

    def _ideal(self, dp_rank: int) -> Floats:
        ideal_s: Floats = self.work_s[dp_rank].copy()
        for index, operation in enumerate(self.asked[dp_rank].trace.operations):
            if operation.kind in COMMUNICATION:
                ideal_s[index] = self.usual_s[operation.kind]
            elif operation.kind in COMPUTE:
                ideal_s[index] /= self.rates[dp_rank, operation.stage]
        return ideal_s

    def _step_s(self, times_s: Sequence[Floats]) -> float:
        """Mean over the steps of the slowest pipeline's replay."""
        replayed = [
            replay(one.events, own_s).step_s for one, own_s in zip(self.asked, times_s, strict=True)
        ]
        return float(np.max(replayed, axis=0).mean())

    def _mixed(
        self, base: Sequence[Floats], other: Sequence[Floats], workers: Sequence[Worker]
    ) -> list[Floats]:
        """The times of `base`, and for these workers those of `other`."""
        mixed = [own_s.copy() for own_s in base]
        for dp_rank, stage in workers:
            where: Flags = self.asked[dp_rank].trace.where_stage(stage)
            mixed[dp_rank][where] = other[dp_rank][where]
        return mixed

    def _share(self, workers: Sequence[Worker], real_s: float, ideal_s: float) -> float:
        """Of the lost time, what comes back with these workers ideal; 0: nothing is lost."""
        if real_s - ideal_s < 0.03 * ideal_s:
            return 0.0
        mended_s = self._step_s(self._mixed(self.work_s, self.ideal_s, workers))
        return (real_s - mended_s) / (real_s - ideal_s)

    def _by_operation(self, ideal_s: float) -> dict[str, float]:
        kinds = {o.kind for one in self.asked for o in one.trace.operations}
        found = {}
        for kind in sorted(kinds & {*COMPUTE, *COMMUNICATION}):
            times_s = [own_s.copy() for own_s in self.ideal_s]
            for one, own_s, work_s in zip(self.asked, times_s, self.work_s, strict=True):
                where = one.trace.where_kind({kind})
                own_s[where] = work_s[where]
            found[kind] = self._step_s(times_s) / ideal_s
        return found

    def _measured_s(self, within: Flags) -> float:
        step, start_s = self.rows.step[within], self.rows.start_s[within]
        end_s = start_s + self.rows.duration_s[within]
        return float(
            np.mean([end_s[step == one].max() - start_s[step == one].min() for one in self.steps])
        )

    def _skipped(self) -> tuple[SkippedStep, ...]:
        reasons: dict[int, str] = {}
        for dp_rank, one in enumerate(self.asked):
            for skip in one.trace.skipped:
                reasons.setdefault(skip.step, f"pipeline {dp_rank}: {skip.reason}")
        return tuple(SkippedStep(step=s, reason=reasons[s]) for s in sorted(reasons))
