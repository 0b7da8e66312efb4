"""From what the user names to the requests to replay: the one way into workloads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ifbbench.config import RECORDING_FORMATS, RunConfig
from ifbbench.errors import InputError
from ifbbench.workload.arrivals import ArrivalProcess, Constant, Poisson
from ifbbench.workload.bundled import bundled_names, bundled_path
from ifbbench.workload.columns import Floats, RequestColumns, columns_of, integers, seconds
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.read import read_trace
from ifbbench.workload.reserve import Reserve
from ifbbench.workload.spec_file import SUFFIXES, read_spec
from ifbbench.workload.streams import Stream, generator
from ifbbench.workload.trace import Trace, TraceRequest

DEFAULT_DATASET = "default"
RECORDED_TRACES = tuple(f"trace.{recording_format}" for recording_format in RECORDING_FORMATS)


def load_trace(source: str | Path | None, config: RunConfig) -> Trace:
    """The requests that `config` asks for, in order of arrival; each is made when it is asked for.

    `source` is a trace file, a workload specification (.yaml, .yml, .toml), a run directory (its requests as
    replayed), the name of a bundled dataset, or None for the bundled default. A specification is drawn with
    `config.seed`. InputError if the source cannot be read or the settings contradict each other.
    """
    path, is_recorded = _find(source)
    if path.suffix.lower() in SUFFIXES:
        trace = draw_trace(read_spec(path), config.seed, str(path), config.max_num_samples)
    else:
        trace = read_trace(path, config.max_num_samples, config.skip_bad_rows, accept_cut=is_recorded)
    return replace(trace, requests=_with_settings(trace.requests, config))


def _find(source: str | Path | None) -> tuple[Path, bool]:
    """The file, and whether it is that of a run directory."""
    name = str(source or DEFAULT_DATASET)
    path = Path(name)
    if source is not None and path.is_file():
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
        f"bundled datasets {', '.join(bundled_names())}. Check the path."
    )


def _with_settings(requests: Sequence[TraceRequest], config: RunConfig) -> RequestColumns:
    columns = columns_of(requests)
    reserved, outputs = Reserve(config.reserve).columns(columns.max_new_tokens, columns.output_len)
    prompts = columns.prompt_len
    if config.max_prompt_len is not None:
        prompts = integers(np.minimum(prompts, config.max_prompt_len))
    return replace(
        columns,
        arrival_s=_arrivals(columns.arrival_s, config),
        prompt_len=prompts,
        max_new_tokens=reserved,
        output_len=outputs,
    )


def _arrivals(recorded_s: Floats, config: RunConfig) -> Floats:
    """As recorded, times `time_scale`; or at `request_rate`, in the recorded order."""
    if config.request_rate is None:
        if config.enable_exp_delays:
            raise InputError("--enable_exp_delays needs a rate; give --request_rate too, or leave it out.")
        return seconds(np.asarray(recorded_s) * config.time_scale)
    if config.time_scale != 1:
        raise InputError(
            "--time_scale scales recorded arrivals, which --request_rate replaces; expected one of the two. Leave out "
            "the other."
        )
    process: ArrivalProcess = (Poisson if config.enable_exp_delays else Constant)(config.request_rate)
    return seconds(process.draw(generator(config.seed, Stream.ARRIVAL), len(recorded_s)))
