"""The schedule digest: one hash of every decision of a run, times left out."""

import hashlib

from ifbbench.engine.records import IterationRecord, Stretch


def _line(context: list[list[int]], joined: list[int], left: list[int], paused: list[int]) -> bytes:
    """The line as JSON; lists of numbers are written alike in Python, but for the spaces."""
    lists = f'{{"context":{context},"joined":{joined},"left":{left},"paused":{paused}}}\n'
    return lists.replace(" ", "").encode()


# Generation went on, and nothing else.
_SAME_AGAIN = _line([], [], [], [])
_NOBODY: set[int] = set()


class ScheduleDigest:
    """sha256 over one canonical JSON line for each iteration that scheduled or paused something.

    Requests stand as their index in the trace. A line has the context chunks as [index, tokens], the requests that
    joined and left generation since the line before, and those paused, each sorted by index.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._generating: set[int] = set()
        self._entering: set[int] = set()
        self._leaving: set[int] = set()
        self._held: set[int] = set()

    def add(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        joined, left, paused, held = self._changes(record)
        if joined or left:
            self._generating -= left
            self._generating |= joined
        if record.context or record.num_generation or paused:
            context = sorted([[chunk.request.index, chunk.length] for chunk in record.context])
            changed = context or joined or left or paused
            self._hash.update(_line(context, sorted(joined), sorted(left), sorted(paused)) if changed else _SAME_AGAIN)
        self._entering = {chunk.request.index for chunk in record.context if chunk.is_last}
        self._leaving = {request.index for request in record.finished}
        self._held = held

    def _changes(self, record: IterationRecord) -> tuple[set[int], set[int], set[int], set[int]]:
        """Who joined and left generation since the iteration before, who is paused and who held."""
        if not (self._leaving or self._held or record.paused or record.held):
            return self._entering, _NOBODY, _NOBODY, _NOBODY
        paused = {pause.victim.index for pause in record.paused}
        held = {request.index for request in record.held}
        left = (self._leaving | paused | held) & self._generating
        joined = (self._entering | (self._held - held)) - self._leaving - paused - held
        return joined, left, paused, held

    def add_stretch(self, stretch: Stretch) -> None:
        """Take in all iterations of a stretch. From its second on nobody joins or leaves generation."""
        self.add(stretch.first)
        self._hash.update(_SAME_AGAIN * (stretch.length - 1))
        self._leaving = {request.index for request in stretch.finished}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
