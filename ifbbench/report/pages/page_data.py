"""What the run page shows of a run: a header for JSON, and arrays as one compressed block.

The page computes means and maxima of any stretch itself, from these arrays.
"""

import shlex
import zlib
from base64 import b64encode
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.waiting import names_queue_head
from ifbbench.analysis.words import words_of
from ifbbench.report.colours import limit_colours
from ifbbench.report.compat.perfetto import batch_composition
from ifbbench.report.tables import peak_blocks, settings_line
from ifbbench.report.what_if_table import what_if_table
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import waiting_field
from ifbbench.rundir.rows import Id, Span, single_steps
from ifbbench.rundir.run_directory import WHAT_IF
from ifbbench.rundir.timeline import Floats
from ifbbench.rundir.what_if import kept_what_if

PHASES = ("context", "generation", "recompute", "paused", "waiting", "skipped")
# Fields of a line of requests.jsonl that are numbers, which the page shows of a request.
REQUEST_NUMBERS = (
    "arrival_s",
    "prompt_len",
    "output_len",
    "queue_time_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "end_s",
    "pauses",
    "recomputed_tokens",
    "reused_tokens",
)
ITL_QUANTILES = 400
# Level 6 compresses 1 % more in twice the time.
LEVEL = 5
MICROSECONDS = 1e6
SLOWEST, BLOCKERS = 15, 15
NO_REQUEST = -1


class Block:
    """Named arrays one after the other, each in the smallest type of whole numbers that holds it, or as it is."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._index: dict[str, list[Any]] = {}
        self._size = 0

    def add(self, name: str, values: Any) -> None:
        """Add an array; floats stay floats of eight bytes."""
        array = np.asarray(values)
        if array.dtype.kind in "iub":
            low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
            kinds = ("u1", "u2", "u4") if low >= 0 else ("i1", "i2", "i4")
            kind = next((one for one in kinds if np.iinfo(one).min <= low and high <= np.iinfo(one).max), "f8")
        else:
            kind = "f8"
        data = np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()
        padding = -len(data) % 8  # each array begins at a multiple of its element size
        self._index[name] = [kind, self._size, int(array.size)]
        self._parts.append(data + bytes(padding))
        self._size += len(data) + padding

    def encoded(self) -> tuple[dict[str, list[Any]], str]:
        """Name to type, offset and length; and all bytes, as zlib makes them smaller, in base64."""
        return self._index, b64encode(zlib.compress(b"".join(self._parts), LEVEL)).decode()


def page_data(run: RecordedRun) -> dict[str, Any]:
    """Everything that the page shows of `run`."""
    findings, block = Findings(run), Block()
    ids = list(dict.fromkeys([*run.trace, *run.row_of, *run.spans]))
    position = {request_id: number for number, request_id in enumerate(ids)}
    names = _add_requests(block, run, ids)
    _add_iterations(block, run)
    causes = _add_spans(block, run, ids, position)
    limits = _add_heads(block, findings, position)
    if not isinstance(bounds := findings.bounds, str):
        block.add("request.least_s", _floats(map(bounds.request_s, ids)))
    ledger = [
        [
            entry.iteration,
            position[entry.victim],
            position[entry.beneficiary],
            entry.blocks_freed,
            entry.tokens_recomputed,
            entry.lost_s,
            entry.gained_s,
            entry.nth,
        ]
        for entry in findings.ledger.entries
    ]
    index, data = block.encoded()
    trace, model = run.data.run.get("trace") or {}, run.data.run.get("model") or {}
    summary, words = figures(run.data), words_of(run.config)
    return {
        "name": run.data.name,
        "settings": settings_line(run.data),
        "partial": run.data.partial,
        "trace": trace.get("name"),
        "model": model.get("name"),
        "device": model.get("device"),
        "config": run.config,
        "versions": run.data.run.get("versions") or {},
        "summary": summary,
        "num_kv_blocks": run.data.run.get("num_kv_blocks"),
        "windows": {size: pool for size, (_, pool) in run.iterations.blocks_of_window.items()},
        "kv_peak": peak_blocks(summary),
        "recorded_every": run.data.recorded_every,
        "micro_batches": run.data.num_micro_batches,
        "ids": [str(one) for one in ids],
        **names,
        "phases": PHASES,
        "causes": causes,
        "head_limits": limits,
        "names_queue_head": names_queue_head(run),
        "limits": run.iterations.limits,
        "pause": words.pause,
        "paused": words.paused,
        "skipped": words.skipped,
        "blocks": words.blocks(run.config.get("tokens_per_block")),
        "limit_texts": _limit_texts(run, causes),
        "waited": findings.waiting_text,
        "what_if": shown_what_if(run),
        "by_time": findings.by_time,
        "by_iterations": findings.by_iterations,
        "waiting_s": findings.all_waiting_s,
        "slowest": [vars(one) for one in findings.slowest(SLOWEST)],
        "blockers": [vars(one) for one in findings.heads.blockers[:BLOCKERS]],
        "ledger": ledger,
        "arrays": index,
        "data": data,
    }


def shown_what_if(run: RecordedRun) -> dict[str, Any]:
    """The table of other settings that `why` has kept in the run directory, or a sentence that says how to get it."""
    command = shlex.join(["ifbbench", "why", str(run.path)])
    found, is_of_run = kept_what_if(run.path)
    if found is None:
        text = "None was tried yet. This command tries them; the page shows them when it is written again:"
        return {"sentence": text, "command": command}
    if not is_of_run:
        text = f"Those in {WHAT_IF} were tried before the run was changed. This command tries them again:"
        return {"sentence": text, "command": command}
    shown = what_if_table(found)
    best = [one._asdict() | {"heading": one.heading} for one in shown.best]
    return shown._asdict() | {"rows": [one._asdict() for one in shown.rows], "best": best}


def _limit_texts(run: RecordedRun, causes: list[str]) -> dict[str, tuple[str, str, str]]:
    """Name, what a request waits for, and colour of each limit and cause of waiting."""
    words = words_of(run.config)
    colours = limit_colours((*words.limits, *run.iterations.limits, *causes))
    return {name: (words.limit_name(name), words.waits_for(name), colour) for name, colour in colours.items()}


def _add_requests(block: Block, run: RecordedRun, ids: list[Id]) -> dict[str, Any]:
    """The numbers of each request. Returns the names of outcomes, classes and parts of the attribution, and errors."""
    rows = [run.row_of.get(one, {}) for one in ids]
    for name in REQUEST_NUMBERS[1:]:
        block.add(f"request.{name}", _floats(row.get(name) for row in rows))
    arrivals = (run.arrival_s(one) if one in run.row_of or one in run.trace else None for one in ids)
    block.add("request.arrival_s", _floats(arrivals))
    outcome_of = [str(row.get("outcome", "running")) for row in rows]
    class_of = [str(row.get("class") or "") for row in rows]
    outcomes, classes = list(dict.fromkeys(outcome_of)), list(dict.fromkeys(class_of))
    block.add("request.outcome", list(map(outcomes.index, outcome_of)))
    block.add("request.class", list(map(classes.index, class_of)))
    block.add("request.rank", [run.rank.get(one, NO_REQUEST) for one in ids])
    attributions = [row.get("attribution_s") or {} for row in rows]
    parts = list(dict.fromkeys(chain.from_iterable(attributions)))
    for part in parts:
        block.add(f"attribution.{part}", _floats(one.get(part, 0.0) for one in attributions))
    errors = {str(number): row["error"] for number, row in enumerate(rows) if row.get("error")}
    part_names = {part: words_of(run.config).part_name(part) for part in parts}
    return {"outcomes": outcomes, "classes": classes, "parts": parts, "part_names": part_names, "errors": errors}


def _floats(values: Iterable[float | None]) -> Floats:
    """Numbers, with NaN for None."""
    return np.array(list(values), np.float64)


def _add_iterations(block: Block, run: RecordedRun) -> None:
    iterations = run.iterations
    start = np.round(iterations.start_s * MICROSECONDS).astype(np.int64)
    block.add("iteration.number", np.diff(iterations.number, prepend=0))
    block.add("iteration.start_us", np.diff(start, prepend=0))
    duration = np.round((iterations.end_s - iterations.start_s) * MICROSECONDS).astype(np.int64)
    block.add("iteration.duration_us", duration)
    delivery = np.round((iterations.delivered_s - iterations.end_s) * MICROSECONDS).astype(np.int64)
    block.add("iteration.delivery_us", delivery)
    block.add("iteration.used_blocks", np.nan_to_num(iterations.used_blocks).astype(np.int64))
    for size, (used, _) in iterations.blocks_of_window.items():
        block.add(f"iteration.used_blocks.{size}", np.nan_to_num(used).astype(np.int64))
    block.add("iteration.budget", iterations.budget_used)
    block.add("iteration.waiting", getattr(iterations, waiting_field(run.config)))
    block.add("iteration.bound", iterations.limit)


def _add_spans(block: Block, run: RecordedRun, ids: list[Id], place: dict[Id, int]) -> list[str]:
    """The spans, by request; requests in each phase of the batch; quantiles of ITL. Returns the causes of waiting."""
    of_request = [run.spans.get(one, []) for one in ids]
    spans = list(chain.from_iterable(of_request))
    first, last = _integers(span.first for span in spans), _integers(span.last for span in spans)
    phase = _integers(PHASES.index(span.phase) for span in spans)
    causes = list(dict.fromkeys(str(span.cause) for span in spans if span.phase == "waiting"))
    numbers = {name: number for number, name in enumerate(causes)}
    block.add("span.offset", np.cumsum([0, *map(len, of_request)]))
    block.add("span.first", first)
    block.add("span.length", last - first)
    block.add("span.phase", phase)
    block.add("span.tokens", _integers(span.tokens for span in spans))
    block.add("span.cause", _integers(_cause(span, numbers, place) for span in spans))
    block.add("span.chunk_offset", np.cumsum([0, *(len(span.chunks) for span in spans)]))
    block.add("span.chunks", _integers(chain.from_iterable(span.chunks for span in spans)))
    for name, values in zip(("context", "generation"), batch_composition(run), strict=True):
        block.add(f"iteration.{name}", values)
    block.add("itl_quantiles_s", _itl_quantiles(run, of_request))
    return causes


def _integers(values: Any) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _cause(span: Span, numbers: dict[str, int], place: dict[Id, int]) -> int:
    """The number of the cause of waiting, or the index of the request for which a pause made room."""
    if span.phase == "waiting":
        return numbers[str(span.cause)]
    return NO_REQUEST if span.cause is None else place.get(span.cause, NO_REQUEST)


def _itl_quantiles(run: RecordedRun, of_request: list[list[Span]]) -> Floats:
    """Evenly spaced quantiles of all gaps between tokens; empty where iterations were not all recorded."""
    if run.data.recorded_every > 1:
        return np.empty(0)
    producing = [[part for span in spans if span.produced for part in single_steps(span)] for spans in of_request]
    spans = list(chain.from_iterable(producing))
    counts, last = _integers(span.produced for span in spans), _integers(span.last for span in spans)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    tokens_of = _integers(sum(span.produced for span in spans) for spans in producing)
    request = np.repeat(np.arange(len(of_request)), tokens_of)
    every = run.data.num_micro_batches
    iterations = np.repeat(last, counts) - every * (np.repeat(ends - 1, counts) - np.arange(total))
    gaps = np.diff(run.iterations.delivered_at(iterations))[request[1:] == request[:-1]]
    return np.quantile(gaps, np.linspace(0, 1, ITL_QUANTILES)) if len(gaps) else np.empty(0)


def _add_heads(block: Block, findings: Findings, place: dict[Id, int]) -> list[str]:
    """The heads of the line, in stretches of iterations. Returns the names of their limits."""
    starts, heads = findings.heads.stretches
    limits = list(dict.fromkeys(head.limit for stretch in heads for head in stretch))
    block.add("head.start", starts)
    block.add("head.offset", np.cumsum([0, *map(len, heads)]))
    flat = list(chain.from_iterable(heads))
    block.add("head.rank", _integers(head.rank for head in flat))
    block.add("head.request", _integers(place.get(head.request_id, NO_REQUEST) for head in flat))
    block.add("head.limit", _integers(limits.index(head.limit) for head in flat))
    return limits
