"""Jobs through a trace: what every iteration takes, and when plans change."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.jobs import Job
from malleus_megatron.simulator.trace import Situation


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Iterations that take the same, half open."""

    from_iteration: int
    to_iteration: int
    step_time_s: float
    """Of each, the pause before it included."""
    pause_s: float = 0.0
    """The part of it in which the plan was changed."""

    @property
    def seconds(self) -> float:
        """Of the whole span."""
        return self.step_time_s * (self.to_iteration - self.from_iteration)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Another plan, with what it cost."""

    iteration: int
    """The first one under it."""
    waited_iterations: int
    """Since the rates changed."""
    pause_s: float
    moved_bytes: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trace as one policy goes through it."""

    policy: str
    spans: tuple[Span, ...]
    changes: tuple[PlanChange, ...] = ()

    @property
    def total_s(self) -> float:
        """All iterations and pauses."""
        return sum(span.seconds for span in self.spans)

    @property
    def pauses_s(self) -> float:
        """What changes of plan cost."""
        return sum(change.pause_s for change in self.changes)

    @property
    def num_iterations(self) -> int:
        """Of the trace."""
        return self.spans[-1].to_iteration - 1

    @property
    def mean_step_s(self) -> float:
        """Total over iterations."""
        return self.total_s / self.num_iterations


def replay(
    policy: str,
    job: Job,
    trace: Iterable[Situation],
    step_s: Callable[[Plan, Rates], float],
) -> Run:
    """Drive a job through a trace.

    Args:
        policy: Names the run.
        job: As it starts; it is used up.
        trace: Spans of equal rates, without gaps, from iteration 1.
        step_s: Seconds of a step under a plan and rates.
    """
    spans: list[Span] = []
    changes: list[PlanChange] = []
    pause_s = 0.0
    for situation in trace:
        iteration = situation.from_iteration
        now_s = step_s(job.plan, situation.rates)
        while iteration < situation.to_iteration:
            end = iteration + 1
            spans.append(_span(iteration, end, now_s, pause_s))
            pause_s = 0.0
            change = job.after(iteration, situation.rates)
            if change is not None:
                pause_s = change.pause_s
                now_s = step_s(change.plan, situation.rates)
                changes.append(
                    PlanChange(
                        iteration=end,
                        waited_iterations=end - situation.from_iteration,
                        pause_s=change.pause_s,
                        moved_bytes=change.moved_bytes,
                        plan=change.plan,
                    )
                )
            elif job.is_settled and end < situation.to_iteration:
                end = situation.to_iteration
                spans.append(_span(iteration + 1, end, now_s, 0.0))
            iteration = end
    return Run(policy=policy, spans=joined(spans), changes=tuple(changes))


def replay_known(policy: str, trace: Iterable[Situation], step_s: Callable[[Rates], float]) -> Run:
    """A run whose step time follows from the rates alone: a bound."""
    spans = [
        _span(each.from_iteration, each.to_iteration, step_s(each.rates), 0.0) for each in trace
    ]
    return Run(policy=policy, spans=joined(spans))


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours that take the same, without pauses, as one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if (
            last is not None
            and last.step_time_s == span.step_time_s
            and not (last.pause_s or span.pause_s)
        ):
            found[-1] = _span(last.from_iteration, span.to_iteration, span.step_time_s, 0.0)
        else:
            found.append(span)
    return tuple(found)


def _span(start: int, end: int, step_s: float, pause_s: float) -> Span:
    return Span(
        from_iteration=start, to_iteration=end, step_time_s=step_s + pause_s, pause_s=pause_s
    )
