"""Files that a command writes: their names are checked before the work, failures told in words."""

from pathlib import Path

from malleus_megatron.errors import BadInputError


def check_ending(flag: str, path: Path | None, endings: tuple[str, ...]) -> None:
    """Refuse a name that promises another kind of file.

    Raises:
        BadInputError: with the endings that would do.
    """
    if path is not None and path.suffix.lower() not in endings:
        kind = endings[0].removeprefix(".").upper()
        raise BadInputError(
            f"{flag} {path}: {kind} is written; the name must end with {' or '.join(endings)}."
        )


def write_output(flag: str, path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        BadInputError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{flag} {path}: {error.strerror or error}.") from error
