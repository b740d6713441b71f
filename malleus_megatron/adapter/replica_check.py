"""Now and then the owners of each parameter compare what they hold, before a step uses it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.training import training
from torch import Tensor

from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.reshape.course import MAX_ROUND_BYTES
from malleus_megatron.adapter.reshape.stage import RankStage, complete_parameters
from malleus_megatron.adapter.reshape.state import RankState, parameters_of, parts_of, state_of
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.adapter.reshape.view import nominal_view
from malleus_megatron.config import MalleusConfig
from malleus_megatron.errors import MigrationError, ReplicaError
from malleus_megatron.migration.codec import holdings_from_bytes, holdings_to_bytes
from malleus_megatron.migration.owners import Slice
from malleus_megatron.migration.replicas import (
    Difference,
    differences,
    digests,
    disputed_sets,
    in_words,
    owner_sets,
    repairs,
    shared_slices,
)
from malleus_megatron.migration.rounds import cut_into_rounds
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.seats import seats
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.fingerprint import fingerprints
from malleus_megatron.runtime.transport import carry_out

type _Place = tuple[int, Slice]
"""A GPU and a slice that it holds other bits of than the slice's other owners."""


class ReplicaCheck:
    """Every rank has one; its checks are collectives, and all ranks find the same differences."""

    def __init__(
        self,
        config: MalleusConfig,
        *,
        agreement: Agreement,
        built: tuple[list[Any], Any, Any],
        switch: Switch | None,
        reporter: Reporter | None,
    ) -> None:
        """Look at nothing yet.

        Args:
            config: How often to look, and what follows.
            agreement: The ranks' control channel.
            built: Model chunks, optimizer and scheduler of Megatron's loop. What is inside of them
                follows the plan.
            switch: Knows the present stage; None below level reshape.
            reporter: On rank 0.
        """
        self._every = config.check_replicas
        self._action = config.on_bad_replica
        self._agreement = agreement
        self._model, self._optimizer, _ = built
        self._switch = switch
        self._reporter = reporter
        self._slices: tuple[Slice, ...] | None = None
        """That have several owners under the present plan; None: not known yet."""
        self._known: frozenset[_Place] = frozenset()
        """What has been told and still differs."""

    def forget_owners(self) -> None:
        """Other GPUs hold the parameters from now on: all ranks call this at the same boundary."""
        self._slices = None
        self._known = frozenset()

    def before_iteration(self, iteration: int, plan: Plan) -> None:
        """Compare, where it is the iteration's turn; a collective.

        A check that fails on a rank is given up for good, with a warning: it never stops a step.

        Args:
            iteration: That is about to begin.
            plan: Whose stages are in place.

        Raises:
            ReplicaError: on all ranks, if copies differ and the job is to stop then.
        """
        if not self._every or iteration % self._every:
            return
        try:
            self._agreement.together(
                "completing the parameters",
                lambda: complete_parameters(self._model, self._optimizer),
            )
            self._check(iteration, plan)
        except MigrationError as reason:
            self._every = 0
            if self._reporter is not None:
                self._reporter.warning(f"Replicas are not compared from now on: {reason}")

    def _check(self, iteration: int, plan: Plan) -> None:
        state = self._agreement.together("listing the replicas", self._state)
        if self._slices is None:
            self._slices = self._shared(state)
        pipeline_of = {gpu: seat.pipeline or 0 for gpu, seat in seats(plan).items()}
        found = self._compare(self._slices, state, pipeline_of)
        left = found
        if found and self._action == "repair":
            self._repair(found, state)
            left = self._compare(self._slices, state, pipeline_of)
        self._tell(found, left, iteration)
        if found and self._action == "stop":
            error = ReplicaError(
                f"Before iteration {iteration}: {in_words(found)}. Training has stopped, as "
                "--malleus-on-bad-replica stop asks. Start again from the last checkpoint; if the "
                "same GPU differs again, leave it out."
            )
            error.on_all_ranks = True
            raise error

    def _state(self) -> RankState:
        """What this rank holds that another may hold too."""
        switch, model = self._switch, self._model
        (module,) = training.unwrap_model(model)
        view = nominal_view(module.config, None) if switch is None else switch.view
        stage = RankStage(view=view, model=model, optimizer=self._optimizer)
        for name, parameter in module.named_parameters():
            if type(parameter.detach()) is not Tensor:
                raise MigrationError(f"{name} is a {type(parameter.detach()).__name__}")
        if switch is not None and view.is_nominal:
            return state_of(stage, module.config)
        # Under a plan each element of optimizer state is in one share only. Below level reshape
        # the optimizer may be of any kind.
        return parameters_of(module, parts_of(module, view, module.config))

    def _shared(self, state: RankState) -> tuple[Slice, ...]:
        payloads = self._agreement.gather(holdings_to_bytes(state.holdings))
        return self._agreement.together(
            "finding the owners",
            lambda: shared_slices(dict(enumerate(map(holdings_from_bytes, payloads)))),
        )

    def _compare(
        self, slices: Sequence[Slice], state: RankState, pipeline_of: dict[int, int]
    ) -> tuple[Difference, ...]:
        gpu = self._agreement.rank
        mine = [part for part in slices if gpu in part.owners]
        hashes = self._agreement.together(
            "hashing the replicas", lambda: fingerprints([_view(part, gpu, state) for part in mine])
        )
        sets = disputed_sets(owner_sets(slices), self._gather(digests(mine, hashes)))
        if not sets:
            return ()
        rows = self._gather(
            [value for part, value in zip(mine, hashes, strict=True) if part.owners in sets]
        )
        return differences([part for part in slices if part.owners in sets], rows, pipeline_of)

    def _repair(self, found: Sequence[Difference], state: RankState) -> None:
        together, tensors = self._agreement.together, state.tensors
        rounds = together(
            "planning the repair", lambda: cut_into_rounds(repairs(found), MAX_ROUND_BYTES)
        )
        carry_out(rounds, self._agreement.rank, old=tensors, new=tensors, guard=together)

    def _tell(
        self, found: Sequence[Difference], left: Sequence[Difference], iteration: int
    ) -> None:
        """On rank 0: what was not told before, or has been equal since."""
        news = [
            replace(one, gpus=gpus)
            for one in found
            if (gpus := tuple(gpu for gpu in one.gpus if (gpu, one.slice) not in self._known))
        ]
        self._known = _places(left)
        if self._reporter is None or not news:
            return
        self._reporter.replicas(news, self._action, iteration)
        line = f"iteration {iteration}: {in_words(news)}."
        if self._action == "repair":
            line += f" Repaired from GPU {news[0].good_gpu}."
        self._reporter.note(f"warning: {line}")
        if self._action == "repair" and left:
            self._reporter.warning(
                f"After the repair {in_words(left)}: the memory of that GPU may be at fault."
            )

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        """By rank: each one's 64-bit numbers."""
        payloads = self._agreement.gather(np.array(values, dtype="<u8").tobytes())
        return [np.frombuffer(payload, dtype="<u8").tolist() for payload in payloads]


def _view(part: Slice, gpu: int, state: RankState) -> torch.Tensor:
    """A GPU's copy of a slice."""
    holding = part.holding_of(gpu)
    whole = state.tensors[holding.name].view(holding.box.shape)
    return whole[holding.box.slices_of(part.box)]


def _places(found: Sequence[Difference]) -> frozenset[_Place]:
    return frozenset((gpu, difference.slice) for difference in found for gpu in difference.gpus)
