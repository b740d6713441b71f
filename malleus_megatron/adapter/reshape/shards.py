"""The optimizer's state under a plan: each owner of a slice keeps a share of it (ZeRO-1).

A rank's shares are flat fp32 parameters, one for each owner group, that Megatron's own optimizer
classes update. Before the update each gets the sum of the owners' gradients, after it each gives
all owners the new values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from malleus_megatron.migration.owners import Placement
from malleus_megatron.migration.shards import Piece, ShardGroup
from malleus_megatron.runtime.blocks import give_back
from malleus_megatron.runtime.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One owner group as one of its owners sees it."""

    group: ShardGroup
    process_group: dist.ProcessGroup | None
    """None where this rank is the only owner."""
    placements: tuple[Placement, ...]
    """Where the group's slices lie in this rank's tensors."""
    pieces: tuple[Piece, ...]
    main: nn.Parameter
    """One axis, fp32: this rank's elements of the flat buffer. Its `main_grad` is their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A collective of one share that has been started."""

    work: dist.Work | None
    """None where this rank is the only owner."""
    finish: Callable[[], None]
    held: Tensor
    """What it reads."""

    @property
    def is_done(self) -> bool:
        """Whether `end` would wait for nobody."""
        return self.work is None or self.work.is_completed()

    @torch.no_grad()
    def end(self) -> None:
        """Wait for it, and put the result where it belongs."""
        if self.work is not None:
            self.work.wait()
        self.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """What follows from the recipe."""

    keeps_main: bool
    """Whether fp32 values differ from the parameters' and are state of their own."""
    gradient_weight: float
    """Of each owner's gradients in their sum: stock's average over pipelines, before the sum too.
    So fp16 overflows where it does in stock."""


class OwnerShards:
    """The shares of one rank. All ranks go through the groups in the same order."""

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        gpu: int,
        *,
        process_groups: Groups,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        settings: ShareSettings,
    ) -> None:
        """Make the rank's shares: without memory, which comes with the optimizer's state.

        Their values are set by `fill` or by a migration.

        Args:
            groups: Of the whole job.
            gpu: This rank's.
            process_groups: Those of the owners, made.
            parameters: This rank's parameters by the names of their holdings, flat.
            gradients: Their gradient buffers by the same names.
            settings: The same on all ranks.
        """
        self.keeps_main = settings.keeps_main
        self._weight = settings.gradient_weight
        self._gpu = gpu
        self._parameters = parameters
        self._gradients = gradients
        self.shares = tuple(
            self._share(group, process_groups) for group in groups if gpu in group.owners
        )

    def by_optimizer_group(self, number: int) -> list[nn.Parameter]:
        """What Megatron's optimizer updates with the settings of one of its groups."""
        return [
            share.main
            for share in self.shares
            if share.group.group.optimizer_group == number and share.main.numel()
        ]

    @torch.no_grad()
    def fill(self) -> None:
        """Take the main values from the rank's own parameters: owners hold slices whole."""
        for share in self.shares:
            for piece in share.pieces:
                holding = piece.slice.holding_of(self._gpu)
                source = self._parameters[holding.name].view(holding.box.shape)
                target = share.main[piece.span[0] : piece.span[1]].view(piece.box.shape)
                target.copy_(source[holding.box.slices_of(piece.box)])

    @torch.no_grad()
    def start_sum(self, share: Share) -> InFlight:
        """Sum the gradients of a share's slices over their owners; it gets its part of the sum."""
        buffer = self._contributions(share)
        mine, work = buffer, None
        if share.process_group is not None:
            mine = buffer.new_empty(share.group.share_size)
            work = dist.reduce_scatter_tensor(
                mine, buffer, group=share.process_group, async_op=True
            )

        def take() -> None:
            share.main.main_grad = mine[: share.main.numel()].float()  # type: ignore[attr-defined]

        # The buffer is read until the sum is there.
        return InFlight(work=work, finish=take, held=buffer)

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the sums."""
        for share in self.shares:
            share.main.main_grad.mul_(factor)  # type: ignore[attr-defined]

    def gradients_for_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """The summed gradients, piece by piece: the norm of a long vector loses digits in fp32.

        Args:
            grad_norm_group: One of Megatron's groups with a norm of their own; dense decoders have
                none.
        """
        if grad_norm_group is not None:
            return []
        return [
            share.main.grad[piece.span[0] : piece.span[1]]
            for share in self.shares
            if share.main.grad is not None
            for piece in share.pieces
        ]

    def drop_gradients(self) -> None:
        """Free the sums: the next forward and backward passes need the room."""
        for share in self.shares:
            share.main.main_grad = share.main.grad = None  # type: ignore[attr-defined]

    @torch.no_grad()
    def start_gather(self, share: Share) -> InFlight:
        """Give all owners a share's new values, in the parameters' own precision."""
        dtype = self._parameters[share.placements[0].holding.name].dtype
        mine = share.main.new_zeros(share.group.share_size, dtype=dtype)
        mine[: share.main.numel()].copy_(share.main)
        whole, work = mine, None
        if share.process_group is not None:
            whole = mine.new_empty(share.group.padded_size)
            work = dist.all_gather_into_tensor(
                whole, mine, group=share.process_group, async_op=True
            )

        def spread() -> None:
            for place, view in self._views(share, self._parameters):
                view.copy_(whole[place.start : place.end].view(view.shape))

        return InFlight(work=work, finish=spread, held=mine)

    def _share(self, group: ShardGroup, process_groups: Groups) -> Share:
        low, high = group.share(self._gpu)
        placements = tuple(group.group.placements(self._gpu))
        device = self._parameters[placements[0].holding.name].device
        main = nn.Parameter(torch.empty(high - low, dtype=torch.float32, device=device))
        give_back([main])
        # No other rank has these elements: they count in every norm.
        main.tensor_model_parallel = True  # type: ignore[attr-defined]
        return Share(
            group=group,
            process_group=process_groups.of(group.owners) if len(group.owners) > 1 else None,
            placements=placements,
            pieces=tuple(group.pieces(self._gpu)),
            main=main,
        )

    def _contributions(self, share: Share) -> Tensor:
        """This rank's gradients of a group's slices; zeros for padding, and where others add."""
        views = list(self._views(share, self._gradients))
        buffer = views[0][1].new_empty(share.group.padded_size)
        buffer[share.group.group.num_elements :].zero_()
        for place, view in views:
            part = buffer[place.start : place.end]
            if place.contributes:
                torch.mul(view, self._weight, out=part.view(view.shape))
            else:
                part.zero_()
        return buffer

    def _views(
        self, share: Share, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[Placement, Tensor]]:
        for place in share.placements:
            tensor = tensors[place.holding.name].view(place.holding.box.shape)
            yield place, tensor[place.slices]
