"""The plan that a job is under, and which other plans it may switch to at its level."""

from malleus_megatron.config import Level
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.degrees import ModelWidths, check_degrees
from malleus_megatron.plan.microbatches import scaled_counts
from malleus_megatron.plan.plan import Plan, check_world


class CurrentPlan:
    """Every rank holds one, and all of them make the same switches at the same boundaries."""

    def __init__(self, nominal: Plan, level: Level, widths: ModelWidths | None = None) -> None:
        """Start under the nominal plan, generation 0.

        Args:
            nominal: What the recipe's flags describe.
            level: How much of it may change.
            widths: What the model's TP groups must share equally; for level reshape.
        """
        self.nominal = nominal
        self.level = level
        self._widths = widths
        self.generation = 0
        self._take(nominal)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that this job cannot run under.

        Raises:
            BadInputError: what does not fit, with both numbers.
        """
        check_world(plan, len(list(self.nominal.all_gpus())))
        if plan.num_layers != self.nominal.num_layers:
            raise BadInputError(
                f"The plan is for {plan.num_layers} layers; the model has "
                f"{self.nominal.num_layers}."
            )
        is_nominal = plan.same_layout(self.nominal)
        if not is_nominal and self.level >= Level.reshape and self._widths is not None:
            check_degrees(plan, self._widths)
        elif not is_nominal:
            raise BadInputError(
                f"{_first_difference(plan, self.nominal)} Moving stages, layers or GPUs needs "
                f"level reshape; this job is at level {self.level.name}."
            )
        uneven = len(set(plan.microbatch_counts)) > 1
        if uneven and self.level < Level.rebalance:
            counts = ", ".join(map(str, plan.microbatch_counts))
            raise BadInputError(
                f"The plan has micro-batches {counts}; this job is at level {self.level.name}, "
                "where all pipelines must have the same number."
            )

    def switch(self, plan: Plan) -> None:
        """Take a checked plan as the present one: the next generation."""
        self._take(plan)
        self.generation += 1

    def counts(self, num_microbatches: int) -> tuple[int, ...]:
        """Micro-batches of each pipeline in a step that has this many in all.

        Where the batch size has changed since the plan was made, its shares are kept.
        """
        if num_microbatches != self.plan.num_microbatches:
            counts = scaled_counts(self.plan.microbatch_counts, num_microbatches)
            self._take(self.plan.with_counts(counts))
        return self.plan.microbatch_counts

    def _take(self, plan: Plan) -> None:
        """Hash it here: the id is asked for in every iteration, and a large job's plan is long."""
        self.plan = plan
        self.plan_id = plan_id(plan)


def _first_difference(plan: Plan, nominal: Plan) -> str:
    if len(plan.pipelines) != len(nominal.pipelines):
        return (
            f"The plan has {len(plan.pipelines)} pipelines; the nominal plan has "
            f"{len(nominal.pipelines)}."
        )
    for index, (ours, theirs) in enumerate(zip(plan.pipelines, nominal.pipelines, strict=True)):
        if len(ours.stages) != len(theirs.stages):
            return (
                f"Pipeline {index} has {len(ours.stages)} stages; in the nominal plan "
                f"{len(theirs.stages)}."
            )
        for stage, (a, b) in enumerate(zip(ours.stages, theirs.stages, strict=True)):
            if a != b:
                return (
                    f"Pipeline {index}, stage {stage} has GPUs {list(a.gpus)} and layers "
                    f"{list(a.layers)}; in the nominal plan {list(b.gpus)} and {list(b.layers)}."
                )
    return f"GPUs {list(plan.standby)} are on standby; in the nominal plan {list(nominal.standby)}."
