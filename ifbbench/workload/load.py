"""From the name that the user gives to the requests to replay: `load_trace` is the entry point of this package."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ifbbench.clock import NO_PROGRESS, Progress
from ifbbench.config import RECORDING_FORMATS, RunConfig
from ifbbench.errors import InputError
from ifbbench.fields import did_you_mean
from ifbbench.workload.distributions import ArrivalProcess, Constant, Poisson, Stream, generator
from ifbbench.workload.reading import read_trace
from ifbbench.workload.spec import SUFFIXES as SPEC_SUFFIXES
from ifbbench.workload.spec import draw_trace, read_spec
from ifbbench.workload.trace import Floats, RequestColumns, Reserve, Trace, columns_of, integers, seconds

DEFAULT_DATASET = "default"
BUNDLED_SUFFIXES = (*SPEC_SUFFIXES, ".jsonl", ".json", ".csv")
RECORDED_TRACES = tuple(f"trace.{recording_format}" for recording_format in RECORDING_FORMATS)


def load_trace(source: str | Path | None, config: RunConfig, progress: Progress = NO_PROGRESS) -> Trace:
    """The requests that `config` asks for, in order of arrival; each is made when it is asked for.

    source: a trace file, a workload specification (.yaml, .yml, .toml; drawn with `config.seed`), a run directory (its
        requests as replayed), the name of a bundled dataset, or None for the bundled default.

    InputError if the source cannot be read or the settings contradict each other.
    """
    path, is_recorded = _find(source)
    if path.suffix.lower() in SPEC_SUFFIXES:
        progress.stage("drawing requests")
        trace = draw_trace(read_spec(path), config.seed, str(path), config.max_num_samples)
    else:
        progress.stage("reading trace")
        trace = read_trace(path, config.max_num_samples, config.skip_bad_rows, is_recorded, progress)
    return replace(trace, requests=_with_settings(columns_of(trace.requests), config))


def _find(source: str | Path | None) -> tuple[Path, bool]:
    """The file, and whether a run recorded it."""
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
        f"bundled datasets {', '.join(bundled_names())}. Check the path.{did_you_mean(name, bundled_names())}"
    )


def _with_settings(columns: RequestColumns, config: RunConfig) -> RequestColumns:
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
