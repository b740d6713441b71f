"""The exception tree. Each error says what happened, the numbers, and the remedy."""

EXIT_INFEASIBLE = 1
EXIT_BAD_INPUT = 2


class MalleusError(Exception):
    """Base of all errors that a user can cause or meet; `exit_code` is the process's status."""

    exit_code = EXIT_BAD_INPUT
    on_all_ranks = False
    """True on an error that every rank raises with the same message: rank 0 tells it."""


class BadInputError(MalleusError):
    """A file, flag or value that the user gave is wrong."""


class UnsupportedMegatronError(MalleusError):
    """The installed Megatron does not look the way the seams expect."""


class LevelError(MalleusError):
    """The job cannot run at the level that was required."""


class InfeasiblePlanError(MalleusError):
    """No plan exists for this problem."""

    exit_code = EXIT_INFEASIBLE


class MigrationError(MalleusError):
    """State cannot be moved to its next owners. The job stays on the plan that it has."""


class ReplicaError(MalleusError):
    """GPUs that must hold the same parameters do not, and the job was told to stop then."""


class StateLostError(MalleusError):
    """A migration failed when old state had been given back; the job ends on all ranks."""

    on_all_ranks = True


class SidecarError(MalleusError):
    """The sidecar is away or answered nonsense. Training never depends on it."""


class NoJobError(SidecarError):
    """The sidecar was asked about a job that nobody has described to it."""


def sentence(text: object) -> str:
    """A message of others, to be followed by a sentence of ours: it ends as one does."""
    words = str(text).strip()
    return words if words.endswith((".", "!", "?")) else f"{words}."
