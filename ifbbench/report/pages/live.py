"""The state of a run that is going on, from the ends of the files that it is writing."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.json import Decoder
from rich.table import Table
from rich.text import Text

from ifbbench.analysis.number_texts import count, percent, significant, time_unit
from ifbbench.analysis.words import setting_of, window_name, words_of
from ifbbench.compressed import DamagedFile, GrowingFile
from ifbbench.engine.plan import Limit
from ifbbench.errors import InputError
from ifbbench.report import bar
from ifbbench.rundir.metrics import fullest_window
from ifbbench.rundir.reader import waiting_field
from ifbbench.rundir.rows import UNREADABLE, Id, Number, bad_line, read_rows
from ifbbench.rundir.run_directory import find_iterations, find_lines
from ifbbench.settings.fields import printable

# So much of the end of iterations.jsonl is read: the last 30 to 50 iterations.
TAIL_BYTES = 1 << 15
# TTFT is the median of so many requests that completed last.
RECENT_REQUESTS = 100
PAUSES_SHOWN = 3
BAR_CELLS = 20


class _Inflight(Struct, gc=False):
    """The part of a line in the form of TensorRT-LLM's executor."""

    context: int = field(name="numContextRequests", default=0)
    generation: int = field(name="numGenRequests", default=0)


class _Cache(Struct, gc=False):
    used: int | None = field(name="usedNumBlocks", default=None)
    blocks: int | None = field(name="maxNumBlocks", default=None)


class _Paused(Struct, gc=False):
    request_id: Id
    beneficiary: Id = field(name="for")


class _Window(Struct, gc=False):
    """The blocks of one of several attention windows."""

    blocks: Number = field(name="primaryMaxNumBlocks")
    used: Number = field(name="primaryUsedNumBlocks")


class _QueueHead(Struct, gc=False):
    reason: str


class _Details(Struct, gc=False):
    """The part of a line under "ifbbench"."""

    start_s: float
    latency_ms: float
    waiting: Number
    queued: Number
    bound_by: str
    paused: tuple[_Paused, ...]
    budget_used: Number
    windows: dict[str, _Window] = field(name="kv_cache_iteration_stats", default_factory=dict)
    queue_head: _QueueHead | None = None

    @property
    def held_by(self) -> str:
        """The limit that held what waits: that of the head of the queue, where it has one of its own."""
        return self.bound_by if self.queue_head is None else self.queue_head.reason


class _Iteration(Struct, gc=False):
    details: _Details = field(name="ifbbench")
    number: int = field(name="Iteration Counter", default=0)
    context: int = field(name="Context Requests", default=0)
    generation: int = field(name="Generation Requests", default=0)
    used: int | None = field(name="Used KV cache blocks", default=None)
    blocks: int | None = field(name="Max KV cache blocks", default=None)
    executor_number: int | None = field(name="iter", default=None)
    inflight: _Inflight | None = field(name="inflightBatchingStats", default=None)
    cache: _Cache | None = field(name="kvCacheStats", default=None)


class _Request(Struct, gc=False):
    outcome: str
    output_len: int = 0
    ttft_s: float | None = None


class _Planned(Struct, gc=False):
    output_len: int = 0


Line = TypeVar("Line", bound=Struct)


@dataclass(frozen=True)
class Snapshot:
    """The run now.

    tokens: number of output tokens of completed requests.
    time_s: time on its clock.
    held_by: the limit that held what waits.
    ttft_s: median of recent times to first token.
    pauses: the last pauses, (iteration, victim, beneficiary).
    window: tokens of the fullest one of several attention windows, which used_blocks and blocks are of.
    """

    completed: int
    failed: int
    requests: int
    tokens: int
    planned_tokens: int
    time_s: float
    iteration: int
    context: int
    generation: int
    waiting: int
    held_by: str
    budget: int
    used_blocks: int | None
    blocks: int | None
    tokens_per_s: float | None
    ttft_s: float | None
    pauses: tuple[tuple[int, Id, Id], ...]
    ended: bool
    window: str = ""

    @property
    def progress(self) -> str:
        """The requests that have ended, of all where these are known: those of a server are not."""
        done = self.completed + self.failed
        return f"{done:,} of {self.requests:,}" if self.requests else f"{done:,} ended"

    @property
    def line(self) -> str:
        """The batch, the cache, throughput and TTFT in words."""
        parts = [f"{self.context + self.generation} running, {self.waiting:,} waiting"]
        if self.blocks:
            parts.append(f"{percent((self.used_blocks or 0) / self.blocks)} of KV blocks")
        if self.tokens_per_s:
            parts.append(f"{significant(self.tokens_per_s)} tokens/s")
        if self.ttft_s is not None:
            parts.append(f"TTFT {in_unit(self.ttft_s)}")
        return ", ".join(parts)


def in_unit(seconds: float) -> str:
    """`seconds` in s, ms or µs."""
    unit, scale = time_unit([seconds])
    return f"{significant(seconds, scale)} {unit}"


class Follower:
    """Reads what a run has written since the last look.

    run: content of run.json.
    """

    def __init__(self, directory: Path, run: dict[str, Any]) -> None:
        self.directory = directory
        self._config: dict[str, Any] = dict(run.get("config") or {})
        self._requests = int((run.get("trace") or {}).get("requests") or 0)
        self._files: dict[str, GrowingFile] = {}
        self._num_lines: defaultdict[str, int] = defaultdict(int)
        self._tail = b""
        self._completed = self._failed = self._tokens = 0
        self._recent: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._pauses: deque[tuple[int, Id, Id]] = deque(maxlen=PAUSES_SHOWN)
        self._planned: int | None = None
        self._iterations, self._ended_requests = Decoder(_Iteration), Decoder(_Request)

    def snapshot(self) -> Snapshot | None:
        """The run now; None before its first iteration."""
        self._read_requests()
        rows = self._last_iterations()
        if not rows:
            return None
        numbered = [(row.number if row.executor_number is None else row.executor_number, row) for row in rows]
        for number, row in numbered:
            for pause in row.details.paused:
                entry = (number, pause.request_id, pause.beneficiary)
                if entry not in self._pauses and number >= (self._pauses[-1][0] if self._pauses else 0):
                    self._pauses.append(entry)
        number, last = numbered[-1]
        begin, end = rows[0].details.start_s, last.details.start_s + last.details.latency_ms / 1000
        generated = sum(_composition(row)[1] for row in rows)
        cache, window = last.cache or _Cache(last.used, last.blocks), ""
        if windows := last.details.windows:
            window = fullest_window({size: (one.used, one.blocks) for size, one in windows.items()})
            cache = _Cache(windows[window].used, windows[window].blocks)
        recent = sorted(self._recent)
        return Snapshot(
            self._completed,
            self._failed,
            self._requests,
            self._tokens,
            self._planned_tokens(),
            end,
            number,
            *_composition(last),
            getattr(last.details, waiting_field(self._config)),
            last.details.held_by,
            last.details.budget_used,
            cache.used,
            cache.blocks,
            generated / (end - begin) if end > begin else None,
            recent[len(recent) // 2] if recent else None,
            tuple(self._pauses),
            (self.directory / "summary.json").exists(),
            window,
        )

    def table(self, now: Snapshot) -> Table:
        """The state as lines with bars."""
        rows: list[tuple[str, float | None, str]] = []
        words = words_of(self._config)
        share = (now.completed + now.failed) / now.requests if now.requests else None
        failed = f", {now.failed:,} failed" if now.failed else ""
        rows.append(("requests", share, f"{now.progress}{failed}"))
        if now.planned_tokens:
            share = min(now.tokens / now.planned_tokens, 1.0)
            rows.append(("output tokens", share, f"{now.tokens:,} of {now.planned_tokens:,}"))
        running, slots = now.context + now.generation, self._config.get(setting_of("batch_size"))
        of = f" of {slots:,}" if slots else ""
        batch = f"{running:,}{of}: {now.context:,} in context, {now.generation:,} in generation phase"
        rows.append(("batch", running / slots if slots else None, batch))
        budget = self._config.get(setting_of("num_tokens"))
        if budget:
            rows.append((words.limit_name("num_tokens"), now.budget / budget, f"{now.budget:,} of {budget:,}"))
        if now.blocks:
            used = now.used_blocks or 0
            of_window = f" of the {window_name(now.window)}" if now.window else ""
            rows.append((words.limit_name("kv_blocks"), used / now.blocks, f"{used:,} of {now.blocks:,}{of_window}"))
        # A request that stands aside for prompts does not wait, and says nothing of those that do.
        limit = "" if now.held_by in ("none", Limit.PREFILL.value) else f", for {words.limit_name(now.held_by)}"
        rows.append(("waiting", None, f"{now.waiting:,} requests{limit}"))
        ttft = "" if now.ttft_s is None else f", TTFT {in_unit(now.ttft_s)} (median of the last {len(self._recent)})"
        rows.append(("now", None, f"{count(now.tokens_per_s)} output tokens/s{ttft}"))
        rows.append(("", None, f"{now.time_s:,.1f} s on the run's clock, iteration {now.iteration:,}"))
        for number, victim, beneficiary in now.pauses:
            rows.append((words.pause, None, f"{victim} for {beneficiary}, iteration {number:,}"))
        table = Table.grid(padding=(0, 2))
        for name, filled, text in rows:
            drawn = "" if filled is None else bar(min(filled, 1.0), BAR_CELLS)
            table.add_row(Text(name, "dim"), Text(drawn, "cyan"), Text(printable(text)))
        return table

    def _planned_tokens(self) -> int:
        if not self._requests:  # a server writes the row of a request when it ends
            return 0
        if self._planned is None:
            path = find_lines(self.directory, "trace")
            self._planned = sum(row.output_len for row in chain.from_iterable(read_rows(path, Decoder(_Planned))))
        return self._planned

    def _read_requests(self) -> None:
        """Count the requests that ended since the last look."""
        pieces = (self._decoded("requests", self._ended_requests, text) for text in self._new_lines("requests"))
        for row in chain.from_iterable(pieces):
            if row.outcome != "completed":
                self._failed += 1
                continue
            self._completed += 1
            self._tokens += row.output_len
            if row.ttft_s is not None:
                self._recent.append(row.ttft_s)

    def _last_iterations(self) -> list[_Iteration]:
        for text in self._new_lines("iterations"):
            self._tail += text
            if (excess := len(self._tail) - TAIL_BYTES) > 0:
                self._tail = self._tail[self._tail.find(b"\n", excess) + 1 :]  # whole lines
        return self._decoded("iterations", self._iterations, self._tail)

    def _new_lines(self, name: str) -> Iterator[bytes]:
        # Before the run has written its first line, its format is not known.
        if name not in self._files:
            path = find_iterations(self.directory) if name == "iterations" else find_lines(self.directory, name)
            if path.exists():
                self._files[name] = GrowingFile(path)
        if name not in self._files:
            return
        try:
            for text in self._files[name].new_lines():
                self._num_lines[name] += text.count(b"\n")
                yield text
        except DamagedFile as error:
            raise InputError(f"{self._files[name].path}: {error}. Restore the file, or run again.") from error

    def _decoded(self, name: str, decoder: "Decoder[Line]", text: bytes) -> list[Line]:
        """The lines that were read last; InputError for one that is not as `ifbbench run` writes it."""
        try:
            return decoder.decode_lines(text)
        except UNREADABLE:
            first = self._num_lines[name] - text.count(b"\n") + 1
            raise bad_line(self._files[name].path, text, first, decoder) from None


def _composition(row: _Iteration) -> tuple[int, int]:
    """Requests in the context phase and in the generation phase."""
    return (row.context, row.generation) if row.inflight is None else (row.inflight.context, row.inflight.generation)
