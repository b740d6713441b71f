"""The shared problems: never worse than what is known, valid, and with a proved gap."""

import pytest

from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner.search import make_plan
from tests.harness.check_plan import faults
from tests.harness.problems import SHARED, shared_problem

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared problems")

BETTER = {
    "A1": 288.0,
    "A3": 312.0,
    "B": 270.0,
    "Cx": 368.0,
    "D": 650.0,
    "D1": 623.3,
    "D-node": 707.0,
    "E": 688.0,
}
"""What this planner reaches in the published objective, below each `best_known_bottleneck`."""

MOST_GAP = {"A1": 0.04, "A3": 0.04, "Cx": 0.05, "E": 0.05}
"""Share between the plan and its bound; 3 % if not named."""


@pytest.mark.parametrize("name", sorted(BETTER))
def test_never_above_the_best_known_bottleneck(name: str) -> None:
    document = shared_problem(name)

    plan = make_plan(problem_from_json(document), "bottleneck")

    assert faults(document, plan_to_json(plan)) == []
    assert plan.predicted is not None
    assert plan.predicted.bottleneck is not None
    assert plan.predicted.lower_bound is not None
    assert plan.predicted.bottleneck <= document["reference"]["best_known_bottleneck"]
    assert plan.predicted.bottleneck <= BETTER[name] * (1 + 1e-9)
    gap = 1 - plan.predicted.lower_bound / plan.predicted.bottleneck
    assert gap <= MOST_GAP.get(name, 0.03)


@pytest.mark.parametrize("name", ["scale-64-4", "scale-64-8", "D", "D-node", "D1"])
def test_step_time_is_within_two_percent_of_its_bound(name: str) -> None:
    document = shared_problem(name)

    plan = make_plan(problem_from_json(document))

    assert faults(document, plan_to_json(plan)) == []
    assert plan.predicted is not None
    assert plan.predicted.step_time_s is not None
    assert plan.predicted.lower_bound is not None
    assert plan.predicted.lower_bound >= 0.98 * plan.predicted.step_time_s
