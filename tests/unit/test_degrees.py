"""TP degrees that a model's shape does not allow."""

import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.degrees import ModelWidths, check_degrees
from malleus_megatron.plan.plan import Pipeline, Plan, Stage


def plan(*degrees: int, layers: tuple[int, ...]) -> Plan:
    """One pipeline; a number of layers for each stage."""
    stages, gpu, layer = [], 0, 0
    for degree, count in zip(degrees, layers, strict=True):
        gpus = tuple(range(gpu, gpu + degree))
        stages.append(Stage(gpus=gpus, layers=(layer, layer + count)))
        gpu, layer = gpu + degree, layer + count
    return Plan(
        num_layers=layer,
        num_microbatches=1,
        pipelines=(Pipeline(num_microbatches=1, stages=tuple(stages)),),
    )


def widths(**changes: int) -> ModelWidths:
    values = {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 64,
        "padded_vocab_size": 128,
    }
    return ModelWidths(**(values | changes))


def test_degrees_that_divide_everything_are_taken() -> None:
    check_degrees(plan(1, 2, 4, layers=(1, 2, 1)), widths())
    check_degrees(
        plan(3, layers=(2,)),
        widths(num_attention_heads=6, num_query_groups=3, ffn_hidden_size=9, padded_vocab_size=3),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "TP degree 8, which does not divide the model's query groups 4"),
        ({"num_attention_heads": 4}, "attention heads 4, query groups 4"),
        ({"num_query_groups": 8, "ffn_hidden_size": 60}, "FFN hidden size 60"),
        ({"num_query_groups": 8, "seq_length": 36}, r"sequence length \(sequence parallelism\) 36"),
    ],
)
def test_a_degree_that_does_not_divide_is_named_with_the_numbers(
    changes: dict[str, int], said: str
) -> None:
    with pytest.raises(BadInputError, match=rf"Pipeline 0, stage 1 has .*{said}\. Give"):
        check_degrees(plan(2, 8, 1, layers=(1, 1, 1)), widths(**changes))


def test_only_what_a_stage_has_must_be_shared() -> None:
    """The vocabulary counts at both ends, the heads where there are layers."""
    check_degrees(plan(1, 4, 1, layers=(1, 1, 1)), widths(padded_vocab_size=126))
    check_degrees(plan(1, 8, layers=(2, 0)), widths())
    with pytest.raises(BadInputError, match="stage 0.*padded vocabulary size 126"):
        check_degrees(plan(4, 1, layers=(1, 1)), widths(padded_vocab_size=126))
