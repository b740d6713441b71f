"""Recipe lines of the kinds found in Megatron-LM's examples and functional tests, small in size.

Each trains through `malleus_megatron.run` with a user's own script, as it stands (flags that only a
GPU can serve included), with and without --malleus: the same losses, bit for bit.
"""

from pathlib import Path

import pytest

from tests.harness.ranks import run_script
from tests.harness.training import (
    Grid,
    assert_same_training,
    read_lines,
    write_json,
    write_schedule,
)

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "user_script.py"
ITERATIONS = 3

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --split 99,1,0 --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000 --num-workers 0 --distributed-backend nccl "
    "--attention-dropout 0 --hidden-dropout 0 --distributed-timeout-minutes 1"
)
LLAMA = (
    "--use-mcore-models --transformer-impl transformer_engine --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --rotary-base 500000 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
)
GPT3 = "--use-mcore-models --init-method-std 0.006 --make-vocab-size-divisible-by 128 "

DENSE = {
    "gpt3 345m, tp1 pp2": (4, GPT3 + "--num-layers 4 --pipeline-model-parallel-size 2"),
    "gpt3 175b, tp2 dp2, sequence parallel": (
        4,
        GPT3 + "--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "llama3 8b, bf16, distributed optimizer, overlapped": (
        2,
        LLAMA + "--num-layers 2 --bf16 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
        "--attention-softmax-in-fp32 --no-gradient-accumulation-fusion",
    ),
    "llama, flash attention asked for": (
        2,
        LLAMA + "--num-layers 2 --bf16 --attention-backend flash --use-flash-attn",
    ),
    "full recompute, uniform": (
        4,
        LLAMA + "--num-layers 4 --pipeline-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "full recompute, block": (
        2,
        GPT3 + "--num-layers 4 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 2",
    ),
    "selective recompute": (
        4,
        GPT3 + "--num-layers 2 --tensor-model-parallel-size 2 --recompute-activations",
    ),
    "qk layernorm": (2, LLAMA + "--num-layers 2 --qk-layernorm"),
    "tied embeddings over two stages": (
        4,
        GPT3 + "--num-layers 4 --pipeline-model-parallel-size 2 --overlap-grad-reduce "
        "--bf16 --use-distributed-optimizer",
    ),
    "per-token loss": (2, LLAMA + "--num-layers 2 --calculate-per-token-loss"),
    "rerun machine validates": (2, GPT3 + "--num-layers 2 --rerun-mode validate_results"),
    "rerun machine off": (2, GPT3 + "--num-layers 2 --rerun-mode disabled"),
    "all timers and logs": (
        4,
        GPT3 + "--num-layers 4 --pipeline-model-parallel-size 2 --timing-log-level 2 "
        "--log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress "
        "--save checkpoints --save-interval 10",
    ),
    "uneven first stage": (
        4,
        GPT3 + "--num-layers 5 --pipeline-model-parallel-size 2 "
        "--decoder-first-pipeline-num-layers 2",
    ),
    "evaluation on the way": (2, GPT3 + "--num-layers 2 --eval-iters 2 --eval-interval 2"),
    "manual garbage collection, squared relu": (
        2,
        LLAMA.replace("--swiglu", "--squared-relu")
        + "--num-layers 2 --manual-gc --manual-gc-interval 2 --seed 42",
    ),
}
HELD_BACK = ("--log-params-norm",)
"""With these a recipe can be rebalanced only."""
MOE = (
    LLAMA + "--num-layers 2 --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss "
)
LOWER = {
    "virtual stages, overlapped": (
        4,
        GPT3 + "--num-layers 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2 --bf16 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather",
        "interleaved",
    ),
    "experts, allgather": (2, MOE + "--moe-token-dispatcher-type allgather", "experts"),
    "experts, alltoall": (2, MOE + "--moe-token-dispatcher-type alltoall", "experts"),
    "one pipeline, a diagnostic": (
        2,
        GPT3 + "--num-layers 2 --tensor-model-parallel-size 2 --log-params-norm",
        "one pipeline",
    ),
}


def run(world: int, recipe: str, folder: Path, *flags: str | Path, script: Path = SCRIPT) -> None:
    folder.mkdir()
    run_script(
        world,
        [
            *("-m", "malleus_megatron.run", str(script), *COMMON.split(), *recipe.split()),
            *("--train-iters", str(ITERATIONS), "--malleus-record", "losses.jsonl"),
            *flags,
        ],
        cwd=folder,
    )


def run_both(world: int, recipe: str, folder: Path) -> None:
    run(world, recipe, folder / "stock")
    run(world, recipe, folder / "malleus", "--malleus", "--malleus-log-dir", ".")
    assert_same_training(
        folder / "malleus" / "losses.jsonl", folder / "stock" / "losses.jsonl", relative=0
    )
    events = read_lines(folder / "malleus" / "events.jsonl")
    iterations = [event["iteration"] for event in events if event["event"] == "iteration"]
    assert iterations == list(range(1, ITERATIONS + 1))


def level_of(folder: Path) -> tuple[str, str]:
    events = read_lines(folder / "malleus" / "events.jsonl")
    level = next(event for event in events if event["event"] == "level")
    return level["level"], level["reason"]


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_recipe_trains_as_in_stock(name: str, tmp_path: Path) -> None:
    world, recipe = DENSE[name]
    run_both(world, recipe, tmp_path)
    held_back = any(word in recipe for word in HELD_BACK)
    assert level_of(tmp_path)[0] == ("rebalance" if held_back else "reshape")


@pytest.mark.parametrize("name", LOWER)
def test_what_cannot_be_rebalanced_trains_at_a_lower_level(name: str, tmp_path: Path) -> None:
    world, recipe, word = LOWER[name]
    run_both(world, recipe, tmp_path)
    level, reason = level_of(tmp_path)
    assert level == "observe"
    assert word in reason


def test_a_loss_that_is_a_mean_keeps_counts_equal(tmp_path: Path) -> None:
    """Found in the first iteration: the plan that was asked for at the second is not taken."""
    script = SCRIPT.with_name("mean_loss_script.py")
    recipe = GPT3 + "--num-layers 2"
    schedule = write_schedule(tmp_path, Grid(pipelines=2, num_layers=2), {2: (5, 3)})
    run(2, recipe, tmp_path / "stock", script=script)
    run(
        2,
        recipe,
        tmp_path / "malleus",
        *("--malleus", "--malleus-log-dir", ".", "--malleus-plan-schedule", schedule),
        script=script,
    )
    assert_same_training(
        tmp_path / "malleus" / "losses.jsonl", tmp_path / "stock" / "losses.jsonl", relative=0
    )
    events = read_lines(tmp_path / "malleus" / "events.jsonl")
    levels = [event["level"] for event in events if event["event"] == "level"]
    assert levels == ["reshape", "observe"]
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert any("5, 3" in message and "observe" in message for message in warnings), warnings
    assert not [event for event in events if event["event"] == "plan"]


def test_a_loss_that_is_a_mean_ends_a_plan_that_held_from_the_start(tmp_path: Path) -> None:
    plan = Grid(pipelines=1, stages=2, num_layers=2, num_microbatches=8).plan((8,))
    run(
        2,
        GPT3 + "--num-layers 2",
        tmp_path / "malleus",
        *("--malleus", "--malleus-log-dir", "."),
        *("--malleus-plan", write_json(tmp_path / "plan.json", plan)),
        script=SCRIPT.with_name("mean_loss_script.py"),
    )
    events = read_lines(tmp_path / "malleus" / "events.jsonl")
    levels = [event["level"] for event in events if event["event"] == "level"]
    assert levels == ["reshape", "observe"]
    steps = [event for event in events if event["event"] == "iteration"]
    assert [event["generation"] for event in steps] == [1, *[2] * (ITERATIONS - 1)]
    assert len({event["loss"] for event in steps}) == ITERATIONS


@pytest.mark.parametrize(
    "saving",
    ["", "--async-save --async-strategy mcore --use-persistent-ckpt-worker"],
    ids=["sync", "async"],
)
def test_a_job_resumes_under_malleus_as_in_stock(saving: str, tmp_path: Path) -> None:
    """Straight through, against two halves with a torch_dist checkpoint between them."""
    recipe = LLAMA + "--num-layers 2 --bf16 --use-distributed-optimizer --ckpt-format torch_dist "
    straight = recipe + "--lr-decay-iters 3 --exit-interval 3"
    run(2, straight, tmp_path / "straight")
    halves = straight + f" --save {tmp_path}/ckpt --load {tmp_path}/ckpt --save-interval 2 {saving}"
    under = ("--malleus", "--malleus-log-dir", ".")
    first = halves.replace("--exit-interval 3", "--exit-interval 2")
    run(2, first, tmp_path / "first", *under)
    run(2, halves, tmp_path / "second", *under)
    whole = read_lines(tmp_path / "straight" / "losses.jsonl")
    parts = read_lines(tmp_path / "first" / "losses.jsonl")
    parts += read_lines(tmp_path / "second" / "losses.jsonl")
    assert parts == whole
