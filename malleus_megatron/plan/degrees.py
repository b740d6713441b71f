"""Which TP degrees a model's shape allows."""

from dataclasses import dataclass

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWidths:
    """Everything of a dense decoder that a TP group shares out equally."""

    num_attention_heads: int
    num_query_groups: int
    """The number of heads where attention is not grouped."""
    ffn_hidden_size: int
    padded_vocab_size: int
    seq_length: int | None = None
    """With sequence parallelism; None without."""

    def allows(self, degree: int) -> bool:
        """Whether a stage of this TP degree could hold any part of the model."""
        sizes = [
            *(self.num_attention_heads, self.num_query_groups),
            *(self.ffn_hidden_size, self.padded_vocab_size),
            *(() if self.seq_length is None else (self.seq_length,)),
        ]
        return all(size % degree == 0 for size in sizes)


def check_degrees(plan: Plan, widths: ModelWidths) -> None:
    """Refuse a plan with a stage whose TP degree does not divide what its GPUs must share.

    Raises:
        BadInputError: the stage, its degree, and each number that does not divide.
    """
    for index, pipeline in enumerate(plan.pipelines):
        last = len(pipeline.stages) - 1
        for number, stage in enumerate(pipeline.stages):
            shares = _shares(stage, widths, has_vocabulary=number in (0, last))
            _check_stage(f"Pipeline {index}, stage {number}", len(stage.gpus), shares)


def _shares(stage: Stage, widths: ModelWidths, *, has_vocabulary: bool) -> dict[str, int]:
    shares: dict[str, int] = {}
    if stage.num_layers:
        shares["attention heads"] = widths.num_attention_heads
        shares["query groups"] = widths.num_query_groups
        shares["FFN hidden size"] = widths.ffn_hidden_size
    if has_vocabulary:
        shares["padded vocabulary size"] = widths.padded_vocab_size
    if widths.seq_length is not None:
        shares["sequence length (sequence parallelism)"] = widths.seq_length
    return shares


def _check_stage(where: str, degree: int, shares: dict[str, int]) -> None:
    wrong = [f"{name} {size}" for name, size in shares.items() if size % degree]
    if wrong:
        raise BadInputError(
            f"{where} has TP degree {degree}, which does not divide the model's "
            f"{', '.join(wrong)}. Give it a number of GPUs that does."
        )
