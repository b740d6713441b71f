"""Saves and restarts: Megatron's own checkpoints from any plan, and the plan beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training import get_args
from megatron.training.checkpointing import get_checkpoint_name
from megatron.training.utils import print_rank_0

from malleus_megatron.adapter.plan_changes import PlanChanges
from malleus_megatron.adapter.plan_file import is_last_save, keep_plan, kept_plan
from malleus_megatron.errors import BadInputError, MalleusError
from malleus_megatron.plan.codec import canonical_json, plan_from_json, plan_to_json
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.render import in_short
from malleus_megatron.runtime.agreement import Agreement


class Saves:
    """Lets Megatron save whatever plan is in force, in training and after it."""

    def __init__(self, changes: PlanChanges, rank: int) -> None:
        """Hold what knows the plan; nothing is called yet."""
        self._changes = changes
        self._rank = rank

    def save(
        self,
        original: Callable[..., None],
        iteration: int,
        built: tuple[Any, Any, Any],
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        """Let Megatron save; a collective.

        Args:
            original: Megatron's function.
            iteration: Iterations done.
            built: Model chunks, optimizer and scheduler, as Megatron gives them.
            rest: Megatron's other arguments: operations so far, and its context for saves.
            kwargs: The same.
        """
        folder = _saved_folder(iteration, persistent=not kwargs.get("non_persistent_ckpt"))
        switch = self._changes.switch
        reshaped = switch is not None and not switch.is_nominal
        if reshaped and (folder is None or not saves_any_stages()):
            fault = self._changes.to_nominal_stages(iteration + 1)
            if fault is not None:
                self._tell_unsaved(iteration, fault)
                return
            reshaped = False
        if switch is not None and reshaped:
            operations, _ = rest
            checkpoint = switch.checkpoint()
            stands_in = [checkpoint.model], checkpoint.optimizer, built[2]
            with switch.seeded_as_nominal(iteration + 1):
                # A context of its own: what Megatron keeps in it from one save for the next
                # describes other stages.
                original(iteration, *stands_in, operations, {}, **kwargs)
        else:
            original(iteration, *built, *rest, **kwargs)
        if folder is not None and self._rank == 0:
            self._keep_plan(folder)

    def _tell_unsaved(self, iteration: int, fault: str) -> None:
        if self._changes.reporter is not None:
            self._changes.reporter.warning(
                f"Nothing was saved for iteration {iteration}: checkpoints of this form go by the "
                "recipe's own stages (those of --ckpt-format torch_dist, local ones apart, do "
                f"not), and the job cannot go back to them: {fault}"
            )

    def _keep_plan(self, folder: Path) -> None:
        plan, nominal = self._changes.current.plan, self._changes.current.nominal
        equal = plan.same_layout(nominal) and len(set(plan.microbatch_counts)) == 1
        fault = keep_plan(None if equal else plan, folder)
        if fault is not None:
            print_rank_0(f"malleus: warning: The plan was not kept with the checkpoint: {fault}")


def saves_any_stages() -> bool:
    """Whether the recipe's checkpoint format can be written from any plan's stages."""
    return bool(get_args().ckpt_format == "torch_dist")


def plan_to_resume(agreement: Agreement, changes: PlanChanges) -> Plan | None:
    """The plan of the checkpoint that was loaded, if the job can run under it; a collective.

    One line in the log says what becomes of it.
    """
    found: Plan | None = None
    fault = None
    if agreement.rank == 0:
        try:
            found = _loaded_plan()
        except BadInputError as error:
            fault = str(error)
    document = "" if found is None else canonical_json(plan_to_json(found))
    document = agreement.gather(document.encode())[0].decode()
    plan = plan_from_json(json.loads(document)) if document else None
    if plan is not None:
        try:
            changes.check(plan)
        except MalleusError as error:
            plan, fault = None, str(error)
    if fault is not None:
        print_rank_0(f"malleus: the checkpoint's plan is not taken up: {fault}")
    if plan is not None:
        print_rank_0(f"malleus: the checkpoint's plan is taken up: {in_short(plan)}")
    return plan


def _loaded_plan() -> Plan | None:
    """On rank 0: the plan in the folder of the iteration that Megatron has loaded.

    Of a non-persistent and another checkpoint of the same iteration Megatron loads the first. A
    plan in a folder that it has not loaded may be any job's.

    Raises:
        BadInputError: a file that cannot be read as a plan.
    """
    args = get_args()
    if not args.iteration or args.load is None:
        return None
    root = args.load
    if args.non_persistent_ckpt_type == "global":
        replaced = _replaced_root(args.load)
        root = replaced if is_last_save(Path(replaced), args.iteration) else root
    return kept_plan(_folder(root, args.iteration))


def _saved_folder(iteration: int, *, persistent: bool) -> Path | None:
    """Where Megatron's save of an iteration goes; None: into each rank's own files."""
    args = get_args()
    if persistent:
        return _folder(args.save, iteration)
    if args.non_persistent_ckpt_type == "local":
        return None
    return _folder(_replaced_root(args.save), iteration)


def _replaced_root(root: str) -> str:
    """Where checkpoints lie of which Megatron keeps the last one alone."""
    return str(get_args().non_persistent_global_ckpt_dir or Path(root) / "non_persistent")


def _folder(root: str, iteration: int) -> Path:
    return Path(get_checkpoint_name(root, iteration, return_base_dir=True))
