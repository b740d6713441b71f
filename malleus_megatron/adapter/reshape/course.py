"""How one switch goes: what moves, in which order, and whether old state leaves on the way."""

from collections.abc import Mapping
from dataclasses import dataclass

from malleus_megatron.adapter.reshape.making import Made, keeps_main
from malleus_megatron.adapter.reshape.room import gradient_bytes
from malleus_megatron.adapter.reshape.stage import StageBuilder
from malleus_megatron.adapter.reshape.state import MAIN, PARAMETER, WITH_MAIN, RankState
from malleus_megatron.adapter.reshape.steps import PlanSteps
from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.batches import bytes_by_block, one_batch
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.memory import Building, Course, Side, choose_course
from malleus_megatron.migration.transfers import TransferPlan, plan_transfers
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.blocks import Blocks
from malleus_megatron.runtime.moving import Leaving
from malleus_megatron.runtime.peak import PeakMemory
from malleus_megatron.runtime.transport import BUFFERS_A_ROUND

MAX_ROUND_BYTES = 256 * 2**20
"""That a GPU sends, and receives, before the ranks meet again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A switch in preparation: everything but the step from which there is no way back."""

    made: Made
    old: RankState
    moves: TransferPlan
    course: Course
    leaving: Leaving | None
    """Where old state leaves on the way."""
    steps: PlanSteps | None

    @property
    def is_final(self) -> bool:
        """Whether some rank has lost old state."""
        return self.leaving is not None and self.leaving.has_begun

    def forget_old(self) -> None:
        """Let go of the old state's tensors."""
        self.old.tensors.clear()
        self.old.blocks.clear()


class CoursePlanner:
    """Plans what moves; all ranks call it together and find the same."""

    def __init__(
        self,
        builder: StageBuilder,
        agreement: Agreement,
        *,
        node_of: Mapping[int, int],
        bound_bytes: int | None,
    ) -> None:
        """Hold what does not change.

        Args:
            builder: Knows what building a stage takes.
            agreement: The ranks' control channel.
            node_of: The node of each GPU.
            bound_bytes: On memory beyond the larger of two states; None: none.
        """
        self._builder = builder
        self._agreement = agreement
        self._node_of = node_of
        self._bound_bytes = bound_bytes

    @property
    def is_bounded(self) -> bool:
        """Whether a switch must be planned before anything is built."""
        return self._bound_bytes is not None

    def plan(
        self, held: Holdings, needed: Holdings, *, from_nominal: bool, to_nominal: bool
    ) -> tuple[TransferPlan, Course]:
        """What moves, and in which order.

        Raises:
            MigrationError: on all ranks: an element that nobody holds, or a bound that is too low.
        """
        together = self._agreement.together
        moves = together(
            "planning the transfers", lambda: plan_transfers(held, needed, self._node_of)
        )
        if self._bound_bytes is None:
            batches = together("planning the rounds", lambda: one_batch(moves, MAX_ROUND_BYTES))
            return moves, Course(batches=batches, frees=False)
        building = Building(
            parameters=PARAMETER,
            copies_parameters=self._builder.copies_parameters,
            at_once=f"{MAIN} of " if to_nominal else None,
        )
        sides = self._side(held, from_nominal), self._side(needed, to_nominal)
        bound_bytes = self._bound_bytes
        course = together(
            "planning the memory",
            lambda: choose_course(
                moves,
                needed,
                sides=sides,
                building=building,
                bound_bytes=bound_bytes,
                max_messages=(MAX_ROUND_BYTES, BUFFERS_A_ROUND * MAX_ROUND_BYTES),
            ),
        )
        return moves, course

    def check_way_back(self, needed: Holdings, nominal: Holdings) -> None:
        """See that the nominal stages can be reached from a plan, before the job is under it.

        Raises:
            MigrationError: on all ranks, with the bound that would do.
        """
        try:
            self.plan(needed, nominal, from_nominal=False, to_nominal=True)
        except MigrationError as error:
            declined = MigrationError(f"from it there is no way back to the recipe's plan: {error}")
            declined.on_all_ranks = error.on_all_ranks
            raise declined from error

    def check_made(self, made: Made, needed: Holdings) -> None:
        """See that a stage has become what was planned for.

        Raises:
            MigrationError: it has not.
        """
        gpu = self._agreement.rank
        if set(made.needed[gpu]) != set(needed[gpu]):
            raise MigrationError("the new stage does not hold what was planned for it")

    def _side(self, held: Holdings, is_nominal: bool) -> Side:
        separate = is_nominal or keeps_main(self._builder.config)
        return Side(
            blocks=bytes_by_block(held, None if separate else f"{WITH_MAIN} of "),
            gradients=gradient_bytes(held, self._builder.gradient_bytes),
        )


def leaving_of(old: RankState, made: Made, memory: PeakMemory) -> Leaving:
    """Let a rank's old blocks leave as new ones come.

    Raises:
        MigrationError: a block's memory cannot be given back.
    """
    before, after = Blocks(old.blocks), Blocks(made.state.blocks)
    before.check()
    after.check()
    return Leaving(before, after, memory.look)
