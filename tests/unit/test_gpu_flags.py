"""A GPU recipe's command line, made fit for a CPU."""

import shlex

import pytest

from malleus_megatron.adapter.gpu_flags import FORCED, LEFT_OUT, REFUSED, for_cpu
from malleus_megatron.errors import BadInputError

FORCED_WORDS = [word for rule in FORCED for word in rule.words]


def rewritten(line: str) -> list[str]:
    """What is left of the line, without the words that stand on every one."""
    words = list(for_cpu(shlex.split(line)).arguments)
    tail = [word for rule in FORCED for word in rule.words if rule.words[0] not in line]
    assert words[len(words) - len(tail) :] == tail
    return words[: len(words) - len(tail)]


def refusal(line: str) -> str:
    with pytest.raises(BadInputError) as caught:
        for_cpu(shlex.split(line))
    return str(caught.value)


def test_defaults_that_need_a_gpu_are_overridden_at_the_end():
    line = for_cpu(["--lr", "1e-3"])
    assert line.arguments == ("--lr", "1e-3", *FORCED_WORDS)
    assert line.replaced == tuple(rule.instead_of for rule in FORCED)


def test_a_gpu_choice_loses_to_the_appended_one():
    words = list(for_cpu(["--distributed-backend", "nccl", "--transformer-impl=local"]).arguments)
    assert words[:3] == ["--distributed-backend", "nccl", "--transformer-impl=local"]
    assert words[words.index("gloo") - 1] == "--distributed-backend"


@pytest.mark.parametrize("said", ["--distributed-backend gloo", "--distributed-backend=gloo"])
def test_what_the_recipe_says_itself_is_neither_appended_nor_listed(said: str):
    line = for_cpu(said.split())
    assert "nccl → gloo" not in line.replaced
    assert " ".join(line.arguments).count("--distributed-backend") == 1


def test_a_recipe_that_says_both_gets_the_cpu_choice_last():
    line = for_cpu(shlex.split("--distributed-backend gloo --distributed-backend nccl"))
    assert line.arguments[4:6] == ("--distributed-backend", "gloo")
    assert "nccl → gloo" in line.replaced


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("--use-flash-attn --lr 1", "--lr 1"),
        ("--attention-backend flash --lr 1", "--lr 1"),
        ("--attention-backend=flash --lr 1", "--lr 1"),
        ("--high-priority-stream-groups dp_cp ep_dp --lr 1", "--lr 1"),
        ("data.txt --moe-grouped-gemm --lr 1", "data.txt --lr 1"),
        ("--moe-grouped-gemm data.txt", "data.txt"),
        ("--data-path 0.5 a 0.5 b --use-sharp", "--data-path 0.5 a 0.5 b"),
        ("--lr -1 --te-rng-tracker", "--lr -1"),
        ("--profile --profile-ranks 0 1", "--profile-ranks 0 1"),
        ("--profile --use-pytorch-profiler", "--profile --use-pytorch-profiler"),
        ("--recompute-modules core_attn moe_act", "--recompute-modules core_attn"),
        ("--recompute-modules moe_act --lr 1", "--lr 1"),
        ("--recompute-modules core_attn", "--recompute-modules core_attn"),
    ],
)
def test_flags_that_only_say_how_a_gpu_does_it_are_left_out(line: str, left: str):
    assert rewritten(line) == left.split()


def test_what_is_left_out_is_listed():
    replaced = for_cpu(shlex.split("--moe-grouped-gemm --gpu-sniff-test-interval 5")).replaced
    assert "--moe-grouped-gemm → sequential experts" in replaced
    assert "without --gpu-sniff-test-interval" in replaced


def test_all_offenders_stand_in_one_message():
    message = refusal("--fp8-format hybrid --lr 1 --cuda-graph-impl=local --tp-comm-overlap")
    assert "--fp8-format hybrid: FP8 needs a GPU" in message
    assert "--cuda-graph-impl=local: CUDA graphs need a GPU" in message
    assert "--tp-comm-overlap: userbuffers need a GPU" in message
    assert "--lr" not in message


@pytest.mark.parametrize(
    "line",
    [
        "--context-parallel-size 1",
        "--context-parallel-size 2 --context-parallel-size 1",
        "--cuda-graph-impl none",
        "--moe-token-dispatcher-type alltoall",
        "--exp-avg-dtype fp32 --use-precision-aware-optimizer",
        "--hybrid-layer-pattern *-*-",
        "--qk-l2-norm --num-experts 8",
        "--position-embedding-type rope",
        "--transformer-impl transformer_engine",
    ],
)
def test_harmless_values_pass(line: str):
    for_cpu(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--context-parallel-size 2",
        "--context-parallel-size=2",
        "--cuda-graph-impl transformer_engine",
        "--enable-cuda-graph",
        "--moe-token-dispatcher-type flex",
        "--exp-avg-dtype bf16",
        "--hybrid-layer-pattern M*M-",
        "--qk-l2-norm",
        "--position-embedding-type relative",
        "--transformer-impl inference_optimized",
        "--use-megatron-fsdp",
        "--sft",
    ],
)
def test_what_has_no_equivalent_is_refused_by_name(line: str):
    assert line.partition(" ")[0].partition("=")[0] in refusal(line)


def test_no_flag_stands_in_two_tables():
    refused = {rule.flag for rule in REFUSED}
    left_out = {rule.flag for rule in LEFT_OUT}
    assert len(refused) == len(REFUSED)
    assert len(left_out) == len(LEFT_OUT)
    assert not refused & left_out
    assert not left_out & {rule.words[0] for rule in FORCED}


def test_the_result_is_stable_under_a_second_pass():
    once = for_cpu(shlex.split("--bf16 --use-flash-attn --num-workers 8")).arguments
    assert for_cpu(once).arguments == (*once, "--num-workers", "0")
