"""A plan as text that a person reads: a picture of the pipelines and a table of the stages."""

from collections.abc import Sequence

from malleus_megatron.plan.plan import Pipeline, Plan

PICTURE_WIDTH = 64
"""Characters for all layers of a pipeline."""
MOST_STAGES = 60
"""A plan with more stages is shown without the table, alike pipelines once."""

MOST_PIPELINES_IN_SHORT = 8
"""One line names no more of them."""

_WHOLE_MIB = 1e5
"""From here on fractions say nothing."""


def render_plan(
    plan: Plan,
    stage_times_s: Sequence[Sequence[float]] | None = None,
    memory_mib: Sequence[Sequence[float]] | None = None,
) -> str:
    """Picture and table.

    Args:
        plan: The plan.
        stage_times_s: Per pipeline and stage, one micro-batch.
        memory_mib: Per pipeline and stage, of one GPU.
    """
    stages = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    head = (
        f"{len(plan.pipelines)} pipelines, {plan.num_layers} layers, "
        f"{plan.num_microbatches} micro-batches, {sum(len(p.gpus) for p in plan.pipelines)} GPUs "
        f"in use, {len(plan.standby)} on standby"
    )
    lines = [head, "", *_picture(plan), ""]
    if stages <= MOST_STAGES:
        lines += [*_table(plan, stage_times_s, memory_mib), ""]
    if plan.standby:
        lines.append(f"standby: GPU {gpu_ranges(plan.standby)}")
    return "\n".join(lines).rstrip() + "\n"


def in_short(plan: Plan) -> str:
    """One line: micro-batches x (GPUs:layers | ...) of each pipeline; alike ones once."""
    shown = [
        f"{pipeline.num_microbatches} x ("
        + " | ".join(f"{gpu_ranges(stage.gpus)}:{stage.num_layers}" for stage in pipeline.stages)
        + ")"
        for pipeline in plan.pipelines[:MOST_PIPELINES_IN_SHORT]
    ]
    more = len(plan.pipelines) - len(shown)
    if more:
        shown.append(f"{more} more pipelines")
    if plan.standby:
        shown.append(f"standby {gpu_ranges(plan.standby)}")
    return ", ".join(shown)


def in_mib(size_mib: float) -> str:
    """A size for a message, with the digits that a user may have given."""
    return f"{size_mib:.0f}" if size_mib >= _WHOLE_MIB else f"{size_mib:.6g}"


def gpu_ranges(gpus: Sequence[int]) -> str:
    """GPU numbers with runs put together: 0-3,6."""
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _picture(plan: Plan) -> list[str]:
    """Each pipeline as a bar of stages, as wide as their layers; `4x20` is TP 4, 20 layers."""
    lines: list[str] = []
    for number, pipeline in enumerate(plan.pipelines):
        bar = _bar(pipeline)
        if lines and lines[-1].endswith(bar):
            continue
        alike = [n for n, p in enumerate(plan.pipelines) if n >= number and _bar(p) == bar]
        run = 0
        while run < len(alike) and alike[run] == number + run:
            run += 1
        name = f"pipeline {number}" if run == 1 else f"pipelines {number}-{number + run - 1}"
        lines.append(f"{name:16} {bar}")
    return lines


def _bar(pipeline: Pipeline) -> str:
    boxes = []
    for stage in pipeline.stages:
        label = f"{len(stage.gpus)}x{stage.num_layers}"
        width = max(len(label), round(PICTURE_WIDTH * stage.num_layers / pipeline.num_layers))
        boxes.append(label.center(width, "="))
    return f"[{'|'.join(boxes)}] {pipeline.num_microbatches} micro-batches"


def _table(
    plan: Plan,
    stage_times_s: Sequence[Sequence[float]] | None,
    memory_mib: Sequence[Sequence[float]] | None,
) -> list[str]:
    width = max(
        [4, *(len(gpu_ranges(s.gpus)) for pipeline in plan.pipelines for s in pipeline.stages)]
    )
    head = f"pipeline stage {'GPUs':{width}} layers"
    head += "        time" if stage_times_s is not None else ""
    head += "     memory" if memory_mib is not None else ""
    lines = [head]
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            layers = f"{stage.layers[0]}-{stage.layers[1] - 1}"
            line = f"{number:8} {index:5} {gpu_ranges(stage.gpus):{width}} {layers:>6}"
            if stage_times_s is not None:
                line += f" {stage_times_s[number][index]:9.4g} s"
            if memory_mib is not None:
                line += f" {memory_mib[number][index]:6.0f} MiB"
            lines.append(line)
    return lines
