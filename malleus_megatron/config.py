"""The plugin's settings: one frozen value, read from the command line before torch is imported."""

import argparse
import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

from malleus_megatron.errors import BadInputError


class Level(IntEnum):
    """How much of a job the plugin can change."""

    observe = 0
    rebalance = 1
    reshape = 2


def _setting(
    help_text: str, default: Any = None, convert: Callable[[str], Any] = str, **options: Any
) -> Any:
    return field(
        default=default, metadata={"help": help_text, "convert": convert, "options": options}
    )


def _path(text: str) -> Path:
    """A file or folder, there or not.

    Raises:
        BadInputError: the empty text of a variable that is not set, say.
    """
    if not text:
        raise BadInputError("the path is empty. Name a file, or leave the flag out.")
    return Path(text)


def _whole_number(text: str) -> int:
    """A number from 0.

    Raises:
        BadInputError: anything else.
    """
    if not str(text).isdecimal():
        raise BadInputError(f"{text!r} is no whole number from 0.")
    return int(text)


def _mib(text: str) -> float:
    """A size.

    Raises:
        BadInputError: nothing above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BadInputError(f"{text!r} is no number of MiB above 0.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class MalleusConfig:
    """Every field but `enabled` is the flag `--malleus-<field>`."""

    enabled: bool = False
    plan: Path | None = _setting("start under this plan", convert=_path, metavar="PLAN.json")
    plan_schedule: Path | None = _setting(
        "switch plans at these iterations; no sidecar is needed",
        convert=_path,
        metavar="SCHEDULE.json",
    )
    inject: Path | None = _setting("slow GPUs down", convert=_path, metavar="INJECTION.json")
    pace: Path | None = _setting(
        "CPU mode: hold every layer to these times", convert=_path, metavar="PACE.json"
    )
    log_dir: Path | None = _setting(
        "events.jsonl and the plans go here", convert=_path, metavar="DIR"
    )
    require: Level | None = _setting(
        "refuse to start at a lower level",
        convert=lambda name: Level[name],
        choices=[level.name for level in Level],
    )
    device: str = _setting(
        "where to train; auto takes the GPU if there is one",
        "auto",
        choices=("auto", "cuda", "cpu"),
    )
    migration_memory: float | None = _setting(
        "MiB that a switch of plan may take beyond the larger of the old and the new state; where "
        "both do not fit, old state is given back as it moves, and there is no way back",
        convert=_mib,
        metavar="MIB",
    )
    sidecar: str = _setting(
        "the planner's process: auto starts one beside rank 0", "auto", metavar="{auto,none,URL}"
    )
    listen: str | None = _setting(
        "where that process listens, also for a browser (default 127.0.0.1, a free port); an "
        "address that other machines can reach needs a token",
        metavar="HOST:PORT",
    )
    token_file: Path | None = _setting(
        "the sidecar answers those only who show the token in this file",
        convert=Path,
        metavar="FILE",
    )
    check_replicas: int = _setting(
        "every N iterations GPUs that must hold the same parameters compare them; 0: never",
        100,
        convert=_whole_number,
        metavar="N",
    )
    on_bad_replica: str = _setting(
        "what follows if they differ; repair takes the copy that most of them have",
        "warn",
        choices=("warn", "repair", "stop"),
    )
    memory: float | None = _setting(
        "memory per GPU that plans may use (default: all of the GPU's; in CPU mode no limit)",
        convert=_mib,
        metavar="MIB",
    )
    trace: int = _setting(
        "every N iterations record what each GPU does and when, for `malleus whatif`; needs "
        "--malleus-log-dir; 0: never",
        0,
        convert=_whole_number,
        metavar="N",
    )
    record: Path | None = _setting(
        "write loss and gradient norm of every iteration, in full precision; "
        "needs no --malleus and changes nothing else",
        convert=_path,
        metavar="LOSSES.jsonl",
    )


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make the flags known to a parser: ours, or Megatron's.

    Values stay text here, since Megatron writes all its arguments into checkpoints.
    """
    group = parser.add_argument_group("malleus")
    group.add_argument("--malleus", action="store_true", help="survive slow GPUs")
    for setting in fields(MalleusConfig):
        if setting.name != "enabled":
            group.add_argument(
                _flag(setting.name),
                default=setting.default,
                help=setting.metadata["help"],
                **setting.metadata["options"],
            )
    return parser


def split_flags(arguments: list[str]) -> tuple[MalleusConfig, list[str]]:
    """Take our flags out of a command line.

    Returns:
        The settings, and the arguments that are not ours, in their order.

    Raises:
        BadInputError: a flag of ours with a wrong value, an unknown `--malleus-*` flag, or flags
            that need `--malleus` without it.
    """
    parser = add_flags(_RaisingParser(add_help=False, allow_abbrev=False))
    namespace, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("--malleus")]
    if unknown:
        raise BadInputError(f"Unknown flag {unknown[0]}. Known: {', '.join(flag_names())}.")
    values = {
        setting.name: _converted(setting, getattr(namespace, f"malleus_{setting.name}"))
        for setting in fields(MalleusConfig)
        if setting.name != "enabled"
    }
    config = MalleusConfig(enabled=namespace.malleus, **values)
    _check_needs(config)
    return config, rest


def own_flags(config: MalleusConfig) -> list[str]:
    """The command line of these settings, without those that have their default."""
    words = ["--malleus"] if config.enabled else []
    for setting in fields(MalleusConfig):
        value = getattr(config, setting.name)
        if setting.name != "enabled" and value != setting.default:
            words += [_flag(setting.name), value.name if isinstance(value, Level) else str(value)]
    return words


def flag_names() -> list[str]:
    """All flags, `--malleus` first."""
    names = [_flag(setting.name) for setting in fields(MalleusConfig) if setting.name != "enabled"]
    return ["--malleus", *names]


def _converted(setting: Field[Any], text: str | None) -> Any:
    try:
        return None if text is None else setting.metadata["convert"](text)
    except BadInputError as error:
        raise BadInputError(f"{_flag(setting.name)}: {error}") from error


def _flag(name: str) -> str:
    return "--malleus-" + name.replace("_", "-")


def _check_needs(config: MalleusConfig) -> None:
    """Settings that would be silently ignored are refused."""
    if config.trace and config.log_dir is None:
        raise BadInputError("--malleus-trace needs --malleus-log-dir: traces are written there.")
    if config.enabled:
        return
    for setting in fields(MalleusConfig):
        free = setting.name in {"enabled", "device", "record"}
        if not free and getattr(config, setting.name) != setting.default:
            raise BadInputError(f"{_flag(setting.name)} needs --malleus.")


class _RaisingParser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that the caller says it once."""

    def error(self, message: str) -> Any:
        raise BadInputError(message)
