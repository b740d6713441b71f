"""The flag tables of CPU mode against the parser of the installed Megatron."""

import argparse
import re

import pytest

from malleus_megatron.adapter.gpu_flags import FORCED, LEFT_OUT, LEFT_OUT_VALUES, REFUSED
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

RULED = {rule.flag for rule in LEFT_OUT} | {rule.flag for rule in REFUSED}

NARGS = {"none": 0, "one": None, "many": "+"}

GPU_WORDS = re.compile(
    r"cuda|nccl|fp8|fp4|(^|-)te(-|$)|transformer-engine|flash|fus(ion|ed|er)|gemm|stream|ub$"
    r"|sharp|offload|overlap|pin-|nvls|symmetric|gpu|energy|fsdp|profile|graph|(?<!conv-)kernel|context-par"
    r"|deepep|hybridep|ncclep|kitchen|mamba|stash|weight-shards|worker"
)

WITHOUT_EFFECT_ALONE = re.compile(
    r"^--(no-)?(tp-comm|fp8|fp4|kitchen|moe-(deepep|hybridep|ncclep|paged-stash)|dsa|keep-fp8"
    r"|(megatron-|torch-)?fsdp2?|strict-fsdp|cuda-graph|optimizer-offload|pin-cpu"
    r"|fine-grained-offloading|inference|rl|inprocess|mamba|profile|pytorch-profiler)-"
)
"""Settings of what is refused, left out or no pretraining (a profile needs its own flag)."""

AS_THEY_ARE = frozenset(
    # Sums and order are the same on gloo.
    "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step "
    "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush "
    "--moe-shared-expert-overlap --ddp-pad-buckets-for-high-nccl-busbw "
    # Fused by torch.compile on a GPU, plain functions here; or ways to switch a fusion off.
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-gradient-reduce-div-fusion --cross-entropy-loss-fusion --disable-jit-fuser "
    "--use-fused-weighted-squared-relu "
    # torch's own profiler runs on a CPU.
    "--use-pytorch-profiler "
    # Settings of something that is refused or left out, without effect alone.
    "--min-offloaded-tensor-size --delta-offload-bytes-across-pp-ranks "
    "--activation-offload-fraction --moe-router-padding-for-fp8 "
    "--moe-permute-fusion-into-hybridep --dist-ckpt-workers --no-stream-ckpt-dequant "
    # Megatron writes in the background with it alone; CPU mode has a writer of its own.
    "--use-persistent-ckpt-worker "
    # Generation, not pretraining; and the shapes of layers that a pattern without M never builds.
    "--flash-decode --nccl-all-reduce-for-prefill --decode-only-cuda-graphs "
    "--moe-pad-experts-for-cuda-graph-inference --disable-mamba-mem-eff-path".split()
)


def megatron_flags() -> dict[str, tuple[str, int | str | None]]:
    """Flag -> the first spelling of it, and the number of values that it takes."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {
        spelling: (action.option_strings[0], action.nargs)
        for action in parser._actions
        for spelling in action.option_strings
    }


@pytest.fixture(scope="module")
def flags() -> dict[str, tuple[str, int | str | None]]:
    found: dict[str, tuple[str, int | str | None]] = run_ranks(1, megatron_flags)[0]
    return found


def test_every_rule_names_a_flag_that_megatron_has(flags):
    named = RULED | {rule.words[0] for rule in FORCED}
    named |= {rule.flag for rule in LEFT_OUT_VALUES}
    named |= {rule.unless for rule in LEFT_OUT} | {rule.unless for rule in REFUSED}
    named.discard("")
    assert named - flags.keys() == set()


def test_what_is_left_out_takes_its_values_along(flags):
    for rule in LEFT_OUT:
        assert flags[rule.flag][1] == NARGS[rule.arity], rule.flag


def test_every_flag_that_sounds_like_a_gpu_has_been_thought_of(flags):
    ruled = RULED | {rule.words[0] for rule in FORCED}
    sounding = {first for flag, (first, _) in flags.items() if GPU_WORDS.search(flag.lstrip("-"))}
    unknown = sounding - ruled - AS_THEY_ARE
    assert {flag for flag in unknown if not WITHOUT_EFFECT_ALONE.match(flag)} == set()
    assert AS_THEY_ARE - flags.keys() == set()
    assert not AS_THEY_ARE & RULED
