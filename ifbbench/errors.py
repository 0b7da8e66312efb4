"""Errors that reach the user as one clear line.

Every message says what is wrong, where, what was expected and what to do about it.
"""


class IfbbenchError(Exception):
    """A run that failed. The command line prints the message and exits with `exit_status`."""

    exit_status = 1


class InputError(IfbbenchError):
    """Bad usage or bad input: an option, a trace row, a model directory, an output that exists."""

    exit_status = 2
