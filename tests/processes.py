"""Processes that tests start: whether they, and those that they have started, are still there."""

import time
from collections.abc import Iterable
from pathlib import Path

# Long enough for a busy machine; what runs longer does not end.
PATIENCE_S = 300.0


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_ended(pids: Iterable[int]) -> None:
    """Wait until none of the processes is alive. A signal has been sent when the process still runs."""
    pids, deadline = list(pids), time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def children_of(pid: int) -> list[int]:
    """The processes that this one has started and not yet waited for."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
