"""Errors that reach the user as one clear line.

Every message says what is wrong, where, what was expected and what to do about it.
"""


class IfbbenchError(Exception):
    """A run that failed. The command line prints the message and exits with `exit_status`."""

    exit_status = 1


class InputError(IfbbenchError):
    """Bad usage or bad input: an option, a trace row, a model directory, an output that exists."""

    exit_status = 2


class RunFailed(IfbbenchError):
    """The run ended early; what was done is in its directory.

    outcome: how much was done, and where it is.
    """

    def __init__(self, reason: str, outcome: str = "") -> None:
        super().__init__(reason, outcome)
        self.reason, self.outcome = reason, outcome

    def __str__(self) -> str:
        return f"{self.reason} ({self.outcome})" if self.outcome else self.reason
