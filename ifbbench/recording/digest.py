"""The schedule digest: one hash of every decision of a run, times left out."""

import hashlib
import json

from ifbbench.batching.records import IterationRecord


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
        paused = {pause.victim.index for pause in record.paused}
        held = {request.index for request in record.held}
        left = ((self._leaving | paused | held) & self._generating) if self._leaving or paused or held else set()
        joined = (self._entering | (self._held - held)) - self._leaving - paused - held
        self._generating -= left
        self._generating |= joined
        context = sorted([chunk.request.index, chunk.length] for chunk in record.context)
        if context or record.num_generation or paused:
            line = {"context": context, "joined": sorted(joined), "left": sorted(left), "paused": sorted(paused)}
            self._hash.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._entering = {chunk.request.index for chunk in record.context if chunk.is_last}
        self._leaving = {request.index for request in record.finished}
        self._held = held

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
