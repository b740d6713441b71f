"""Pretrain a GPT with every flag of Megatron-LM's own pretrain_gpt.py, and survive slow GPUs.

    torchrun --nproc-per-node 8 -m malleus_megatron.pretrain_gpt <the recipe's flags> [--malleus]

It is also the manual of how a script of your own takes part: `main` shows all there is to do.
"""

import sys
import time
from collections.abc import Sequence

from malleus_megatron.adapter import start
from malleus_megatron.errors import BadInputError

_MODELOPT = "megatron.post_training (ModelOpt)"

NOT_IN_THE_WHEEL = {
    "--export-": _MODELOPT,
    "--modelopt-enabled": _MODELOPT,
    "--enable-gpt-oss": _MODELOPT,
    "--finetune-hf-dataset": _MODELOPT,
    "--finetune-data-split": _MODELOPT,
    "--qad-train-target": _MODELOPT,
    "--freeze-base-for-mtp": _MODELOPT,
    "--perform-rl-step": "megatron.rl",
}
"""Flags (or how they begin) -> the code behind them, which only Megatron-LM's repository has."""


def main() -> None:
    """Prepare before Megatron is imported, install what wraps it, then train as always."""
    program_start_s = time.time()
    with start.one_message():
        refuse_missing_code(sys.argv[1:])
        started = start.prepare()
        start.install(started)
    with start.one_message(every_rank=True):
        train(program_start_s)


def refuse_missing_code(arguments: Sequence[str]) -> None:
    """Refuse what pretrain_gpt.py can only do inside Megatron-LM's repository.

    Raises:
        BadInputError: naming each such flag and the package behind it.
    """
    offenders = {
        word.partition("=")[0]: package
        for word in arguments
        for beginning, package in NOT_IN_THE_WHEEL.items()
        if word.startswith(beginning)
    }
    if offenders:
        listed = ", ".join(f"{flag} ({package})" for flag, package in offenders.items())
        raise BadInputError(
            f"These flags need code that is not in the megatron-core wheel: {listed}. Leave them "
            "out, or run your script from a Megatron-LM checkout with malleus_megatron.run."
        )


def train(program_start_s: float) -> None:
    """Parse Megatron's flags, describe the model, and hand over to `megatron.training.pretrain`.

    Args:
        program_start_s: When the program began, for Megatron's report of its start-up.
    """
    from megatron.core.enums import ModelType
    from megatron.core.package_info import __version__ as core_version
    from megatron.core.utils import get_te_version, get_torch_version
    from megatron.training import (
        inprocess_restart,
        pretrain,
        print_rank_0,
        set_startup_timestamps,
    )
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from malleus_megatron.adapter.gpt_data import datasets_provider
    from malleus_megatron.adapter.gpt_step import embedding_ranks, forward_step

    print_rank_0(f"> PyTorch version ................ {get_torch_version()}")
    print_rank_0(f"> Megatron-Core version .......... {core_version}")
    print_rank_0(f"> Transformer Engine version ..... {get_te_version()}")
    set_startup_timestamps(program_start=program_start_s, main_entry=time.time())
    restartable_pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    restartable_pretrain(
        config,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main()
