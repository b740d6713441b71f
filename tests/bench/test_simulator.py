"""How long a thousand iterations of a large job take to simulate."""

import time

import pytest

from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.simulator.policies import Settings, simulate
from tests.harness.problems import shared_problem

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

TRACE = Injection(
    entries=tuple(
        InjectedRate(gpu=64 * number, rate=rate, from_iteration=20 * number + 20, to_iteration=end)
        for number, (rate, end) in enumerate([(12.53, 90), (2.57, None), (5.42, 80)])
    )
)


def seconds(policy: str, num_iterations: int) -> float:
    """CPU time: 1024 GPUs, 32 pipelines, 1024 micro-batches, three stragglers."""
    problem = problem_from_json(shared_problem("scale-1024-1"))
    start_s = time.process_time()
    simulate(problem, TRACE, num_iterations=num_iterations, names=[policy], settings=Settings())
    return time.process_time() - start_s


@pytest.mark.parametrize("policy", ["stock", "malleus", "templates", "restart", "bound"])
def test_iterations_in_which_nothing_changes_cost_nothing(policy: str) -> None:
    short, long = seconds(policy, 200), seconds(policy, 1000)
    print(f"{policy}: 1024 GPUs x 1000 iterations in {long:.2f} s, x 200 in {short:.2f} s")
    assert long < 1.5 * short + 1.0
    assert long < 60
