"""Plans: of given shapes, and Hypothesis strategies for every shape that the format allows."""

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from malleus_megatron.plan.plan import (
    OBJECTIVES,
    Pipeline,
    Plan,
    PlanningNote,
    Prediction,
    Stage,
)

Shape = tuple[int, Sequence[tuple[Sequence[int], int]]]
"""Micro-batches of a pipeline, and GPUs and number of layers of each of its stages."""


def plan_of(*shapes: Shape, standby: Sequence[int] = ()) -> Plan:
    """The plan with pipelines of these shapes."""
    pipelines = []
    for num_microbatches, stages in shapes:
        ends = list(itertools.accumulate(layers for _, layers in stages))
        spans = itertools.pairwise([0, *ends])
        pipelines.append(
            Pipeline(
                num_microbatches=num_microbatches,
                stages=tuple(
                    Stage(gpus=tuple(gpus), layers=span)
                    for (gpus, _), span in zip(stages, spans, strict=True)
                ),
            )
        )
    return Plan(
        num_layers=pipelines[0].stages[-1].layers[1],
        num_microbatches=sum(pipeline.num_microbatches for pipeline in pipelines),
        pipelines=tuple(pipelines),
        standby=tuple(standby),
    )


times_s = st.none() | st.floats(min_value=0.0, max_value=1e9)
predictions = st.builds(
    Prediction,
    step_time_s=times_s,
    bottleneck=times_s,
    lower_bound=times_s,
    healthy_step_time_s=times_s,
    memory_mib=st.none()
    | st.lists(st.lists(st.floats(0, 1e6), max_size=3).map(tuple), max_size=2).map(tuple),
)
notes = st.builds(PlanningNote, seconds=st.floats(0, 1e4), seed=st.integers(0, 2**63))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with 1-4 pipelines of 1-3 stages, TP degrees 1-4, and GPUs in any order."""
    num_layers = draw(st.integers(1, 12))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    num_standby = draw(st.integers(0, 3))
    num_gpus = sum(map(sum, shapes)) + num_standby
    gpus = iter(draw(st.permutations(range(num_gpus))))
    pipelines = tuple(draw(_pipelines(num_layers, shape, gpus)) for shape in shapes)
    return Plan(
        num_layers=num_layers,
        num_microbatches=sum(pipeline.num_microbatches for pipeline in pipelines),
        pipelines=pipelines,
        standby=tuple(gpus),
        objective=draw(st.sampled_from(OBJECTIVES)),
        predicted=draw(st.none() | predictions),
        planning=draw(st.none() | notes),
    )


@st.composite
def _pipelines(
    draw: st.DrawFn, num_layers: int, degrees: list[int], gpus: Iterator[int]
) -> Pipeline:
    cuts = draw(
        st.lists(
            st.integers(0, num_layers), min_size=len(degrees) - 1, max_size=len(degrees) - 1
        ).map(sorted)
    )
    bounds = [0, *cuts, num_layers]
    return Pipeline(
        num_microbatches=draw(st.integers(1, 64)),
        stages=tuple(
            Stage(gpus=tuple(itertools.islice(gpus, degree)), layers=layers)
            for degree, layers in zip(degrees, itertools.pairwise(bounds), strict=True)
        ),
    )
