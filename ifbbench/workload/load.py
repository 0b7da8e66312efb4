"""From what the user names to the requests to replay: the one way into workloads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.workload.arrivals import ArrivalProcess, Constant, Poisson
from ifbbench.workload.bundled import bundled_names, bundled_path
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.fields import MAX_LENGTH
from ifbbench.workload.prefix import shortened
from ifbbench.workload.read import read_trace
from ifbbench.workload.reserve import Reserve
from ifbbench.workload.spec_file import SUFFIXES, read_spec
from ifbbench.workload.streams import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest

DEFAULT_DATASET = "default"
RECORDED_TRACE = "trace.jsonl"


def load_trace(source: str | Path | None, config: RunConfig) -> Trace:
    """The requests that `config` asks for, in order of arrival.

    `source` is a trace file, a workload specification (.yaml, .yml, .toml), a run directory (its requests as
    replayed), the name of a bundled dataset, or None for the bundled default. A specification is drawn with
    `config.seed`. InputError if the source cannot be read or the settings contradict each other.
    """
    path = _find(source)
    if path.suffix.lower() in SUFFIXES:
        trace = draw_trace(read_spec(path), config.seed, str(path), config.max_num_samples)
    else:
        trace = read_trace(path, config.max_num_samples, config.skip_bad_rows)
    return replace(trace, requests=_with_settings(trace.requests, config))


def _find(source: str | Path | None) -> Path:
    name = str(source or DEFAULT_DATASET)
    path = Path(name)
    if source is not None and path.is_file():
        return path
    if source is not None and (path / RECORDED_TRACE).is_file():
        return path / RECORDED_TRACE
    bundled = bundled_path(name)
    if bundled is not None:
        return bundled
    problem = f"is a directory without {RECORDED_TRACE}" if path.is_dir() else "does not exist"
    raise InputError(
        f"trace {name} {problem}; expected a trace file, a workload specification, a run directory, or one of the "
        f"bundled datasets {', '.join(bundled_names())}. Check the path."
    )


def _with_settings(requests: Sequence[TraceRequest], config: RunConfig) -> list[TraceRequest]:
    reserve = Reserve(config.reserve)
    arrivals_s = _arrivals(requests, config)
    longest = config.max_prompt_len or MAX_LENGTH
    return [
        replace(reserve.apply(shortened(request, longest)), arrival_s=arrival_s)
        for request, arrival_s in zip(requests, arrivals_s, strict=True)
    ]


def _arrivals(requests: Sequence[TraceRequest], config: RunConfig) -> list[float]:
    """Seconds: as recorded, times `time_scale`; or at `request_rate`, in the recorded order."""
    if config.request_rate is None:
        if config.enable_exp_delays:
            raise InputError("--enable_exp_delays needs a rate; give --request_rate too, or leave it out.")
        return [request.arrival_s * config.time_scale for request in requests]
    if config.time_scale != 1:
        raise InputError(
            "--time_scale scales recorded arrivals, which --request_rate replaces; expected one of the two. Leave out "
            "the other."
        )
    process: ArrivalProcess = (Poisson if config.enable_exp_delays else Constant)(config.request_rate)
    times_s: list[float] = process.draw(generator(config.seed, Stream.ARRIVAL), len(requests)).tolist()
    return times_s
