"""A run as a trace for ui.perfetto.dev: iterations, a track for each request, flows of pauses, and counters; of a fleet
that of each replica as a process, with the decisions of the router and the transfers.

The file has Perfetto's own format, a sequence of protobuf TracePackets. Field numbers are those of
protos/perfetto/trace in Perfetto's repository.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.words import Words, window_name, words_of
from ifbbench.files import new_file
from ifbbench.rundir.client_figures import load_gauges
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.reader import covering, load_run
from ifbbench.rundir.rows import Id, Span
from ifbbench.rundir.timeline import NO_REQUEST, Floats, Integers

FILE = "trace.perfetto-trace"
NANOSECONDS = 1e9
# Types of a TrackEvent.
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
# Track ids: the processes, the iterations, then counters, and requests from FIRST_REQUEST on.
ENGINE, REQUESTS, ITERATIONS, FIRST_COUNTER, FIRST_REQUEST = 1, 2, 3, 10, 1000
COUNTERS = (
    "KV blocks used",
    "tokens in the batch",
    "context requests",
    "generation requests",
    "requests waiting",
    "requests queued",
)
NAMES = (
    "iteration",
    "context",
    "generation",
    "recompute",
    "paused",
    "waiting",
    "skipped",
    "gets the blocks",
    "not sent yet",
    "until the first token",
    "failed",
    "routed",
    "transfer",
)
CLIENT_NAMES = {"waiting": "not sent yet", "context": "until the first token", "generation": "generation"}
NOTES = (
    "iteration",
    "last iteration",
    "tokens",
    "for",
    "bound by",
    "first left out",
    "prompt tokens",
    "output tokens",
    "replica",
    "requests seen",
    "tokens seen",
    "hit tokens seen",
    "prefill tokens seen",
    "queued seen",
    "KV use seen",
)
NAME_IDS = {name: number for number, name in enumerate(NAMES, start=1)}
NOTE_IDS = {name: number for number, name in enumerate(NOTES, start=1)}
# What a router saw of the replica that it chose, by the name in `offers`.
SEEN = {
    "requests": "requests seen",
    "tokens": "tokens seen",
    "hit_tokens": "hit tokens seen",
    "prefill_tokens": "prefill tokens seen",
    "queued": "queued seen",
    "kv_use": "KV use seen",
}
# Tracks of a fleet: its router and its transfers, and from FLEET_STRIDE on those of each replica in turn.
ROUTER, DECISIONS, TRANSFERS, FLEET_STRIDE = 1, 2, 10, 1 << 40
# Sequence flags: the interned names begin, and are used.
CLEARED, NEEDED = 1, 2
PACKETS_AT_ONCE = 1 << 16


def write_trace(run: RecordedRun, into: Path) -> Path:
    """Write the trace into a directory; returns the file. InputError if it cannot be written."""
    path = into / FILE
    with new_file(path, overwrite=True) as file:
        if run.data.is_fleet:
            packets = _fleet_packets(run)
        else:
            packets = _client_packets(run) if run.data.endpoint else _packets(run)
        while gathered := b"".join(islice(packets, PACKETS_AT_ONCE)):
            file.write(gathered)
    return path


def _packets(run: RecordedRun) -> Iterator[bytes]:
    yield _names(words_of(run.config))
    yield from _engine(run, ("engine", "requests"))


def _engine(run: RecordedRun, processes: tuple[str, str], number: int = 0) -> Iterator[bytes]:
    """The tracks of an engine, which are two processes. number: of its replica in a fleet, from 1 on."""
    base = number * FLEET_STRIDE
    engine, requests = (
        _number(1, 2 * number + place) + _text(6, name) for place, name in enumerate(processes, start=1)
    )
    yield _track(base + ENGINE, "", _part(3, engine))
    yield _track(base + REQUESTS, "", _part(3, requests) + _number(11, 3))  # children in the order of their rank
    yield _track(base + ITERATIONS, "iterations", _number(5, base + ENGINE))
    windows = [f"KV blocks used, {window_name(size)}" for size in run.iterations.blocks_of_window]
    for index, name in enumerate((*COUNTERS, *windows)):
        unit = _part(8, _number(3, 2))  # a count
        yield _track(base + FIRST_COUNTER + index, name, _number(5, base + ENGINE) + unit)
    yield from _iterations(run, base)
    yield from _counters(run, base)
    yield from _requests(run, base)


def _fleet_packets(fleet: RecordedRun) -> Iterator[bytes]:
    """The decisions of the router, transfers, and the tracks of each replica that ran something."""
    data = fleet.data
    yield _names(words_of(data.config))
    router = _number(1, 1) + _text(6, f"router {data.config.get('router')}")
    yield _track(ROUTER, "", _part(3, router))
    yield _track(DECISIONS, "decisions", _number(5, ROUTER))
    rows = sorted(fleet.row_of.values(), key=lambda row: float(row["arrival_s"]))
    for row in rows:
        if (replica := row.get("replica", row.get("prefill_replica"))) is None:
            continue
        content = _number(10, NAME_IDS["routed"]) + _note("for", f"request {row['request_id']}")
        content += _note("replica", int(replica)) + _note("prompt tokens", int(row["prompt_len"]))
        for name, values in (row.get("offers") or {}).items():
            if name in SEEN and replica < len(values) and values[replica] is not None:
                seen = values[replica]
                content += _note(SEEN[name], f"{seen:.3f}" if name == "kv_use" else int(seen))
        yield _event(_nanoseconds(np.array([row["arrival_s"]]))[0], INSTANT, DECISIONS, content)
    yield from _transfers(rows)
    for number, path in enumerate(replica_directories(data.path)):
        replica_run = RecordedRun(load_run(path))
        if not replica_run.nothing_ran:
            name = f"replica {number}"
            yield from _engine(replica_run, (name, f"{name}: requests"), number + 1)


def _transfers(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Transfers of keys and values, those at the same time on tracks of their own."""
    ends_s = list[float]()
    sent = [row for row in rows if row.get("transfer_end_s") is not None]
    for row in sorted(sent, key=lambda row: float(row["transfer_start_s"])):
        start_s, end_s = float(row["transfer_start_s"]), float(row["transfer_end_s"])
        lane = next((lane for lane, until_s in enumerate(ends_s) if until_s <= start_s), len(ends_s))
        if lane == len(ends_s):
            ends_s.append(end_s)
            yield _track(TRANSFERS + lane, "transfers", _number(5, ROUTER))
        ends_s[lane] = end_s
        content = _number(10, NAME_IDS["transfer"]) + _note("for", f"request {row['request_id']}")
        first, last = _nanoseconds(np.array([start_s, end_s]))
        yield _event(first, BEGIN, TRANSFERS + lane, content)
        yield _event(last, END, TRANSFERS + lane)


def _client_packets(run: RecordedRun) -> Iterator[bytes]:
    """The tracks of a run against an endpoint: requests in flight, gauges of the server, and what the client saw."""
    yield _names(words_of(run.config))
    process = _number(1, 1) + _text(6, f"endpoint {(run.data.endpoint or {}).get('url')}")
    yield _track(ENGINE, "", _part(3, process))
    yield _track(REQUESTS, "", _part(3, _number(1, 2) + _text(6, "requests")) + _number(11, 3))
    sent = run.data.spans[run.data.spans["phase"] != "waiting"].groupby("request_id")
    changes = [*((time_s, 1) for time_s in sent["start_s"].min()), *((time_s, -1) for time_s in sent["end_s"].max())]
    times_s, steps = np.array(sorted(changes), float).reshape(-1, 2).T
    gauges = {"requests in flight": (times_s, np.cumsum(steps)), **load_gauges(run.data)}
    for index, (name, (at_s, values)) in enumerate(gauges.items()):
        yield _track(FIRST_COUNTER + index, name, _number(5, ENGINE) + _part(8, _number(3, 2)))
        for time_ns, value in zip(_nanoseconds(at_s), values.tolist(), strict=True):
            double = _varint(44 << 3 | 1) + struct.pack("<d", value)
            yield _event(time_ns, COUNTER, FIRST_COUNTER + index, double)
    spans = run.data.spans.groupby("request_id")
    for index, (request_id, row) in enumerate(run.row_of.items()):
        track = FIRST_REQUEST + index
        yield _track(track, f"request {request_id}", _number(5, REQUESTS) + _number(12, index))
        own = spans.get_group(str(request_id)) if str(request_id) in spans.groups else run.data.spans[:0]
        for phase, start, end, tokens in own[["phase", "start_s", "end_s", "tokens"]].itertuples(index=False):
            first, last = _nanoseconds(np.array([start, end]))
            yield _event(first, BEGIN, track, _number(10, NAME_IDS[CLIENT_NAMES[phase]]) + _note("tokens", int(tokens)))
            yield _event(last, END, track)
        if row.get("error"):
            at_s = np.array([row["arrival_s"] if row.get("sent_s") is None else row["sent_s"]])
            yield _event(
                _nanoseconds(at_s)[0], INSTANT, track, _number(10, NAME_IDS["failed"]) + _note("for", row["error"])
            )


# Messages.


# The two bytes of each 14 bits that others follow, and the one or two bytes of each 14 bits that end a number.
_CONTINUED = [bytes((value & 0x7F | 0x80, value >> 7 | 0x80)) for value in range(0x4000)]
_LAST = [bytes((value,) if value < 0x80 else (value & 0x7F | 0x80, value >> 7)) for value in range(0x4000)]


def _varint(value: int) -> bytes:
    parts = b""
    while value >= 0x4000:
        parts += _CONTINUED[value & 0x3FFF]
        value >>= 14
    return parts + _LAST[value]


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _part(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _part(field, text.encode())


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + value.to_bytes(8, "little")


_SEQUENCE = _number(10, 1)
_TAIL = _SEQUENCE + _number(13, NEEDED)
_TIME, _EVENT, _TRACK = _varint(8 << 3), _varint(11 << 3 | 2), _varint(11 << 3)


def _names(words: Words) -> bytes:
    """The packet with the names of events and of their notes, which later ones refer to by number."""
    content = b"".join(
        _part(field, _number(1, number) + _text(2, words.phase(name)))
        for field, names in ((2, NAME_IDS), (3, NOTE_IDS))
        for name, number in names.items()
    )
    return _part(1, _SEQUENCE + _number(13, CLEARED) + _part(12, content))


def _track(uuid: int, name: str, content: bytes) -> bytes:
    return _part(1, _SEQUENCE + _part(60, _number(1, uuid) + (_text(2, name) if name else b"") + content))


def _event(time_ns: int, kind: int, track: int, content: bytes = b"") -> bytes:
    event = _on_track(kind, track) + content
    packet = _TIME + _varint(time_ns) + _EVENT + _varint(len(event)) + event + _TAIL
    return b"\n" + _varint(len(packet)) + packet


@lru_cache
def _on_track(kind: int, track: int) -> bytes:
    return _number(9, kind) + _TRACK + _varint(track)


def _note(name: str, value: int | str) -> bytes:
    content = _NUMBER_NOTES[name] + _varint(value) if isinstance(value, int) else _TEXT_NOTES[name] + _text(6, value)
    return _NOTE + _varint(len(content)) + content


_NOTE = _varint(4 << 3 | 2)
_TEXT_NOTES = {name: _number(1, number) for name, number in NOTE_IDS.items()}
_NUMBER_NOTES = {name: begin + _varint(4 << 3) for name, begin in _TEXT_NOTES.items()}


# Events.


def _nanoseconds(seconds: Floats) -> list[int]:
    times: list[int] = np.round(np.maximum(seconds, 0.0) * NANOSECONDS).astype(np.int64).tolist()
    return times


def _iterations(run: RecordedRun, base: int) -> Iterator[bytes]:
    iterations, name = run.iterations, _number(10, NAME_IDS["iteration"])
    bound = [_note("bound by", words_of(run.config).limit_name(limit)) for limit in iterations.limits]
    left_out = [_note("first left out", str(request)) for request, _ in iterations.left_out_pairs]
    columns = (
        _nanoseconds(iterations.start_s),
        _nanoseconds(iterations.end_s),
        iterations.number.tolist(),
        iterations.limit.tolist(),
        iterations.left_out.tolist(),
        iterations.budget_used.tolist(),
    )
    for start, end, number, limit, first, tokens in zip(*columns, strict=True):
        content = name + _note("iteration", number) + _note("tokens", tokens) + bound[limit]
        yield _event(start, BEGIN, base + ITERATIONS, content + (left_out[first] if first != NO_REQUEST else b""))
        yield _event(end, END, base + ITERATIONS)


def _counters(run: RecordedRun, base: int) -> Iterator[bytes]:
    """A value where a counter changes."""
    iterations = run.iterations
    context, generation = batch_composition(run)
    used_blocks = [iterations.used_blocks, *(used for used, _ in iterations.blocks_of_window.values())]
    blocks, *of_windows = (np.nan_to_num(used).astype(np.int64) for used in used_blocks)
    series = (blocks, iterations.budget_used, context, generation, iterations.waiting, iterations.queued, *of_windows)
    times = np.array(_nanoseconds(iterations.start_s))
    for index, values in enumerate(series):
        changes = np.flatnonzero(np.diff(values, prepend=NO_REQUEST))
        for time_ns, value in zip(times[changes].tolist(), values[changes].tolist(), strict=True):
            yield _event(time_ns, COUNTER, base + FIRST_COUNTER + index, _number(30, value))
        yield _event(_nanoseconds(iterations.end_s[-1:])[0], COUNTER, base + FIRST_COUNTER + index, _number(30, 0))


def batch_composition(run: RecordedRun) -> tuple[Integers, Integers]:
    """Requests in the context phase, recomputation included, and in the generation phase of each iteration."""
    spans = [span for spans in run.spans.values() for span in spans]
    last = max([int(run.iterations.number[-1]), *(span.last for span in spans)])
    counts = []
    for phases in (("context", "recompute"), ("generation",)):
        chosen = [span for span in spans if span.phase in phases]
        stretches = (_integers(span.first for span in chosen), _integers(span.last for span in chosen))
        covered = covering(*stretches, last, run.data.num_micro_batches)
        counts.append(covered[run.iterations.number].astype(np.int64))
    return counts[0], counts[1]


def _integers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _requests(run: RecordedRun, base: int) -> Iterator[bytes]:
    ids = list(dict.fromkeys([*run.trace, *run.spans]))
    track = {request_id: base + FIRST_REQUEST + index for index, request_id in enumerate(ids)}
    words, pause_number = words_of(run.config), 0
    begins_s = _begins(run)
    for index, request_id in enumerate(ids):
        spans, row = run.spans.get(request_id, []), run.row_of.get(request_id, {})
        yield _track(track[request_id], f"request {request_id}", _number(5, base + REQUESTS) + _number(12, index))
        if not spans:
            continue
        bounds = _bounds(run, begins_s[request_id], spans[-1], row.get("end_s"))
        lengths = b"".join(_note(f"{name} tokens", int(row[f"{name}_len"])) for name in ("prompt", "output") if row)
        for span, start, end in zip(spans, bounds, bounds[1:], strict=False):
            content = _number(10, NAME_IDS[span.phase]) + _note("iteration", span.first)
            content += _note("last iteration", span.last)
            if span.tokens:
                content += _note("tokens", span.tokens)
            if span.cause is not None:
                content += _note("for", _cause(span, words))
            if span is spans[0]:
                content += lengths
            flow = b""
            if span.phase == "paused" and span.cause in track:
                pause_number += 1
                flow = _fixed(47, base + pause_number)
            yield _event(start, BEGIN, track[request_id], content + flow)
            yield _event(end, END, track[request_id])
            if flow and span.cause is not None:
                yield _event(
                    start,
                    INSTANT,
                    track[span.cause],
                    _number(10, NAME_IDS["gets the blocks"])
                    + _note("for", f"request {request_id} is {words.paused}")
                    + _fixed(48, base + pause_number),
                )


def _begins(run: RecordedRun) -> dict[Id, Floats]:
    """When the spans of each request begin (s); found at once, because np.interp converts the numbers of all iterations
    whenever it is called."""
    firsts = _integers(span.first for spans in run.spans.values() for span in spans)
    begins_s = np.interp(firsts, run.iterations.number, run.iterations.start_s)
    ends = np.cumsum(_integers(map(len, run.spans.values())))
    return dict(zip(run.spans, np.split(begins_s, ends), strict=False))  # the last part is empty


def _bounds(run: RecordedRun, begins_s: Floats, last: Span, end_s: float | None) -> list[int]:
    """When each span begins, and the last one ends: a span lasts until the next one begins."""
    end = run.iterations.end_of(last.last) if end_s is None else float(end_s)
    return _nanoseconds(np.maximum.accumulate(np.append(begins_s, end)))


def _cause(span: Span, words: Words) -> str:
    cause: Id | None = span.cause
    return f"request {cause}" if span.phase == "paused" else words.waits_for(None if cause is None else str(cause))
