"""The forward step of a GPT pretraining job: batch, model, loss. Megatron calls `forward_step`."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_hybrid_data_context_parallel_groups
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

from malleus_megatron.adapter.gpt_data import predicts_tokens

SPIKE_FACTOR = 10
"""A loss that many times the largest one so far is a spike."""

Batch = dict[str, Any]
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

FIELDS = (
    *("tokens", "labels", "loss_mask", "attention_mask", "position_ids"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"),
)

straggler_timer = StragglerDetector()


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], Loss]]:
    """Run the model on the next micro-batch.

    Returns:
        The losses of its tokens (or a later stage's input), and what makes of them the loss.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = _packed_sequences(batch)
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with straggler_timer:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=packed)
    return output, partial(loss_function, batch["loss_mask"], model=model)


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None = None) -> Batch:
    """Read a micro-batch on TP rank 0 and give the TP group what this stage needs of it.

    Returns:
        All FIELDS, tensors of [micro-batch size, sequence length]; None for what is not needed.
    """
    args = get_args()
    needs_mtp = predicts_tokens(core_transformer_config_from_args(args), vp_stage)
    is_packed = args.sft or args.dataloader_inter_document_masking
    sees_tokens = is_first_or_last_pipeline_stage(vp_stage) or needs_mtp
    if not sees_tokens and not is_packed:
        return dict.fromkeys(FIELDS)
    batch = flatten_batch_for_packed_sequences(_shared_batch(data_iterator, args, needs_mtp))
    if not sees_tokens:
        lengths = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        return dict.fromkeys(FIELDS) | {name: batch[name] for name in lengths}
    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return {name: batch[name] for name in FIELDS}


def _shared_batch(data_iterator: Iterator[Batch] | None, args: Any, needs_mtp: bool) -> Batch:
    """TP rank 0's next micro-batch, on every rank of the TP group."""
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        batch = dict(sample) | {name: _on_gpu(sample.get(name)) for name in FIELDS}
    shared: Batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.sft or args.dataloader_inter_document_masking,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=needs_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return shared


def _on_gpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cuda(non_blocking=True)


def _packed_sequences(batch: Batch) -> PackedSeqParams | None:
    """Where the sequences of a packed batch begin, for attention and for the FLOPs count."""
    if batch["cu_seqlens"] is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(real)
    starts = real if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    local_cp_size = batch["local_cp_size"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if local_cp_size is None else int(local_cp_size.item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )


def loss_function(loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None) -> Loss:
    """Sum the losses of the tokens that count.

    Returns:
        The sum, the number of tokens in it, and both of them to be reported as "lm loss".
    """
    args = get_args()
    if args.logits_load_dir is not None:
        loss, num_tokens, report = _distillation_loss()(loss_mask, output, model=model)
    else:
        mask = loss_mask.view(-1).float()
        loss = torch.sum(output.view(-1).float() * mask)
        num_tokens = mask.sum().clone().detach().to(torch.int)
        report = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}
    _validate(loss, args)
    return loss, num_tokens, report


@lru_cache(maxsize=1)
def _distillation_loss() -> Any:
    """The loss against a teacher's logits on disk; its reader is made once a process."""
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    return LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )


def _validate(loss: torch.Tensor, args: Any) -> None:
    """Let the rerun machine look at the loss before it is averaged with others.

    The forward pass is deterministic, so a second run must give the same loss: tolerance 0.
    """
    machine = get_rerun_state_machine()
    checks: list[tuple[Callable[[torch.Tensor], Any], str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks.append((torch.isnan, "found NaN in local forward loss calculation", True))
        checks.append((torch.isinf, "found Inf in local forward loss calculation", True))
    if args.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        checks.append((is_spike, "Spiky loss", False))
    for is_rejected, message, fatal in checks:
        machine.validate_result(
            result=loss, rejection_func=is_rejected, message=message, tolerance=0.0, fatal=fatal
        )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold a copy of the word embedding, in order."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
