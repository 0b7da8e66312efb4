"""From the name that the user gives to the requests to replay: `load_trace` is the entry point of this package."""

import logging
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ifbbench.compressed import STANDARD_INPUT, is_read_once
from ifbbench.errors import InputError
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.settings.bounds import MAX_SPAN_S
from ifbbench.settings.config import ARRIVAL_SETTINGS, READ_SETTINGS, RunConfig
from ifbbench.settings.fields import did_you_mean, text
from ifbbench.settings.groups.recording import RECORDING_FORMATS
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.workload.arrivals import predecessors, session_starts, with_next_turns
from ifbbench.workload.formats import ReadOptions
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import (
    NO_ITERATION,
    NO_ORIGIN,
    NO_SESSION,
    RequestColumns,
    Reserve,
    Trace,
    columns_of,
    integers,
    seconds,
)

DEFAULT_DATASET = "default"
# The suffixes of files with workload specifications.
SPEC_SUFFIXES = (".yaml", ".yml", ".toml")
BUNDLED_SUFFIXES = (*SPEC_SUFFIXES, ".jsonl", ".json", ".csv")
RECORDED_TRACES = tuple(f"trace.{recording_format}" for recording_format in RECORDING_FORMATS)

Source: TypeAlias = str | Path | Trace | None

_log = logging.getLogger("ifbbench")


def load_trace(source: Source, config: RunConfig, progress: Progress = NO_PROGRESS) -> Trace:
    """The requests that `config` asks for, in order of arrival; each is made when it is asked for.

    source: see `read_source`, or a trace that it returned, so that several runs share what was read.

    InputError if the source cannot be read or the settings contradict each other.
    """
    trace = source if isinstance(source, Trace) else read_source(source, config, progress)
    return replace(trace, requests=_with_settings(columns_of(trace.requests), config))


def read_source(source: str | Path | None, config: RunConfig, progress: Progress = NO_PROGRESS) -> Trace:
    """The requests as recorded or drawn, before the settings that change arrivals and lengths. Of the settings, only
    READ_SETTINGS matter, and the seed if the source is a specification.

    source: a trace file, `-` (a trace on standard input), a workload specification (.yaml, .yml, .toml; drawn with
        `config.seed`), a run directory (its requests as replayed), the name of a bundled dataset, or None for the
        bundled default.
    """
    path, is_recorded = _find(source)
    if path.suffix.lower() in SPEC_SUFFIXES:
        from ifbbench.workload.draw import draw_trace
        from ifbbench.workload.spec import read_spec

        progress.stage("drawing requests")
        return draw_trace(read_spec(path), config.seed, str(path), config.samples_read)
    progress.stage("reading trace")
    options = ReadOptions(
        config.trace_format, config.columns, config.tokenizer, config.characters_per_token, config.default_output_len
    )
    return read_trace(path, config.samples_read, config.skip_bad_rows, is_recorded, options, progress)


def reading_of(source: str | Path | None, config: RunConfig) -> tuple[Any, ...]:
    """What the result of `read_source` depends on: sources with equal readings have equal requests."""
    path, _ = _find(source)
    seed = config.seed if path.suffix.lower() in SPEC_SUFFIXES else None
    return (str(path), *(getattr(config, name) for name in READ_SETTINGS), seed)


def for_other_process(source: Source, config: RunConfig) -> Source:
    """`source` for a process that is started: its requests, if this process has it as standard input or in a pipe."""
    if isinstance(source, str | Path) and is_read_once(Path(source)):
        return in_memory(read_source(source, config))
    return source


def in_memory(trace: Trace) -> Trace:
    """The same requests, none of which is read from a file again: faster if they are replayed several times, and the
    trace can be sent to another process."""
    columns = columns_of(trace.requests)
    recorded = {origin: columns.recall(origin) for origin in columns.origin if origin != NO_ORIGIN}
    return replace(trace, requests=replace(columns, recall=recorded.__getitem__))


def _find(source: str | Path | None) -> tuple[Path, bool]:
    """The file, and whether a run recorded it."""
    name = DEFAULT_DATASET if source is None else text(str(source), "TRACE")
    path = Path(name)
    if name == STANDARD_INPUT or (source is not None and path.exists() and not path.is_dir()):
        return path, False
    recorded = [path / trace for trace in RECORDED_TRACES if (path / trace).is_file()]
    if source is not None and recorded:
        return recorded[0], True
    bundled = bundled_path(name)
    if bundled is not None:
        return bundled, False
    problem = f"is a directory without {RECORDED_TRACES[0]}" if path.is_dir() else "does not exist"
    raise InputError(
        f"trace {name} {problem}; expected a trace file, a workload specification, a run directory, or one of the "
        f"bundled datasets {', '.join(bundled_names())}. Check the path.{did_you_mean(name, bundled_names())}"
    )


def _with_settings(columns: RequestColumns, config: RunConfig) -> RequestColumns:
    columns = _first(_without_first(columns, config.skip_samples), config.max_num_samples)
    reserved, outputs = Reserve(config.reserve).columns(columns.max_new_tokens, columns.output_len)
    prompts = columns.prompt_len
    if config.max_prompt_len is not None:
        prompts = integers(np.minimum(prompts, config.max_prompt_len))
    columns = replace(columns, prompt_len=prompts, max_new_tokens=reserved, output_len=outputs)
    if config.arrival == BY_ITERATION:
        columns = _by_iteration(columns)
    columns = _until(config.duration, _in_time(_with_arrivals(columns, config)), config.keeps_arrivals)
    if config.kv_retention_priority is not None:
        columns = with_next_turns(columns)
        if not columns.next_turns:
            _log.warning("--kv_retention_priority: no request of the trace comes after another one; no block is kept.")
    return columns if config.replica is None else _share(columns, config.replica)


def _by_iteration(columns: RequestColumns) -> RequestColumns:
    """For a client that hands out requests in the iterations in which a recorded engine got them. What its client
    stopped before any iteration is left out; what it stopped later would have gone on."""
    if columns.added_in is None or columns.stopped_in is None or min(columns.added_in) == NO_ITERATION:
        raise InputError(
            f"--arrival {BY_ITERATION}: not every request of the trace has the iteration in which it was added; "
            "expected the recording of a real engine. Leave it out."
        )
    added_in, stopped_in = np.asarray(columns.added_in), np.asarray(columns.stopped_in)
    outputs = np.where(stopped_in == NO_ITERATION, columns.output_len, columns.max_new_tokens)
    ran = np.flatnonzero((stopped_in == NO_ITERATION) | (stopped_in > added_in))
    return chosen_requests(replace(columns, output_len=integers(outputs)), ran)


def _in_time(columns: RequestColumns) -> RequestColumns:
    """`columns`, if all requests arrive within MAX_SPAN_S: later times would lose the precision of latencies."""
    arrivals_s, think_s = np.asarray(columns.arrival_s), np.asarray(columns.think_s or (0.0,))
    last_s = float(arrivals_s.max()) + float(think_s.sum())
    if last_s <= MAX_SPAN_S and arrivals_s.min() >= 0:  # false for NaN
        return columns
    raise InputError(
        f"the last request arrives {last_s:.3g} s after the first; expected at most {MAX_SPAN_S:.3g} s "
        "(100 years). Correct the arrivals, or give a higher rate or a smaller --time_scale."
    )


def _with_arrivals(columns: RequestColumns, config: RunConfig) -> RequestColumns:
    """As recorded, times `time_scale`; or those of a process, in the recorded order. Of sessions, it draws the first
    turns; later ones keep their distance, which only orders them: they arrive after an answer."""
    recorded_s = np.asarray(columns.arrival_s) * config.time_scale
    if columns.after is not None and columns.think_s is not None:
        columns = replace(columns, think_s=seconds(np.asarray(columns.think_s) * config.time_scale))
    if not any(getattr(config, name) for name in ARRIVAL_SETTINGS):
        return replace(columns, arrival_s=seconds(recorded_s))
    from ifbbench.workload.arrival_processes import chosen_process
    from ifbbench.workload.distributions import Stream, generator

    process = chosen_process(config)
    if process is None:
        return replace(columns, arrival_s=seconds(recorded_s))
    draws = generator(config.seed, Stream.ARRIVAL)
    if columns.after is None:
        return replace(columns, arrival_s=seconds(process.draw(draws, len(columns))))
    first = session_starts(predecessors(columns))
    firsts, session_of = np.unique(first, return_inverse=True)
    starts_s = process.draw(draws, len(firsts))
    later_s = np.maximum(recorded_s - recorded_s[first], 0)
    return replace(columns, arrival_s=seconds(starts_s[session_of] + later_s)).by_arrival()


def _until(duration_s: float | None, columns: RequestColumns, keeps_arrivals: bool) -> RequestColumns:
    """The requests that arrive by `duration_s`. The client leaves out those that arrive when a response comes."""
    if duration_s is None or not keeps_arrivals or columns.after is not None:
        return columns
    count = int(np.searchsorted(np.asarray(columns.arrival_s), duration_s, side="right"))
    if not count:
        raise InputError(
            f"--duration {duration_s:g}: no request arrives by then, the first one at {columns.arrival_s[0]:g} s; "
            "give a longer one."
        )
    if count == len(columns):
        _log.warning(
            "--duration %g: the trace ends before, with the last of its %d requests at %.6g s; it is not repeated.",
            duration_s,
            count,
            columns.arrival_s[-1],
        )
        return columns
    return _first(columns, count)


def _share(columns: RequestColumns, replica: str) -> RequestColumns:
    """The requests of replica K of N (`K/N`): requests, and sessions whose turns wait for each other as a whole, go to
    the replicas in turn."""
    number, replicas = map(int, replica.split("/"))
    turn = _waiting_sessions(columns)
    chosen = np.flatnonzero(turn % replicas == number - 1)
    if not len(chosen):
        kind = "requests" if columns.after is None else "sessions"
        raise InputError(
            f"--replica {replica}: no request is left for it, the trace has {turn.max() + 1} {kind}; give "
            "fewer replicas."
        )
    return chosen_requests(columns, chosen)


def stretch_of(trace: Trace, number: int, count: int) -> Trace:
    """The `number`-th, from 0 on, of `count` stretches of `trace` with equally many requests, or sessions as a whole.
    Its first request arrives at 0."""
    columns = columns_of(trace.requests)
    session = _waiting_sessions(columns)
    chosen = np.flatnonzero(session * count // (session.max() + 1) == number)
    return replace(trace, requests=_from_zero(chosen_requests(columns, chosen)))


def session_numbers(columns: RequestColumns) -> NDArray[np.int64]:
    """The number of each request's session, as routers see it, in the order in which sessions start. Sessions are those
    of `session_id`, and of `after` where a request has none; each request is one without them."""
    numbers = _waiting_sessions(columns)
    if columns.session_id is None:
        return numbers
    given = np.asarray(columns.session_id)
    numbers = np.where(given == NO_SESSION, numbers + given.max() + 1, given)
    _, firsts, number_of = np.unique(numbers, return_index=True, return_inverse=True)
    ranks: NDArray[np.int64] = np.argsort(np.argsort(firsts))
    return ranks[number_of]


def _waiting_sessions(columns: RequestColumns) -> NDArray[np.int64]:
    """As `session_numbers`, of sessions in which requests wait for others (`after`)."""
    if columns.after is None:
        return np.arange(len(columns))
    found: NDArray[np.int64] = np.unique(session_starts(predecessors(columns)), return_inverse=True)[1]
    return found


def chosen_requests(columns: RequestColumns, chosen: NDArray[np.int64]) -> RequestColumns:
    """The requests at these positions."""
    return _taken(columns, lambda column: array(column.typecode, np.asarray(column)[chosen].tobytes()))


def _first(columns: RequestColumns, count: int | None) -> RequestColumns:
    """The first `count` requests; all of them for None."""
    if count is None or count >= len(columns):
        return columns
    return _taken(columns, lambda column: column[:count])


def _without_first(columns: RequestColumns, count: int) -> RequestColumns:
    """The requests after the first `count`, of which the first one arrives at 0."""
    if not count:
        return columns
    if count >= len(columns):
        raise InputError(f"--skip_samples {count}: no request is left, the trace has {len(columns)}; give fewer.")
    return _from_zero(_taken(columns, lambda column: column[count:]))


def _from_zero(columns: RequestColumns) -> RequestColumns:
    """The requests with arrivals moved so that the first one is at 0."""
    arrivals_s = np.asarray(columns.arrival_s)
    return replace(columns, arrival_s=seconds(arrivals_s - arrivals_s.min()))


def _taken(columns: RequestColumns, take: Callable[["array[Any]"], "array[Any]"]) -> RequestColumns:
    """The requests that `take` leaves of each column."""
    kept: dict[str, Any] = {name: take(value) for name, value in vars(columns).items() if isinstance(value, array)}
    return replace(columns, **kept)


# Bundled datasets.


def bundled_path(name: str) -> Path | None:
    """The bundled file called `name`, with or without its suffix; None if there is none."""
    return next((path for path in _bundled_files() if name in (path.name, path.stem)), None)


def bundled_names() -> list[str]:
    """The names of the bundled datasets, without suffixes."""
    return [path.stem for path in _bundled_files()]


def _bundled_files() -> list[Path]:
    # In an installed package the folder is inside it, in a checkout beside it.
    package = Path(__file__).parent.parent
    candidates = (package / "datasets", package.parent / "datasets")
    for directory in candidates:
        if directory.is_dir():
            return sorted(path for path in directory.iterdir() if path.suffix in BUNDLED_SUFFIXES)
    raise InputError(
        f"the bundled datasets are missing; expected {' or '.join(map(str, candidates))}. Install ifbbench again, or "
        "give the path of a trace."
    )
