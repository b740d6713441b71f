"""Under any sequence of splits, each step's samples are those of stock Megatron, in its order."""

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.microbatches import deal
from tests.harness.loaders import Numbered, Recipe, StockJob, build_as, iterate
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Counts of a plan, the pipeline of each GPU, and how much of its share each GPU reads."""

    counts: tuple[int, ...]
    pipelines: tuple[int | None, ...]
    read: float = 1.0


class Gpu:
    """One GPU of a job under changing plans."""

    def __init__(self, recipe: Recipe, rank: int, *, reads: bool = True) -> None:
        from malleus_megatron.adapter.data import Batches, NominalReader

        self.dataset = recipe.dataset()
        self.batches = Batches(
            self.dataset,
            recipe.consumed,
            build=build_as(recipe, rank),
            pause=contextlib.nullcontext,
            nominal=NominalReader(
                data_parallel_rank=rank, data_parallel_size=recipe.ranks, reads=reads
            ),
        )
        self._iterator = iterate(recipe, self.batches)

    def run(self, number: int, counts: tuple[int, ...], pipeline: int | None, read: float) -> Any:
        """The samples of each micro-batch of a step that this GPU reads."""
        self.batches.begin_step(number, counts, pipeline)
        if pipeline is None:
            return []
        share = round(counts[pipeline] * read)
        batches = []
        for _ in range(share):
            self.batches.begin_step(number, counts, pipeline)
            batches.append(next(self._iterator)["index"].tolist())
        return batches


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a process that has Megatron in its memory and forks its data workers."""
    return run_ranks(1, _with_fork, function, *arguments)[0]


def _with_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    multiprocessing.set_start_method("fork", force=True)
    return function(*arguments)


def check_job(recipe: Recipe, steps: Sequence[Step]) -> int:
    """Run stock and the plans side by side; the number of micro-batches that were compared."""
    stock = StockJob(replace(recipe, num_workers=0))
    gpus = [Gpu(recipe, i % recipe.ranks) for i in range(len(steps[0].pipelines))]
    compared = 0
    for number, step in enumerate(steps):
        expected = stock.step(sum(step.counts))
        owners = deal(step.counts)
        for gpu, pipeline in zip(gpus, step.pipelines, strict=True):
            mine = [batch for k, batch in enumerate(expected) if owners[k] == pipeline]
            read = gpu.run(number, step.counts, pipeline, step.read)
            assert read == mine[: len(read)], (recipe, step)
            compared += len(read)
    return compared


def placed(*counts: tuple[int, ...], gpus: int = 4) -> list[Step]:
    """GPU i in pipeline i; those beyond the last pipeline are on standby."""
    return [
        Step(counts=c, pipelines=tuple(i if i < len(c) else None for i in range(gpus)))
        for c in counts
    ]


UNEVEN = placed((2, 2, 2, 2), (5, 1, 1, 1), (5, 1, 1, 1), (1, 3, 2, 2), (2, 2, 2, 2))
GROWING = placed((1, 1, 1, 1), (2, 1, 3, 2), (4, 2, 6, 4), (4, 4, 4, 4), (2, 3, 6, 5))
RESHAPED = [
    *placed((2, 2, 2, 2), (4, 4), (3, 2, 3), (8,)),
    Step(counts=(2, 2, 2, 2), pipelines=(1, 0, 3, 2)),
    Step(counts=(5, 3), pipelines=(None, 1, 0, None)),
    *placed((2, 2, 2, 2)),
]


@pytest.mark.parametrize("steps", [UNEVEN, GROWING, RESHAPED], ids=["uneven", "growing", "shapes"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_samples_of_each_step_are_stocks(steps: list[Step], num_workers: int) -> None:
    total = sum(sum(step.counts) for step in steps)
    recipe = Recipe(size=2 * total + 4, ranks=4, num_workers=num_workers)
    assert in_fork(check_job, recipe, steps) == total


@pytest.mark.parametrize("data_sharding", [False, True])
def test_random_order_is_stocks_across_epochs(data_sharding: bool) -> None:
    """54 samples are 3 steps of 16 and a rest: the steps cross into the third epoch."""
    recipe = Recipe(
        size=54, ranks=4, loader_type="cyclic", num_workers=1, data_sharding=data_sharding
    )
    assert in_fork(check_job, recipe, [*UNEVEN, *RESHAPED]) == 8 * 12


def test_a_step_that_is_left_early_shifts_nothing() -> None:
    steps = [replace(step, read=read) for step in RESHAPED for read in (0.5, 1.0, 0.0)]
    compared = in_fork(check_job, Recipe(size=400, ranks=4, num_workers=1), steps)
    assert 8 * len(RESHAPED) < compared < 8 * len(steps)


recipes = st.builds(
    Recipe,
    size=st.integers(1, 90),
    ranks=st.integers(1, 4),
    loader_type=st.sampled_from(["single", "cyclic"]),
    micro_batch_size=st.integers(1, 3),
    eval_micro_batch_size=st.integers(1, 3),
    data_sharding=st.booleans(),
    validation=st.booleans(),
    full_validation=st.booleans(),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Recipe, list[Step]]:
    """A job whose stock loader does not fail, and steps of any number of pipelines."""
    recipe = draw(recipes)
    validation = recipe.validation or recipe.full_validation
    size = recipe.eval_micro_batch_size if validation else recipe.micro_batch_size
    turn = size * recipe.ranks
    turns = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    needed = turn if recipe.cycles else turn * sum(turns)
    consumed = turn * draw(st.integers(0, 4))
    recipe = replace(
        recipe,
        size=recipe.size + needed + (0 if recipe.cycles else consumed),
        consumed=0 if recipe.full_validation else consumed,
    )
    return recipe, [draw(steps_of(recipe.ranks * num_turns)) for num_turns in turns]


@st.composite
def steps_of(draw: st.DrawFn, total: int) -> Step:
    """A step of so many micro-batches, on 5 GPUs; a pipeline may have none."""
    num_pipelines = draw(st.integers(1, 5))
    cuts = draw(
        st.lists(st.integers(0, total), min_size=num_pipelines - 1, max_size=num_pipelines - 1)
    )
    edges = [0, *sorted(cuts), total]
    counts = tuple(end - begin for begin, end in itertools.pairwise(edges))
    seats = draw(st.permutations([i if i < num_pipelines else None for i in range(5)]))
    return Step(counts=counts, pipelines=tuple(seats), read=draw(st.sampled_from([1.0, 1.0, 0.5])))


def check_random_jobs() -> int:
    checked = []

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(jobs())
    def check(job: tuple[Recipe, list[Step]]) -> None:
        checked.append(check_job(*job))

    check()
    return sum(checked)


def test_random_splits_of_random_recipes_are_stocks() -> None:
    assert in_fork(check_random_jobs) > 1000


def wrong_small_orders() -> list[tuple[Recipe, int]]:
    """Recipes of small datasets, with the first micro-batch whose samples are not stock's."""
    from malleus_megatron.adapter.sample_order import order_of

    wrong = []
    for size, ranks, micro_batch_size, turns in itertools.product(
        range(1, 17), (1, 2, 4), (1, 2), range(7)
    ):
        turn = ranks * micro_batch_size
        recipe = Recipe(
            size=size,
            ranks=ranks,
            loader_type="cyclic",
            micro_batch_size=micro_batch_size,
            consumed=turns * turn,
        )
        if size < turn:
            continue
        expected = StockJob(recipe).step(8 * ranks)
        loader = build_as(recipe, 0)(recipe.dataset(), recipe.consumed)
        order = order_of(loader.batch_sampler)
        ours = [order.samples(k) for k in range(8 * ranks)]
        wrong += [(recipe, k) for k in range(8 * ranks) if ours[k] != expected[k]][:1]
    return wrong


def test_the_rest_of_a_small_dataset_goes_to_stocks_ranks() -> None:
    """Epochs of one turn and of more, with and without a rest that fills a micro-batch."""
    assert in_fork(wrong_small_orders) == []


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def workers_over_switches(num_switches: int) -> list[int]:
    """The number of worker processes after each switch, and how many were started in all."""
    gpu = Gpu(Recipe(size=1000, ranks=2, num_workers=1), 0)
    alive, seen = [], set()
    for number in range(num_switches):
        counts = [(2, 2), (3, 1), (1, 3)][number % 3]
        gpu.run(number, counts, 0, 1.0)
        alive.append(len(children()))
        seen |= children()
    gpu.run(num_switches, (2, 2), None, 1.0)
    return [*alive, len(children()), len(seen)]


def test_workers_of_old_splits_end() -> None:
    assert in_fork(workers_over_switches, 20) == [1] * 20 + [0, 20]


def idle_gpu() -> tuple[int, int]:
    gpu = Gpu(Recipe(size=100, ranks=2, num_workers=1), 0)
    for number, (counts, pipeline) in enumerate([((2, 2), 0), ((3, 1), 0), ((2, 2), None)]):
        gpu.batches.begin_step(number, counts, pipeline)
    return len(children()), gpu.dataset.num_read


def test_a_rank_that_never_reads_starts_no_worker() -> None:
    assert in_fork(idle_gpu) == (0, 0)


class Seeded(Numbered):
    """Sample i also tells its worker's seed."""

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index, "seed": torch.initial_seed()}


def read_and_draw(loader: Any, recipe: Recipe) -> list[Any]:
    """Eight batches with their workers' seeds, and what the process draws meanwhile."""
    torch.manual_seed(5)
    iterator = iterate(recipe, loader)
    drawn, read = [], []
    for _ in range(8):
        drawn.append(torch.rand(()).item())
        batch = next(iterator)
        read.append([batch["index"].tolist(), batch["seed"].tolist()])
    return [read, drawn]


def stock_and_ours(recipe: Recipe, reads: bool) -> list[Any]:
    """What a stock loader gives, and ours under equal counts; and what is drawn without any."""
    from malleus_megatron.adapter.data import Batches, NominalReader

    build = build_as(recipe, 1)
    stock = read_and_draw(build(Seeded(recipe.size), 0), recipe)
    ours = Batches(
        Seeded(recipe.size),
        0,
        build=build,
        pause=contextlib.nullcontext,
        nominal=NominalReader(data_parallel_rank=1, data_parallel_size=recipe.ranks, reads=reads),
    )
    ours.begin_step(1, (8,) * recipe.ranks, 1)
    result = read_and_draw(ours, recipe)
    torch.manual_seed(5)
    return [stock, result, [torch.rand(()).item() for _ in range(8)]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader_type", ["single", "cyclic"])
def test_equal_counts_are_stock_to_the_bit(loader_type: str, num_workers: int) -> None:
    """Samples, workers' seeds and the process's own random numbers; over an epoch if cyclic."""
    size = 64 if loader_type == "single" else 24
    recipe = Recipe(size=size, ranks=2, loader_type=loader_type, num_workers=num_workers)
    stock, ours, _ = in_fork(stock_and_ours, recipe, True)
    assert ours == stock


def test_a_rank_without_a_stock_loader_keeps_its_random_numbers() -> None:
    stock, ours, undisturbed = in_fork(stock_and_ours, Recipe(size=64, ranks=2), False)
    assert ours[1] == undisturbed != stock[1]


def lengths(recipe: Recipe) -> list[int]:
    return [len(Gpu(recipe, rank).batches) for rank in range(recipe.ranks)]


def test_full_validation_has_stocks_lengths() -> None:
    assert in_fork(lengths, Recipe(size=10, ranks=4, full_validation=True)) == [3, 3, 2, 2]


def errors() -> list[str]:
    """What each misuse is answered with."""
    from megatron.training.datasets.data_samplers import RandomSeedDataset

    from malleus_megatron.adapter.data import Batches, NominalReader

    recipe = Recipe(size=100, ranks=2)
    nominal = NominalReader(data_parallel_rank=0, data_parallel_size=2)

    def build_with(build: Callable[[Any, int], Any], dataset: Any) -> None:
        Batches(dataset, 0, build=build, pause=contextlib.nullcontext, nominal=nominal)

    cyclic = replace(recipe, loader_type="cyclic")
    cases: list[Callable[[], Any]] = [
        lambda: Gpu(recipe, 0).run(1, (1, 2), 0, 1.0),
        lambda: Gpu(recipe, 0).run(1, (3, 1), 0, 2.0),
        lambda: next(standing_by(recipe)),
        lambda: Gpu(replace(cyclic, size=3), 0).run(1, (3, 1), 0, 1.0),
        lambda: Gpu(replace(cyclic, consumed=3), 0).run(1, (3, 1), 0, 1.0),
        lambda: Gpu(replace(recipe, full_validation=True, size=1), 0).run(1, (3, 1), 0, 1.0),
        lambda: build_with(lambda dataset, consumed: dataset, Numbered(100)),
        lambda: build_with(build_as(cyclic, 0), RandomSeedDataset(Numbered(100), 1)),
    ]
    return [answer_to(case) for case in cases]


def standing_by(recipe: Recipe) -> Any:
    gpu = Gpu(recipe, 0)
    gpu.batches.begin_step(1, (2, 2), None)
    return gpu.batches


def answer_to(case: Callable[[], Any]) -> str:
    try:
        case()
    except (AssertionError, BadInputError) as error:
        return type(error).__name__
    return "nothing"


def test_misuse_and_what_cannot_be_shared_out_is_refused() -> None:
    assert in_fork(errors) == ["AssertionError"] * 3 + ["BadInputError"] * 5


def read_past_the_end(recipe: Recipe) -> int:
    gpu = Gpu(recipe, 0)
    with contextlib.suppress(StopIteration):
        for number in range(10):
            gpu.run(number, (3, 1), 0, 1.0)
    return gpu.dataset.num_read


@pytest.mark.parametrize(("size", "read"), [(15, 2 * 4), (16, 2 * 6), (19, 2 * 6)])
def test_one_pass_ends_with_the_last_full_turn_of_all_ranks(size: int, read: int) -> None:
    """(3, 1) deals micro-batches 0, 2, 3 and 4, 6, 7 to pipeline 0; a turn is 2 of 2 samples."""
    assert in_fork(read_past_the_end, Recipe(size=size, ranks=2)) == read
