"""`ifbbench import`: the log of another engine becomes a run directory, with what it says and what it does not.

vLLM: a line for each iteration. SGLang: a line for each prefill batch, and one for several decode batches.
TensorRT-LLM: an object for each iteration, with the state of each request where the server was asked for it.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.rundir import run_directory
from ifbbench.rundir.figures import recorded_figures
from ifbbench.rundir.line_types import TIMESTAMP_FORMAT, InflightLine, IterationDetails, PausedRequest
from ifbbench.rundir.lines import JsonLinesWriter
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from ifbbench.settings.names import setting
from ifbbench.studies.request_stats import RequestStats
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import Trace

SOURCE = "a log"
UNDATED = datetime(2000, 1, 1, tzinfo=UTC)
STAMP_S = 1e-6  # by which a line is before the next whole second


@dataclass(slots=True)
class LoggedIteration:
    """An iteration, as far as its log describes it. Times are seconds on any clock.

    contexts, context_tokens: requests and tokens of prompts.
    generating, generated: number of requests that generate, and of their tokens.
    active: requests that run or may run.
    queued: number of requests that wait.
    limit: what held the first of these.
    used_blocks: None if unknown.
    reused_blocks, missed_blocks: blocks of prompts that were found and not found, since the start.
    requests: what the log says of each request, by id.
    """

    start_s: float
    end_s: float
    contexts: int
    context_tokens: int
    generating: int
    generated: int
    active: int
    queued: int = 0
    limit: str = "none"
    used_blocks: int | None = None
    reused_blocks: int | None = None
    missed_blocks: int | None = None
    num_paused: int = 0
    requests: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Imported:
    """What a log says.

    format: what kind of log it is.
    settings: settings of its engine, by name.
    lost: what is not in it, in sentences.
    begun: date of the second 0 of its iterations.
    num_blocks, block_size: size of the KV cache.
    max_requests: that may be active.
    """

    engine: str
    format: str
    settings: dict[str, Any]
    iterations: list[LoggedIteration]
    lost: list[str]
    begun: datetime = UNDATED
    num_blocks: int | None = None
    block_size: int | None = None
    max_requests: int | None = None


def write_run(log: Imported, source: Path, content: bytes, output: Path, overwrite: bool) -> Path:
    """Write the run directory of a log; returns its path, `output` or a numbered one beside it. InputError if there are
    no iterations, or if it may not be written."""
    if not log.iterations:
        raise InputError(f"{source}: has no iteration that ran a request; expected a log of a server under load.")
    description = _description(log, source, hashlib.sha256(content).hexdigest())
    requests = RequestStats(log.block_size or 0)
    iterations = list(_lines(log, requests))
    description["trace"]["requests"] = len(requests.trace)

    def write_start(directory: Path, name: str) -> None:
        description["name"] = name
        write_trace(requests.trace, directory / "trace.jsonl", overwrite=True)
        description["trace"]["sha256"] = hashlib.sha256((directory / "trace.jsonl").read_bytes()).hexdigest()
        run_directory.write_begun(directory, description)

    files: dict[str, Sequence[Any]] = {"iterations": iterations, "spans": requests.spans, "requests": requests.lines}
    with run_directory.begun([output], overwrite, write_start) as directory:
        for name, lines in files.items():
            writer = JsonLinesWriter(directory / f"{name}.jsonl")
            for line in lines:
                writer.add(line)
            writer.close()
        run_directory.write_json(directory / run_directory.RUN, {**description, **_ENDED})
        run_directory.write_json(directory / "summary.json", _summary(log, directory, bool(requests.lines)))
    return directory


_ENDED = {"schedule_digest": None, "partial": False}


def _description(log: Imported, source: Path, sha256: str) -> dict[str, Any]:
    """The content of run.json."""
    known = {name: setting(name).check(value) for name, value in log.settings.items() if value is not None}
    config = RunConfig(engine=log.engine, **known).as_dict()
    # Where the log does not say it, the default of a setting is not what the server had.
    for name in {"model", "max_batch_size", "max_num_tokens", "dtype", "device"} - known.keys():
        del config[name]
    about = {"file": source.name, "format": log.format, "sha256": sha256, "lost": log.lost, "settings": [*known]}
    return {
        "name": "",
        "config": config,
        "derived": [],
        "num_kv_blocks": log.num_blocks,
        "seed": 0,
        "trace": run_directory.trace_identity(Trace(source.stem, [], "", SOURCE)),
        "model": None,
        "imported": about,
        "versions": dict(run_directory.versions()),
        "hardware": run_directory.hardware(),
        "git_revision": run_directory.git_revision(),
    }


def _lines(log: Imported, requests: RequestStats) -> Iterator[InflightLine]:
    """The lines of iterations, in order of time; follows the requests through them."""
    begin_s = min(one.start_s for one in log.iterations)
    max_requests = log.max_requests or max(one.active for one in log.iterations)
    for number, one in enumerate(log.iterations):
        start_s, end_s = one.start_s - begin_s, one.end_s - begin_s
        paused = requests.follow(number, start_s, end_s, one.requests)
        yield _line(log, one, number, max_requests, start_s, log.begun.timestamp() + start_s, paused)
    requests.close()


def _line(
    log: Imported,
    one: LoggedIteration,
    number: int,
    max_requests: int,
    start_s: float,
    epoch_s: float,
    paused: Sequence[int],
) -> InflightLine:
    latency_ms, scheduled = 1000 * (one.end_s - one.start_s), one.contexts + one.generating
    details = IterationDetails(
        start_s=start_s,
        latency_ms=latency_ms,
        host_ms=0.0,
        device_ms=latency_ms,
        queued=one.queued,
        waiting=max(one.queued + one.active - scheduled, 0),
        bound_by=one.limit,
        first_left_out=None,
        paused=[PausedRequest(request, request) for request in paused],
        tokens_recomputed=0,
        budget_used=one.context_tokens + one.generated,
        missed_blocks=one.missed_blocks,
        kv_fragmentation=0.0,
    )
    blocks = None if one.used_blocks is None else log.num_blocks
    return InflightLine(
        datetime.fromtimestamp(epoch_s, UTC).strftime(TIMESTAMP_FORMAT),
        number,
        one.active,
        max_requests,
        blocks,
        None if blocks is None or one.used_blocks is None else blocks - one.used_blocks,
        None if blocks is None else one.used_blocks,
        None if blocks is None else log.block_size,
        None,
        None,
        one.reused_blocks,
        scheduled,
        one.contexts,
        one.generating,
        one.context_tokens,
        0,
        one.num_paused,
        details,
    )


def _summary(log: Imported, directory: Path, has_requests: bool) -> dict[str, Any]:
    """The figures of summary.json. Without requests, throughput is that of the iterations: each generation request of
    one got a token, and which prompts were complete is not known."""
    found = recorded_figures(load_run(directory))
    found["pauses"] = sum(one.num_paused for one in log.iterations)
    if not has_requests:
        seconds = max(one.end_s for one in log.iterations) - log.iterations[0].start_s
        generated = sum(one.generated for one in log.iterations)
        computed = generated + sum(one.context_tokens for one in log.iterations)
        rates = [tokens / seconds if seconds > 0 else None for tokens in (generated, computed)]
        found |= {"duration_s": seconds, "request_throughput_per_s": None, "prefix_hit_rate": None}
        found |= {"waiting_by_limit": {}}
        found |= {"output_throughput_tokens_per_s": rates[0], "total_throughput_tokens_per_s": rates[1]}
    return found | _ENDED


class Written(NamedTuple):
    """When a line was written: in which whole second, and so long after the line at position `since`, if it says so."""

    second: float
    since: int | None = None
    gap_s: float = 0.0


def ends_within(lines: Sequence[Written]) -> list[float]:
    """When each of the lines was written, in order. Those of one second that say nothing else are spread over it."""
    found, before_s = list[float](), -math.inf
    of_second, seen = Counter(line.second for line in lines), Counter[float]()
    for line in lines:
        seen[line.second] += 1
        at_s = line.second + seen[line.second] / (of_second[line.second] + 1)
        if line.since is not None:
            at_s = found[line.since] + line.gap_s
        before_s = max(min(max(at_s, line.second), line.second + 1 - STAMP_S), before_s)
        found.append(before_s)
    return found
