"""A user's own pretraining script: plain Megatron, written without any knowledge of the plugin."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def datasets(num_samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )

    def built_here():
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(
            vp_stage
        )

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def batch_of(data_iterator, vp_stage):
    """One micro-batch on every rank of the TP group; None on the middle stages."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
    shape = (args.micro_batch_size, args.seq_length)
    batch = {
        "tokens": torch.empty(shape, dtype=torch.int64, device="cuda"),
        "labels": torch.empty(shape, dtype=torch.int64, device="cuda"),
        "loss_mask": torch.empty(shape, dtype=torch.float32, device="cuda"),
        "position_ids": torch.empty(shape, dtype=torch.int64, device="cuda"),
    }
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        for name, tensor in batch.items():
            tensor.copy_(read[name])
    for tensor in batch.values():
        torch.distributed.broadcast(
            tensor,
            mpu.get_tensor_model_parallel_src_rank(),
            group=mpu.get_tensor_model_parallel_group(),
        )
    mask = torch.ones((1, 1, args.seq_length, args.seq_length), device="cuda")
    batch["attention_mask"] = torch.tril(mask) < 0.5
    return batch


def loss_of(loss_mask, output):
    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    tokens = mask.sum().detach().to(torch.int)
    get_rerun_state_machine().validate_result(
        result=loss,
        rejection_func=torch.isnan,
        message="NaN in the loss",
        tolerance=0.0,
        fatal=True,
    )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    batch = batch_of(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(loss_of, batch["loss_mask"])


def main():
    arguments = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
