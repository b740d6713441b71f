"""What is said once, however often it comes, and again when it had gone for a long time."""

_MAX_WARNINGS = 20
LONG = 100
"""Iterations that were answered in a row: what comes after them is told anew."""
_CUT = (
    f"Further warnings of {_MAX_WARNINGS} kinds and more are left out until there was none for "
    f"{LONG} iterations; the sidecar's /v1/status has the present one."
)


class Once:
    """Remembers what was said. An endless variety is cut short, until there is quiet."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._is_cut = False
        self._quiet: dict[str, int] = {}
        """What was said -> how many iterations in a row were answered since it came last."""

    def say(self, warning: str | None, as_what: str | None = None) -> tuple[str, ...]:
        """The warning if it was not said yet.

        Args:
            warning: What to say, if anything.
            as_what: What it counts as, if not as its own text.
        """
        what = as_what or warning
        if warning is None or what is None:
            return ()
        is_new = what not in self._quiet
        if is_new and len(self._quiet) >= _MAX_WARNINGS:
            self.interrupt()  # else an endless variety had its turn again and again
            is_first, self._is_cut = not self._is_cut, True
            return (_CUT,) if is_first else ()
        self._quiet[what] = 0
        return (warning,) if is_new else ()

    def pass_iteration(self) -> None:
        """One more was answered: what has not come for a long time is forgotten."""
        passed = {what: quiet + 1 for what, quiet in self._quiet.items()}
        self._quiet = {what: quiet for what, quiet in passed.items() if quiet < LONG}
        self._is_cut = self._is_cut and len(self._quiet) >= _MAX_WARNINGS

    def interrupt(self) -> None:
        """An iteration was not answered: the row begins anew."""
        self._quiet = dict.fromkeys(self._quiet, 0)
