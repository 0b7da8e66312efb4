"""The process that writes a recording: it reads events from standard input and writes run directories.

`python -m ifbbench.live.writer DIRECTORY` is started by a `Channel`, and ends when the server does. What came from a
server that was killed is complete, too. A recording that has grown too large or too old goes on in the next directory.
"""

import math
import os
import pickle
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ifbbench.clock import WallClock
from ifbbench.errors import IfbbenchError
from ifbbench.live.events import Added, Begin, End, Ended, Event, Step, take
from ifbbench.live.mirror import PRIORITY_STEP, EngineLimits, Mirror, RecordedRequest
from ifbbench.rundir import run_directory
from ifbbench.rundir.recorder import FLUSH_INTERVAL_S, Recorder
from ifbbench.rundir.traffic_trace import TrafficTrace
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import SGLANG, VLLM
from ifbbench.settings.modes import BatchingType
from ifbbench.settings.names import setting
from ifbbench.settings.servers import SERVERS
from ifbbench.workload.prompts import MAX_PREFIX_ID
from ifbbench.workload.trace import Trace, TraceRequest

SOURCE = "a running server"
CARRIED_OVER = "carried over"
# In the server's environment: when the recording goes on in the next directory.
MAX_MIB, MAX_HOURS = "IFBBENCH_RECORD_MAX_MIB", "IFBBENCH_RECORD_MAX_HOURS"
DEFAULT_MAX_MIB, DEFAULT_MAX_HOURS = 1024.0, 24.0
MAX_IN_MEMORY = 10_000  # figures of requests
TOKEN_BYTES = 8  # of Ended.unhashed
_READ_BYTES, _MIB, _HOUR_S = 1 << 20, 1 << 20, 3600.0


def settings_of(begin: Begin) -> RunConfig:
    """The settings of the engine, as those of a run."""
    values: dict[str, Any] = {"engine": begin.engine}
    if begin.engine == VLLM:
        values["vllm_version"] = setting("vllm_version").check(begin.version)
    if begin.engine == SGLANG:  # which has no options for these
        values |= {"enable_chunked_context": True, "enable_kv_cache_reuse": True}
    names = SERVERS[begin.engine].settings
    for option, value in begin.settings.items():
        name = names.get(option, option)
        if (name, value) == ("max_num_tokens", -1):  # SGLang: whole prompts
            values |= {name: None, "enable_chunked_context": False}
        elif value is not None:
            values[name] = setting(name).check(value)
    if (threshold := values.get("priority_scheduling_preemption_threshold")) is not None:
        # Between those of a trace. Priorities are integers, so that half a step more means the same.
        values["priority_scheduling_preemption_threshold"] = (threshold + 0.5) * PRIORITY_STEP
    return RunConfig(**values)


def limits_of(begin: Begin, config: RunConfig) -> EngineLimits:
    if begin.engine == SGLANG:  # which itself says what holds the head of its queue
        return EngineLimits(
            config.tokens_per_block,
            begin.num_blocks,
            config.max_seq_len or 0,
            config.max_num_tokens or 0,
            is_priority=config.enable_priority_scheduling,
            runs_prompts_apart=True,
        )
    return EngineLimits(
        config.tokens_per_block,
        begin.num_blocks,
        config.max_seq_len or 0,
        min(config.max_num_tokens or 0, config.max_num_scheduled_tokens or config.max_num_tokens or 0),
        int(config.watermark * (begin.num_blocks + 1)),
        config.scheduler_reserve_full_isl,
        bool(config.enable_chunked_context),
        config.scheduling_policy == "priority",
    )


class Segment:
    """One run directory of a recording.

    start_s: its time 0, on the engine's clock.
    present: requests that are in the engine when it begins; they make up a class of their own, and what they did before
        is not known here.
    """

    def __init__(self, directory: Path, begin: Begin, start_s: float, present: Iterable[Added] = ()) -> None:
        config = settings_of(begin)
        self._start_s, self._epoch_s = start_s, begin.epoch_s - begin.monotonic_s + start_s
        self._mirror = Mirror(limits_of(begin, config))
        self._mirror.continue_with(present)
        self._num_carried_over = len(self._mirror.requests)
        self._num_iterations = self._num_ignoring_end = 0
        self._open = ExitStack()  # until the end, no other process writes there
        self._description = self._described(begin, config)
        places = run_directory.numbered(directory)
        self.directory = self._open.enter_context(run_directory.begun(places, False, self._write_start))
        self._trace = TrafficTrace(self.directory / "trace.jsonl")
        # Figures of requests that have ended, as exact as in memory: a server goes on for days.
        file = TemporaryFile(dir=self.directory)  # noqa: SIM115 - closed with the directory
        self._figures, self._num_kept = self._open.enter_context(file), 0
        self._recorder = Recorder(
            self.directory,
            self._description,
            0,
            BatchingType.INFLIGHT_FUSED,
            config.max_batch_size or 0,
            _arrival_s,
            class_of=lambda number: CARRIED_OVER if number < self._num_carried_over else None,
        )

    def take(self, step: Step) -> None:
        """Write what an iteration did."""
        self.change(step.changes, step.begun_s)
        record = self._mirror.record(step, self._num_iterations, -self._start_s, self._epoch_s)
        ended = [(request, one) for one in step.ended if (request := self._mirror.remove(one)) is not None]
        record.finished = [request for request, one in ended if one.outcome == "completed"]
        self._recorder.iteration(record)
        self._num_iterations += 1
        if self._recorder.metrics.num_completed >= MAX_IN_MEMORY:
            pickle.dump(self._recorder.metrics.take_parts(), self._figures)
            self._num_kept += 1
        for request, one in ended:
            if one.outcome == "completed":
                request.complete()
                self._trace.add(_row(request, one))
            else:
                self._leave(request, one)

    def change(self, changes: Iterable[Added | Ended], now_s: float) -> None:
        """Requests were added, or stopped from outside, before `now_s` on the engine's clock."""
        for change in changes:
            if isinstance(change, Added):
                # The clocks of front end and engine may differ: it came before now, and not before the start.
                arrival_s = max(min(change.arrival_s - self._epoch_s, now_s - self._start_s), 0.0)
                self._mirror.add(change, arrival_s, self._num_iterations)
                self._num_ignoring_end += change.ignores_end
            elif (request := self._mirror.remove(change)) is not None:
                self._leave(request, change)

    def present(self) -> list[Added]:
        """The requests in the engine, for the next segment."""
        return self._mirror.described()

    def flush(self) -> None:
        self._trace.flush()
        self._recorder.flush()

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.directory.iterdir() if file.is_file())

    def age_s(self, now_s: float) -> float:
        return now_s - self._start_s

    def close(self, partial: bool, reason: str | None = None) -> None:
        """Complete the files.

        partial: the server was killed.
        reason: why the recording goes on elsewhere.
        """
        for name, request in self._mirror.requests.items():
            self._leave(request, Ended(name, "stopped", request.made, 1, []))
        self._description["trace"] |= self._trace.close(self._mirror.num_added)
        self._bring_figures()
        self._recorder.metrics.total = self._mirror.num_added
        if self._description["config"]["engine"] == SGLANG:  # it expects more tokens of such requests
            self._description["config"]["ignore_eos"] = self._num_ignoring_end == self._mirror.num_added
        if reason is not None:
            self._description["recorded"]["goes_on"] = reason
        with self._open:
            self._recorder.close(partial)

    def _bring_figures(self) -> None:
        """Bring the figures of all requests into memory, in the order in which they ended."""
        metrics = self._recorder.metrics
        latest = metrics.take_parts()
        self._figures.seek(0)
        for _ in range(self._num_kept):
            metrics.add_server(pickle.load(self._figures), 0)
        metrics.add_server(latest, 0)

    def _leave(self, request: RecordedRequest, ended: Ended) -> None:
        """A request ends that is not complete."""
        request.stopped_in = self._num_iterations + ended.in_flight
        error = None if ended.outcome == "stopped" else "the engine ended it with an error"
        self._recorder.left(request, error)
        request.complete()
        self._trace.add(_row(request, ended))

    def _write_start(self, directory: Path, name: str) -> None:
        self._description["name"] = name
        (directory / "trace.jsonl").touch()
        run_directory.write_begun(directory, self._description)

    def _described(self, begin: Begin, config: RunConfig) -> dict[str, Any]:
        return {
            "name": "",
            "config": config.as_dict() | {"device": "cpu" if begin.facts.get("device") == "cpu" else "cuda"},
            "derived": [],
            "num_kv_blocks": begin.num_blocks,
            "seed": 0,
            "trace": run_directory.trace_identity(Trace("", [], "", SOURCE)),
            "model": None,
            "recorded": {"engine": begin.engine, "version": begin.version, "settings": begin.settings, **begin.facts},
            "versions": dict(run_directory.versions()),
            "hardware": run_directory.hardware(),
            "git_revision": run_directory.git_revision(),
        }


def _arrival_s(request: Any) -> float:
    return float(request.arrival_s)


def _row(request: RecordedRequest, ended: Ended) -> TraceRequest:
    """The row of the trace of a request that has ended. Blocks are named by the beginning of their hash."""
    has_tokens = ended.tokens is not None
    hashes = ended.hashes or hashes_of(ended.unhashed, ended.hash_size)
    ids = tuple([int.from_bytes(block[:8], "big") % MAX_PREFIX_ID for block in hashes])
    named = not has_tokens and len(ids) > 0
    return TraceRequest(
        request.request_id,
        request.arrival_s,
        request.original_prompt_len,
        request.max_new_tokens + request.prompt_len - request.original_prompt_len,
        max(request.made, 1),  # one that ended before its first token would have had one
        prompt_tokens=tuple((ended.tokens or [])[: request.original_prompt_len]) if has_tokens else None,
        priority=request.priority,
        prefix_ids=ids if named else None,
        prefix_lens=(ended.hash_size,) * len(ids) if named else None,
        added_in=request.added_in,
        added_with=request.added_with,
        stopped_in=request.stopped_in,
    )


def hashes_of(tokens: bytes, size: int) -> list[bytes]:
    """A hash of each full block of `size` tokens, each of which depends on the blocks before."""
    width, state, found = size * TOKEN_BYTES, blake2b(digest_size=8), list[bytes]()
    for end in range(width, len(tokens) + 1, width):
        state.update(tokens[end - width : end])
        found.append(state.digest())
    return found


class Recording:
    """All run directories of a server, the first of which is `directory`."""

    def __init__(self, directory: Path, begin: Begin) -> None:
        self._directory, self._begin = directory, begin
        self._max_bytes = float(os.environ.get(MAX_MIB) or DEFAULT_MAX_MIB) * _MIB
        self._max_age_s = float(os.environ.get(MAX_HOURS) or DEFAULT_MAX_HOURS) * _HOUR_S
        self._segment = Segment(directory, begin, begin.monotonic_s)
        self._clock, self._flushed_s, self._is_flushed = WallClock(), 0.0, True

    def take(self, step: Step) -> None:
        if step.num_lost:
            reason = f"{step.num_lost + 1} iterations were lost: the engine was faster than the recorder"
            self._go_on(reason, step.ended_s, step.present)
        else:
            self._segment.take(step)
            self._is_flushed = False
        if self._clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()
            if self._segment.num_bytes > self._max_bytes:
                self._go_on(f"it has more than {self._max_bytes / _MIB:g} MiB", step.ended_s)
            elif self._segment.age_s(step.ended_s) > self._max_age_s:
                self._go_on(f"it is older than {self._max_age_s / _HOUR_S:g} hours", step.ended_s)

    def flush(self) -> None:
        """Make everything so far readable; nothing if it is."""
        if not self._is_flushed:
            self._segment.flush()
            self._is_flushed = True
        self._flushed_s = self._clock.now()

    def close(self, end: End | None) -> None:
        """Complete the files. end: None if the server was killed."""
        if end is not None:
            self._segment.change(end.changes, math.inf)
        self._segment.close(partial=end is None)

    def _go_on(self, reason: str, now_s: float, present: list[Added] | None = None) -> None:
        """Go on in the next directory. present: the requests in the engine, where they are not those recorded."""
        present = self._segment.present() if present is None else present
        self._segment.close(partial=False, reason=reason)
        self._segment = Segment(self._directory, self._begin, now_s, present)


def events(descriptor: int) -> Iterator[Event | None]:
    """What arrives at a file descriptor until its end; None when nothing does for a second."""
    buffer = bytearray()
    while True:
        if not select.select([descriptor], [], [], FLUSH_INTERVAL_S)[0]:
            yield None
            continue
        if not (content := os.read(descriptor, _READ_BYTES)):
            return
        buffer += content
        yield from take(buffer)


def write(descriptor: int, directory: Path) -> None:
    """Write a recording of all that arrives at a file descriptor."""
    recording: Recording | None = None
    for event in events(descriptor):
        if isinstance(event, Begin):
            recording = Recording(directory, event)
        elif recording is None:
            continue
        elif event is None:
            recording.flush()
        elif isinstance(event, Step):
            recording.take(event)
        elif isinstance(event, End):
            recording.close(event)
            return
    if recording is not None:
        recording.close(None)


def main(arguments: list[str]) -> int:
    (directory,) = arguments
    # A signal to end is for the server, whose end is the end of the events.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    try:
        write(sys.stdin.fileno(), Path(directory))
    except IfbbenchError as error:
        print(f"ifbbench recorder: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # the disk is full: what was written so far can be read
        print(f"ifbbench recorder: {directory} ends here: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
