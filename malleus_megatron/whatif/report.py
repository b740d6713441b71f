"""An analysis as text that a person reads."""

from malleus_megatron.whatif.analysis import Analysis
from malleus_megatron.whatif.document import workers

MOST_LISTED = 8
"""Workers and skipped steps; of more, the rest is counted."""
POOR_REPLAY = 1.05
"""A measured step this much longer than its replay is said to be so."""


def to_text(analysis: Analysis) -> str:
    """Diagnosis first, then the numbers behind it."""
    what_if = analysis.what_if
    trace = what_if.trace
    lines = [
        analysis.diagnosis,
        "",
        f"{trace.num_pipelines} pipelines x {trace.num_stages} stages, {len(trace.steps)} steps"
        + (f", {len(trace.skipped)} steps left out" if trace.skipped else ""),
        f"step {what_if.step_time_s:.4g} s, ideal {what_if.ideal_step_time_s:.4g} s: "
        f"slowdown {what_if.slowdown:.3f}, {1 - 1 / what_if.slowdown:.1%} of the GPUs' time",
        f"explained by the worst 3 % of workers {analysis.m_w:.1%}, by the last stage "
        f"{analysis.m_s:.1%}",
        "",
        "slowdown by each alone",
        *_causes(analysis),
        "",
        *_table("operation", sorted(analysis.by_operation.items(), key=lambda item: -item[1])),
        "",
        *_stages(analysis),
        "",
        *_workers(analysis),
    ]
    if analysis.causes.gaps >= POOR_REPLAY:
        lines += [
            "",
            f"The measured step is {analysis.causes.gaps - 1:.1%} longer than the replay: time "
            "between operations, of which the slowdown knows nothing.",
        ]
    if trace.skipped:
        lines += ["", "left out"]
        lines += [f"  step {skip.step}: {skip.reason}" for skip in trace.skipped[:MOST_LISTED]]
        lines += _more(len(trace.skipped))
    return "\n".join(lines) + "\n"


def _causes(analysis: Analysis) -> list[str]:
    found = analysis.causes
    return [
        f"  slow GPUs {found.gpus:.3f}, heavy stages {found.stages:.3f}, unequal micro-batches "
        f"{found.microbatches:.3f}",
        f"  pauses {found.pauses:.3f}, communication {found.communication:.3f}, gaps between "
        f"operations {found.gaps:.3f}",
    ]


def _table(head: str, values: list[tuple[str, float]]) -> list[str]:
    width = max(len(head), *(len(name) for name, _ in values))
    return [
        f"{head:{width}}  slowdown",
        *(f"{name:{width}}  {value:8.3f}" for name, value in values),
    ]


def _stages(analysis: Analysis) -> list[str]:
    return [
        "stage  slowdown  a micro-batch",
        *(
            f"{stage:5}  {slowdown:8.3f}  {time_s:9.4g} s"
            for stage, (slowdown, time_s) in enumerate(
                zip(analysis.by_stage, analysis.stage_times_s, strict=True)
            )
        ),
    ]


def _workers(analysis: Analysis) -> list[str]:
    rates = {(slow.dp_rank, slow.stage): slow.rate for slow in analysis.stragglers}
    listed = workers(analysis)
    lines = ["worker               slowdown"]
    for dp_rank, stage, slowdown in listed[:MOST_LISTED]:
        line = f"{f'dp {dp_rank}, stage {stage}':19}  {slowdown:8.3f}"
        rate = rates.get((dp_rank, stage))
        lines.append(line + (f"  straggler, rate {rate:.2f}" if rate is not None else ""))
    return lines + _more(len(listed))


def _more(count: int) -> list[str]:
    return [f"  and {count - MOST_LISTED} more"] if count > MOST_LISTED else []
