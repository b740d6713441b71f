"""What a job's plans may use of a GPU's memory, and what it has learned of what they take."""

from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.control.memory_model import (
    GpuMemory,
    MeasuredPlan,
    ModelSizes,
    fitted_model,
)
from malleus_megatron.cost.memory import StageMib, memory_faults, plan_memory_mib
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import ModelMemory
from malleus_megatron.plan.render import in_mib

_KEPT_PLANS = 8
_NEWS = 0.02
"""The model is told again when a size has moved by this much of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory of each GPU that plans may use."""

    memory_mib: float
    reserve_mib: float
    """Of it, kept free: what the allocator cannot use in one piece."""
    source: str
    """Who says so, for messages."""

    @property
    def usable_mib(self) -> float:
        """What a stage may take."""
        return self.memory_mib - self.reserve_mib


class JobMemory:
    """Every rank holds one, and all of them learn the same."""

    def __init__(
        self, sizes: ModelSizes, limit: MemoryLimit, nominal: Plan, *, nominal_shares: bool
    ) -> None:
        """Know what follows from the parameters alone.

        Args:
            sizes: Of the model.
            limit: Of each GPU.
            nominal: The recipe's plan.
            nominal_shares: Whether the recipe's own optimizer shares its state out over pipelines.
        """
        self.limit = limit
        self._sizes = sizes
        self._nominal = nominal
        self._nominal_shares = nominal_shares
        self._measured: list[MeasuredPlan] = []
        self.model = fitted_model(sizes, (), reserve_mib=limit.reserve_mib)

    def learn(self, plan: Plan, gpus: tuple[GpuMemory, ...]) -> bool:
        """Take in a step's memory under a plan.

        Returns:
            Whether the model has changed by so much that planners should hear of it.

        Raises:
            BadInputError: figures that cannot be; nothing has changed then.
        """
        is_nominal = plan.same_layout(self._nominal)
        new = MeasuredPlan(
            plan=plan,
            gpus=gpus,
            sharing=self._sharing(plan),
            update_mib=0.0 if is_nominal else self._sizes.layer_update_mib,
        )
        others = [one for one in self._measured if one.plan != plan]
        self._measured = [*others, new][-_KEPT_PLANS:]
        before = self.model
        self.model = fitted_model(self._sizes, self._measured, reserve_mib=self.limit.reserve_mib)
        return _has_moved(before, self.model)

    def predicted(self, plan: Plan) -> StageMib:
        """What each stage's GPUs need under a plan."""
        return plan_memory_mib(self.model, plan, sharing=self._sharing(plan))

    def check(self, plan: Plan) -> None:
        """Refuse a plan that would not fit. The recipe's own layout is not asked: it has run.

        Raises:
            BadInputError: with the GPUs, what they need and what they have.
        """
        if plan.same_layout(self._nominal):
            return
        faults = memory_faults(self.model, plan, self.limit.usable_mib)
        if faults:
            least = "" if self._measured else " Activations, not measured yet, come on top."
            raise BadInputError(
                f"The plan does not fit into {self._words()}. {faults[0]}{least} Give the stage "
                "fewer layers or more GPUs."
            )

    def overfull(self, gpus: Sequence[GpuMemory]) -> str | None:
        """What to say of the fullest GPU if it used more than plans may."""
        peak, gpu = max((used.peak_mib, number) for number, used in enumerate(gpus))
        if peak <= self.limit.usable_mib:
            return None
        return (
            f"GPU {gpu} used {in_mib(peak)} MiB in a step; plans may use {self._words()}. "
            "What runs goes on; new plans keep to the limit."
        )

    def less_words(self) -> str:
        """A limit to try when this one was too high."""
        return f"{in_mib(0.9 * self.limit.memory_mib)} MiB, say; now {self._words()}"

    def _words(self) -> str:
        limit = self.limit
        kept = f" less {in_mib(limit.reserve_mib)} MiB kept free" if limit.reserve_mib else ""
        return f"{in_mib(limit.memory_mib)} MiB{kept} ({limit.source})"

    def _sharing(self, plan: Plan) -> int:
        shares = self._nominal_shares or not plan.same_layout(self._nominal)
        return len(plan.pipelines) if shares else 1


def _has_moved(before: ModelMemory, now: ModelMemory) -> bool:
    return any(
        abs(new - old) > _NEWS * max(new, old)
        for old, new in zip(_figures(before), _figures(now), strict=True)
    )


def _figures(memory: ModelMemory) -> tuple[float, ...]:
    return (
        memory.layer_mib(1),
        memory.layer_mib(2) - memory.layer_mib(1),
        memory.embedding_mib,
        memory.head_mib,
        memory.fixed_mib + memory.working_mib,
    )
