"""What a recorder notes in the engine's process, whichever engine it is, and how it is sent.

An error here ends the recording, never the server.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ifbbench.live.channel import Channel
from ifbbench.live.events import Added, Begin, End, Ended, Head, Preempted, Started, Step

# In the server's environment.
RECORD, RECORD_TOKENS = "IFBBENCH_RECORD", "IFBBENCH_RECORD_TOKENS"
COMPLETED, STOPPED, FAILED = "completed", "stopped", "failed"
Version = tuple[int, ...]


@dataclass(slots=True)
class Pending:
    """An iteration whose outputs have not come back: the fields of its Step.

    output: what the engine's scheduler returned.
    """

    output: Any
    begun_s: float
    submitted_s: float
    tokens: dict[str, int]
    started: list[Started]
    preempted: list[Preempted]
    head: Head | None
    free_blocks: int
    changes: list[Added | Ended]
    held: str | None = None

    @property
    def is_iteration(self) -> bool:
        """Whether anything was decided; else it is no iteration."""
        return bool(self.tokens or self.preempted)


class Notes:
    """What was noted of an engine and not sent.

    changes: requests that were added or stopped since the latest iteration was decided.
    preempted: requests that were pre-empted in the iteration that is being decided.
    in_flight: iterations whose outputs have not come back, the oldest first.
    ended: requests that the outputs being processed have ended.
    num_lost: number of iterations that were not sent since the latest one that was.
    """

    def __init__(self, directory: Path, begin: Begin) -> None:
        self.changes: list[Added | Ended] = []
        self.preempted: list[Preempted] = []
        self.in_flight: deque[Pending] = deque()
        self.ended: list[Ended] = []
        self.num_lost = 0
        self._unsent: list[Added | Ended] = []  # changes of the iterations that were lost
        self._channel = Channel(directory, begin)

    @property
    def is_open(self) -> bool:
        return self._channel.is_open

    def num_in_flight(self) -> int:
        return sum(pending.is_iteration for pending in self.in_flight)

    def decided(
        self,
        output: Any,
        begun_s: float,
        submitted_s: float,
        tokens: dict[str, int],
        started: list[Started],
        head: Head | None,
        free_blocks: int,
        held: str | None = None,
    ) -> None:
        """An iteration was decided; the arguments are fields of its Pending."""
        of_step = tokens, started, self.preempted, head, free_blocks, self.changes, held
        self.in_flight.append(Pending(output, begun_s, submitted_s, *of_step))
        self.changes, self.preempted = [], []

    def send(self, pending: Pending, ended_s: float, num_outputs: dict[str, int]) -> None:
        """Send an iteration whose outputs were processed, with the requests that these ended. What is no iteration
        passes its changes on."""
        if not pending.is_iteration:
            following = self.in_flight[0].changes if self.in_flight else self.changes
            following[:0] = pending.changes
            return
        ended, self.ended = self.ended, []
        step = Step(
            pending.begun_s,
            pending.submitted_s,
            ended_s,
            [*self._unsent, *pending.changes],
            pending.tokens,
            pending.started,
            pending.preempted,
            pending.head,
            pending.free_blocks,
            num_outputs,
            ended,
            self.num_lost,
            self.present() if self.num_lost else [],
            pending.held,
        )
        if self._channel.put(step):
            self.num_lost = 0
            self._unsent.clear()
        else:
            self.num_lost += 1
            self._unsent += [*pending.changes, *ended]

    def present(self) -> list[Added]:
        """Every request that is in the engine, with what it still has to do."""
        raise NotImplementedError

    def close(self) -> None:
        self._channel.close(End(self.changes))

    def abandon(self) -> None:
        self._channel.abandon()


AnyNotes = TypeVar("AnyNotes", bound=Notes)


def keeps_tokens() -> bool:
    return os.environ.get(RECORD_TOKENS) == "1"


def open_notes(
    engine: str,
    version: str,
    versions: tuple[Version, Version],
    log: logging.Logger,
    make: Callable[[Path], AnyNotes | None],
) -> AnyNotes | None:
    """The notes of an engine that is to be recorded; None, and a line in the log, where it is not.

    versions: first and last known version of the engine, each to its last given number.
    """
    directory = os.environ.get(RECORD)
    if not directory:
        log.warning("%s is not set: nothing is recorded. Give it the directory of the recording.", RECORD)
        return None
    if not knows_version(engine, version, versions, log):
        return None
    try:
        return make(Path(directory))
    except Exception as error:
        log.warning("nothing is recorded: %s", error)
        return None


def knows_version(engine: str, version: str, versions: tuple[Version, Version], log: logging.Logger | None) -> bool:
    """Whether a version is between the first and the last one that are known; if not, a line says so in the log."""
    first, last = versions
    numbers = version_numbers(version)
    if first <= numbers[: len(first)] and numbers[: len(last)] <= last:
        return True
    known = f"{_text(first)} to {_text(last)}" if first != last else _text(first)
    if log is not None:
        log.warning("nothing is recorded: %s %s is not known; expected %s.", engine, version, known)
    return False


def version_numbers(version: str) -> Version:
    """(0, 5, 23) for "0.5.23", "0.5.23.post1" and "0.5.23rc1"; a part that begins with no digit ends them."""
    numbers = list[int]()
    for part in version.split("."):
        digits = part[: next((index for index, one in enumerate(part) if not one.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def note(notes: AnyNotes | None, log: logging.Logger, what: Callable[..., None], *args: Any) -> AnyNotes | None:
    """Call a method of the notes. Returns them, or None as soon as the recording has ended."""
    if notes is None:
        return None
    try:
        what(notes, *args)
        return notes if notes.is_open else None
    except Exception:
        log.exception("the recording ends; the server goes on without it")
        notes.abandon()
        return None
