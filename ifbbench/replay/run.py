"""A run, wherever it takes place: in this process, in those of ranks, of replicas, or at a server of others."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.files import check_new_file
from ifbbench.progress import NO_PROGRESS, Progress
from ifbbench.replay.rank_runs import starts_ranks
from ifbbench.replay.single import (
    RunResult,
    places,
    run_loaded,
    say_number,
    steady_summary,
    summarise_loaded,
    write_responses,
)
from ifbbench.rundir import run_directory
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.settings.config import FLEET_SETTINGS, SIDE_SETTINGS, RunConfig
from ifbbench.settings.groups.recording import SIDE_OUTPUTS
from ifbbench.workload.load import Source, for_other_process, load_trace
from ifbbench.workload.trace import Trace


def run_trace(
    source: Source,
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    *,
    owns_process: bool = False,
    on_recording: Callable[[Path], None] | None = None,
    on_recorded: Callable[[Path], None] | None = None,
) -> RunResult:
    """Replay `source` (see `load_trace`) with `config`, in several processes if it needs them: unless a launcher has
    started them, they are started here. Ranks of a launcher other than 0 do not return.

    owns_process: see `build_engine`.
    on_recording: is called with the run directory when the recording begins.
    on_recorded: is called when the recording has ended, also that of a run that ended early.

    Raises InputError before anything is written if the input or the settings are bad, and RunFailed if the run ends
    early; its directory is then marked partial.
    """
    _check_outputs(config)
    _check_retries(config)
    check_no_fleet(config)
    if config.is_disaggregated:
        from ifbbench.replay.disaggregated import run_disaggregated

        return run_disaggregated(source, config, progress, on_recording=on_recording, on_recorded=on_recorded)
    if config.is_fleet:
        from ifbbench.replay.fleet import run_fleet

        return run_fleet(source, config, progress, on_recording=on_recording, on_recorded=on_recorded)
    if not config.makes_no_tokens and starts_ranks(config):
        from ifbbench.replay.rank_processes import run_in_ranks

        run = partial(run_trace, for_other_process(source, config), config, owns_process=True)
        callbacks = {"on_recording": on_recording, "on_recorded": on_recorded}
        result: RunResult = run_in_ranks(run, config, progress, callbacks)
        return result
    trace = load_trace(source, config, progress)
    run_directory.check_some(places(config, trace), config.overwrite)
    if config.endpoint is not None:
        return _run_endpoint(trace, config, progress, on_recorded)
    return run_loaded(trace, config, progress, owns_process, on_recording, on_recorded)


def summarise_run(
    source: Source,
    config: RunConfig,
    progress: Progress = NO_PROGRESS,
    *,
    owns_process: bool = False,
    on_end: Callable[[SummaryRecorder], None] = lambda recorder: None,
) -> dict[str, Any]:
    """Replay `source` with `config` like `run_trace`, without a run directory; returns the same summary.

    on_end: takes the recorder that made the summary. InputError and RunFailed as there."""
    _check_retries(config)
    check_no_fleet(config)
    if config.is_disaggregated:
        from ifbbench.replay.disaggregated import summarise_disaggregated

        return summarise_disaggregated(source, config, progress, on_end)
    if config.is_fleet:
        from ifbbench.replay.fleet import summarise_fleet

        return summarise_fleet(source, config, progress, on_end)
    if config.enable_steady_state or config.endpoint is not None:  # found in the recorded requests
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as directory:
            config = config.with_values(output=str(Path(directory) / "run"))
            return run_trace(source, config, progress, owns_process=owns_process).summary
    if not config.makes_no_tokens and starts_ranks(config):
        from ifbbench.replay.rank_processes import run_in_ranks

        run = partial(summarise_run, for_other_process(source, config), config, owns_process=True)
        summary: dict[str, Any] = run_in_ranks(run, config, progress)
        return summary
    return summarise_loaded(load_trace(source, config, progress), config, progress, owns_process, on_end)


def _check_retries(config: RunConfig) -> None:
    """InputError for retries where no replica can fail."""
    may_fail = config.replica_events is not None or (config.is_fleet and not config.makes_no_tokens)
    if not may_fail and config.request_retries != RunConfig().request_retries:
        raise InputError(
            "--request_retries: no replica fails; add --replica_events with a `fail`, or leave it out. It does not "
            "change how often a request to an --endpoint is repeated: that is --endpoint_retries."
        )


def check_no_fleet(config: RunConfig) -> None:
    """InputError for settings of a fleet where there is a single engine, which would not be used."""
    if config.is_fleet:
        return
    usual = RunConfig()
    for name in FLEET_SETTINGS:
        if getattr(config, name) != getattr(usual, name):
            needed = "--prefill_replicas and --decode_replicas" if name in SIDE_SETTINGS else "--replicas N"
            needed = "--replica_events or --autoscale" if name == "replica_start_up" else needed
            raise InputError(f"--{name}: is for a fleet, and there is one engine; add {needed}, or leave it out.")


def _run_endpoint(
    trace: Trace, config: RunConfig, progress: Progress, on_recorded: Callable[[Path], None] | None
) -> RunResult:
    # Imported here because other runs need no HTTP.
    from ifbbench.endpoint.run import run_endpoint

    directory, summary, client, description = run_endpoint(trace, config, places(config, trace), progress, on_recorded)
    say_number(config, trace, directory)
    if config.enable_steady_state:
        summary = steady_summary(directory)
    if config.responses_json:
        write_responses(Path(config.responses_json), trace, client.outputs)
    return RunResult(directory, summary, summary["requests"]["failed"], description)


def _check_outputs(config: RunConfig) -> None:
    """Refuse before the run what could not be written after it."""
    if config.output:
        run_directory.check(Path(config.output), config.overwrite)
    if config.responses_json and config.makes_no_tokens:
        raise InputError(f"--responses_json: --device {config.device} makes no tokens; leave one of them out.")
    paths: dict[Path, str] = {}
    for name in SIDE_OUTPUTS:
        value = getattr(config, name)
        if not value:
            continue
        path = Path(value)
        check_new_file(path, f"--{name}", config.overwrite)
        if (other := paths.setdefault(path.resolve(), name)) != name:
            raise InputError(f"--{name} {path}: --{other} names the same file; give another one.")
        if not path.parent.is_dir():
            raise InputError(f"--{name} {path}: expected a file in a directory that exists.")
