"""When requests of a replica got their first token, as a router that passes tokens on sees it."""

from collections import deque
from collections.abc import Sequence

from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Stretch
from ifbbench.rundir.recorder import SummaryRecorder


class FirstTokens:
    """An Observer that passes everything on to `recorder`.

    times: when each request got its first token, in seconds, and its index in the share, in order of time."""

    def __init__(self, recorder: SummaryRecorder) -> None:
        self._recorder = recorder
        self._seen = set[int]()
        self.times = deque[tuple[float, int]]()

    def iteration(self, record: IterationRecord) -> None:
        self._recorder.iteration(record)
        self._note(record.context, 1)

    def stretch(self, stretch: Stretch) -> None:
        self._recorder.stretch(stretch)
        for position, turn in enumerate(stretch.turns):
            self._note(turn.context, stretch.length - position)

    def left(self, request: Request, error: str | None) -> None:
        self._recorder.left(request, error)

    def _note(self, chunks: Sequence[ContextChunk], position: int) -> None:
        """`chunks` ran in the iteration that is so many from the end."""
        for chunk in chunks:
            if chunk.is_last and chunk.request.index not in self._seen:
                self._seen.add(chunk.request.index)
                self.times.append((self._recorder.end_s_of(position), chunk.request.index))
