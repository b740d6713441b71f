"""The data of a GPT pretraining job, from Megatron's flags: mock, indexed, blended, FIM, SFT."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Build the train, validation and test data.

    Args:
        num_samples: How many samples each of the three needs.
        vp_stage: The virtual pipeline stage that asks.
    """
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    builder = BlendedMegatronDatasetBuilder(
        dataset_class(args), num_samples, partial(is_built_here, vp_stage), dataset_config(args)
    )
    datasets = builder.build()
    print_rank_0("> finished creating GPT datasets ...")
    return tuple(datasets)


# Every rank builds its own data (see is_built_here); without this mark only TP rank 0 would ask.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def dataset_class(args: Any) -> type:
    """The class of samples that the flags ask for."""
    if args.sft:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def is_built_here(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: TP rank 0 of the stages that see tokens or labels."""
    args = get_args()
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return args.sft or sees_tokens(core_transformer_config_from_args(args), vp_stage)


def sees_tokens(config: Any, vp_stage: int | None) -> bool:
    """True on the first and last stage, and where multi-token prediction needs the tokens."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_tokens(config, vp_stage)


def predicts_tokens(config: Any, vp_stage: int | None) -> bool:
    """True where a multi-token prediction layer lies."""
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Translate Megatron's flags into the settings of its GPT data."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    settings = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": build_tokenizer(args),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": _sequences_per_dataset(args.per_dataset_sequences_path),
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "inter_document_masking": args.dataloader_inter_document_masking,
        "hybrid_context_parallel": args.hybrid_context_parallel,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size if args.sequence_parallel else 0,
    }
    if args.fim_data:
        return GPTFIMDatasetConfig(**settings, **_fim_settings(args))
    return GPTDatasetConfig(**settings)


def _sequences_per_dataset(path: str | None) -> Any:
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _fim_settings(args: Any) -> dict[str, Any]:
    """Fill-in-the-middle: how often, and the tokens that mark the pieces."""
    names = ("prefix", "middle", "suffix", "pad", "eod")
    return {
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_split_sample": args.fim_split_sample,
        "fim_fragment_rate": args.fim_fragment_rate,
        "fim_no_prefix": args.fim_no_prefix,
        "fim_extra_tokens": {name: getattr(args, f"fim_{name}_token") for name in names},
    }
