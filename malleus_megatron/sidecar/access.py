"""Who may talk to a sidecar: its own machine, or whoever has the token."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from malleus_megatron.errors import BadInputError

LOOPBACK = "127.0.0.1"
_FEWEST_LETTERS = 16
_MAKE_ONE = (
    "Make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; chmod 600 FILE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a sidecar listens."""

    host: str = LOOPBACK
    port: int = 0
    """0: a free one."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean anything
            return False

    @property
    def is_everywhere(self) -> bool:
        """Whether it is every address of the machine."""
        return self.host in {"0.0.0.0", "::"}

    def check(self, token: str | None, flag: str) -> None:
        """Refuse to be reached from other machines without a token.

        Args:
            token: If there is one.
            flag: That would give one.

        Raises:
            BadInputError: with the address and the remedy.
        """
        if token is None and not self.is_loopback:
            raise BadInputError(
                f"Listening on {self.host} lets other machines look at the job and steer it: "
                f"{flag} is needed. {_MAKE_ONE}."
            )


def listen_from_text(text: str) -> Listen:
    """Read HOST:PORT; IPv6 addresses stand in brackets.

    Raises:
        BadInputError: it is not that.
    """
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16
    if not bare or not is_port or (":" in bare) != is_bracketed:
        raise BadInputError(
            f"{text!r} is not HOST:PORT, such as 127.0.0.1:8321, 0.0.0.0:8321 or [::1]:8321; port "
            "0 takes a free one."
        )
    return Listen(host=bare, port=int(port))


def read_token(path: Path) -> str:
    """The token in a file: one line.

    Raises:
        BadInputError: no such file, or nothing in it that could be a token.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"The token in {path}: {error}. {_MAKE_ONE}.") from error
    is_plain = token.isascii() and token.isprintable() and not set(token) & set(" :")
    if len(token) < _FEWEST_LETTERS or not is_plain:
        raise BadInputError(
            f"The token in {path} has {len(token)} letters; it must be one line of at least "
            f"{_FEWEST_LETTERS} printable ASCII letters without spaces and colons. {_MAKE_ONE}."
        )
    return token
