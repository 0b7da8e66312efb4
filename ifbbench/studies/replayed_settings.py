"""How the trace in the directory of a recorded run is replayed: whether it can be, with which settings, and by which
command line."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.build.engines import usual_beside
from ifbbench.settings.command_line import option_words
from ifbbench.settings.config import READ_SETTINGS, RunConfig, settings
from ifbbench.settings.engines import SGLANG, VLLM
from ifbbench.studies.tune_runs import APPLIED
from ifbbench.workload.load import in_memory, read_source
from ifbbench.workload.trace import Trace

ENDPOINT_REASON = (
    "the settings of the server are not known to a run against an endpoint. Give the command line that started it and "
    'its GPU: `ifbbench why {run} --server "vllm serve …" --device h100-sxm`; the requests are then replayed on a '
    "simulated device. For a server of ifbbench, ask `ifbbench why` of its own directory (serve --record DIR)"
)


def trace_of(run: RecordedRun) -> Trace:
    """The requests of a run, in memory."""
    return in_memory(read_source(run.path, RunConfig(device="null")))


def why_not(run: RecordedRun, is_server_known: bool = False) -> str:
    """Why no other settings can be tried for a run; empty if they can, as far as is known without a fit.
    is_server_known: the settings of the server at an endpoint are."""
    if run.data.endpoint:
        return "" if is_server_known else ENDPOINT_REASON.format(run=run.path)
    if run.lacks_requests:
        return "the log that it was imported from has no requests to replay"
    if missing := [name for name in ("model", "device") if run.config.get(name) is None]:
        names = " and ".join(f"--{name}" for name in missing)
        return f"the log that it was imported from does not name the server's {' and '.join(missing)}; add {names}"
    if run.config.get("device") == "null":
        return "the run was on device null, which computes nothing"
    return ""


def base_config(config: Mapping[str, Any], derived: Sequence[str], sessions: bool) -> RunConfig:
    """The settings with which the trace in a run directory is replayed as in the run.

    config, derived: parts of its `run.json`.
    sessions: whether later turns arrive after answers.
    """
    known = {item.name: item for item in settings()}
    values: dict[str, Any] = {
        name: None if name in derived else value
        for name, value in config.items()
        if name in known and known[name].group != "recording"
    }
    values["enable_steady_state"] = config.get("enable_steady_state", False)
    asked = RunConfig(**values)
    is_open = asked.keeps_arrivals
    applied = dict(APPLIED)
    if sessions or not is_open:
        del applied["duration"]  # requests that arrive after an answer may come too late
    # Resolved already: the form of the overlap says it, or --async_scheduling, or --disable_overlap_schedule.
    overlap = None if asked.engine in (VLLM, SGLANG) else config.get("overlap")
    return asked.without(*READ_SETTINGS).with_values(
        **applied,
        time_scale=1.0,
        arrival="recorded" if asked.concurrency is not None and is_open else None,
        overlap=overlap,
        enable_trt_overlap=False,
        quiet=True,
    )


def command_of(source: str, config: RunConfig) -> str:
    """The `ifbbench run` that replays the trace of a run directory with these settings."""
    usual = usual_beside(config)
    values = {
        name: value
        for name, value in config.as_dict().items()
        if name != "quiet" and (name in ("device", "model") or value != usual[name])
    }
    return shlex.join(["ifbbench", "run", source, *option_words(values, config.engine)])


def unsayable(config: RunConfig) -> list[str]:
    """Settings of a run that no command line gives: they are left out there, and have another value then."""
    usual = usual_beside(config)
    values = {item.name: getattr(config, item.name) for item in settings() if not item.takes_none}
    return [name for name, value in values.items() if value is None and usual[name] is not None]
