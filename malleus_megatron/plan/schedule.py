"""Scripted re-plans (schedule.json): which plan holds from which iteration on."""

from dataclasses import dataclass
from pathlib import Path

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import read_json, read_plan
from malleus_megatron.plan.fields import as_dict, as_int, as_list, required
from malleus_megatron.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSchedule:
    """Plans by the iteration (from 1) at whose start they are switched to."""

    entries: tuple[tuple[int, Plan], ...] = ()
    """Ascending by iteration."""

    def at(self, iteration: int) -> Plan | None:
        """The plan to switch to at the start of this iteration, if any."""
        return dict(self.entries).get(iteration)

    def in_force(self, iteration: int) -> Plan | None:
        """The last plan switched to at or before this iteration: a resumed job starts under it."""
        plans = [plan for start, plan in self.entries if start <= iteration]
        return plans[-1] if plans else None


def read_schedule(path: Path) -> PlanSchedule:
    """Read schedule.json; the plans' paths are relative to its folder.

    Raises:
        BadInputError: an iteration below 1 or named twice, or a plan that cannot be read.
    """
    entries: dict[int, Plan] = {}
    for index, entry in enumerate(as_list(read_json(path), str(path))):
        where = f"{path}[{index}]"
        body = as_dict(entry, where)
        iteration = as_int(required(body, "iteration", where), f"{where}.iteration")
        if iteration < 1:
            raise BadInputError(f"{where}: iteration {iteration}; they count from 1.")
        if iteration in entries:
            raise BadInputError(f"{where}: iteration {iteration} has two plans.")
        name = required(body, "plan", where)
        if not isinstance(name, str):
            raise BadInputError(f"{where}.plan: expected a file name, got {name!r}.")
        entries[iteration] = read_plan(path.parent / name)
    return PlanSchedule(entries=tuple(sorted(entries.items(), key=lambda entry: entry[0])))
