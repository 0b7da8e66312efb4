"""`ifbbench sweep`: replay a trace once for each combination of settings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import (
    COMMAND_KEYS,
    PLACES,
    engine_defaults,
    given_config,
    read_command_keys,
    with_recording,
)
from ifbbench.cli.gpt_manager import TraceCommand
from ifbbench.cli.options import IntegerRange
from ifbbench.cli.report import json_option
from ifbbench.cli.run import MAX_REPEATS, report_differences
from ifbbench.errors import InputError
from ifbbench.files import OutputError
from ifbbench.rundir.run_directory import RUN
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import boolean, choice, integer, located
from ifbbench.settings.groups.replay import BY_ITERATION
from ifbbench.settings.names import usual_settings

if TYPE_CHECKING:
    from ifbbench.studies.sweep import SweepResult

EXECUTORS = ("local", "ray")
MAX_PROCESSES = 1024
SWEEP_HELP = {
    "output": "Sweep directory, with a run directory for each point. Default: results/sweep-<keys>.",
    "overwrite": "Replace the runs and the table of an existing sweep directory.",
}


@click.command(cls=TraceCommand, setting_help=SWEEP_HELP)
@click.argument("trace", required=False)
@click.option(
    "--over",
    multiple=True,
    metavar="KEY=V1,V2,…",
    help="A setting, or trace, and its values; ranges are 512..16384:x2 or 8..64:+8. Several --over make a grid.",
)
@click.option(
    "--zip/--no-zip", "is_paired", default=None, help="Pair the values of several --over instead of crossing them."
)
@click.option(
    "--repeat",
    type=IntegerRange(1, MAX_REPEATS),
    metavar="N",
    help="Run each point N times, with the seeds --seed, --seed + 1, …; the table has the means.",
)
@click.option(
    "--keep",
    type=click.Choice(["run", "summary"]),
    help="Keep the run directory of each run, or only its summary, which is faster. Default: run directories "
    "of up to 16 runs.",
)
@click.option(
    "--processes",
    type=IntegerRange(1, MAX_PROCESSES),
    metavar="N",
    help="Simulated runs at the same time. Default: one for each core. Runs on a real device follow each other.",
)
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    help="Run the points here (local, the default), or simulated ones on the Ray cluster that this machine "
    "is connected to (needs the extra `ray`).",
)
@json_option
@click.pass_context
def sweep(
    context: click.Context,
    /,
    trace: str | None,
    over: tuple[str, ...],
    as_json: bool,
    config_file: Path | None,
    is_paired: bool | None,
    repeat: int | None,
    keep: str | None,
    processes: int | None,
    executor: str | None,
    **options: Any,
) -> None:
    """Replay TRACE once for each combination of settings and compare the runs.

    Every value is checked before the first run starts. A sweep that was interrupted goes on where it was when the same
    command is given again. The directory of a sweep is also a config file: sweep --config DIRECTORY.
    """
    given = {
        "trace": trace,
        "over": over or None,
        "zip": is_paired,
        "repeat": repeat,
        "keep": keep,
        "processes": processes,
        "executor": executor,
    }
    asked = _sweep_of({name: value for name, value in given.items() if value is not None}, config_file)
    swept, values = swept_names(asked.over), dict[str, Any](options)
    if "engine" not in swept:
        config_file, recorded = with_recording(asked.trace, config_file, options)
        values = dict(recorded)
    config = given_config(config_file, values, runs_fleets=True, swept=swept)
    result = _sweep(asked, config, config.quiet, engine_configs(config_file, values, asked.over))
    _report_sweep(result, as_json)
    _report_differences_of_points(asked, config, result)
    if result.failed:
        click.echo(f"{result.failed} of {len(result.rows)} points failed or had failed requests.", err=True)
        context.exit(1)


@dataclass(frozen=True)
class SweepKeys:
    """What a sweep is asked to do besides settings: COMMAND_KEYS.

    over: texts as of `--over`.
    """

    trace: str | None
    over: Sequence[str]
    zip: bool = False
    repeat: int = 1
    keep: str | None = None
    processes: int | None = None
    executor: str = EXECUTORS[0]

    def described(self, config: RunConfig) -> str:
        """The text of `sweep.yaml`: with it, the same sweep runs again."""
        import yaml

        asked = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}
        asked["over"] = {name.strip(): values for name, _, values in (text.partition("=") for text in self.over)}
        usual = usual_settings(engine_defaults(config.as_dict()))
        changed = {
            name: value
            for name, value in config.as_dict().items()
            if value != usual[name] and name not in (*PLACES, "quiet")
        }
        asked = {name: value for name, value in asked.items() if value is not None}
        return "# ifbbench sweep --config sweep.yaml\n" + yaml.safe_dump(asked | changed, sort_keys=False)


def _sweep_of(given: Mapping[str, Any], config_file: Path | None) -> SweepKeys:
    """What options and config file ask for; options win. InputError names the file and the key that is wrong."""
    from ifbbench.studies.grid import axis_text

    keys = read_command_keys(config_file, COMMAND_KEYS, "sweep")
    with located(str(config_file)):
        over = keys.get("over", ())
        if isinstance(over, Mapping):
            keys["over"] = [axis_text(name, values) for name, values in over.items()]
        elif "over" in keys:
            keys["over"] = list(map(str, over)) if isinstance(over, list | tuple) else [str(over)]
        for name, largest in {"repeat": MAX_REPEATS, "processes": MAX_PROCESSES}.items():
            if name in keys:
                keys[name] = integer(keys[name], name, 1, largest, from_text=True)
        if "zip" in keys:
            keys["zip"] = boolean(keys["zip"], "zip", from_text=True)
        for name, values in (("keep", ("run", "summary")), ("executor", EXECUTORS)):
            if name in keys:
                keys[name] = choice(keys[name], name, values)
    asked = {"trace": None, **keys, **given}
    if not asked.get("over"):
        raise InputError(
            "--over: what is swept is missing; give a setting and its values, such as "
            "--over max_batch_size=8,16,32, or `over` in the file of --config."
        )
    return SweepKeys(**asked)


def swept_names(over: Sequence[str]) -> set[str]:
    """The names of the axes, which are texts as of `--over`."""
    return {text.partition("=")[0].strip().lstrip("-") for text in over}


def engine_configs(
    config_file: Path | None, options: Mapping[str, Any], over: Sequence[str]
) -> Callable[[Mapping[str, Any]], RunConfig] | None:
    """The settings of each point of a sweep over engines, each with its engine's defaults; None of other sweeps."""
    from ifbbench.studies.grid import TRACE

    swept = swept_names(over)
    if not swept & {"engine", "engine_overhead"}:
        return None

    def config_of(point: Mapping[str, Any]) -> RunConfig:
        own = {name: value for name, value in point.items() if name != TRACE}
        others = {name: value for name, value in options.items() if name not in own}
        return given_config(config_file, others | own, is_noted=False, runs_fleets=True)

    return config_of


def run_points(
    trace: str | None,
    config: RunConfig,
    over: Sequence[str],
    quiet: bool,
    config_of: Callable[[Mapping[str, Any]], RunConfig] | None = None,
) -> list[Path]:
    """Run a sweep; returns the run directories in its order. InputError if a point failed."""
    result = _sweep(SweepKeys(trace, over, keep="run"), config, quiet, config_of)
    for row in result.rows:
        if row["error"]:
            raise InputError(f"{row['output']}: {row['error']}")
    return [Path(str(row["output"])) for row in result.rows]


def _sweep(
    asked: SweepKeys,
    config: RunConfig,
    quiet: bool,
    config_of: Callable[[Mapping[str, Any]], RunConfig] | None = None,
) -> "SweepResult":
    from ifbbench.cli.console import progress_line
    from ifbbench.studies.grid import grid, parse_axes
    from ifbbench.studies.sweep import Executor, LocalProcesses, run_sweep

    points = grid(parse_axes(asked.over, asked.zip), asked.zip)
    where: Executor = LocalProcesses(asked.processes)
    if asked.executor == "ray":
        from ifbbench.studies.ray_cluster import RayCluster

        where = RayCluster(asked.processes)
    with progress_line("sweep", quiet) as progress:
        return run_sweep(
            asked.trace,
            config,
            points,
            _report_failure,
            repeats=asked.repeat,
            keep=asked.keep,
            executor=where,
            progress=progress,
            described=asked.described(config),
            config_of=config_of,
        )


def _report_differences_of_points(asked: SweepKeys, config: RunConfig, result: "SweepResult") -> None:
    """Say so of the points of a sweep of which the run directories are kept."""
    if asked.trace is None or "arrival" in swept_names(asked.over) or config.arrival != BY_ITERATION:
        return
    kept = [Path(str(row["output"])) for row in result.rows if row["output"] and not row["error"]]
    if not kept and (Path(asked.trace) / RUN).is_file():
        click.echo("The runs were not compared with the recorded schedule: --keep run keeps them for it.", err=True)
    runs = [one for point in kept for one in (sorted(point.glob("repeat-*")) or [point])]
    report_differences(asked.trace, config, runs)


def _report_failure(_ended: int, _points: int, label: str, error: str) -> None:
    """Report a point of a sweep that failed, when it ends."""
    if error:
        from ifbbench.cli.console import echo_beside_bar

        echo_beside_bar(f"{label}: {error}")


def _report_sweep(result: "SweepResult", as_json: bool) -> None:
    from ifbbench.cli.console import report_console
    from ifbbench.report.sweep_charts import plot_sweep
    from ifbbench.report.sweep_table import print_sweep
    from ifbbench.studies.point_table import SWEEP_FILE, read_sweep

    table = read_sweep(result.directory)
    if table.finished:
        plot_sweep(table.finished, table.over, result.directory)
    if as_json:
        click.echo(json.dumps(table.rows, indent=2))
    else:
        print_sweep(table.rows, table.over, report_console(), result.warnings)
        if result.resumed:
            click.echo(f"{result.resumed} runs had ended before and were not repeated; --overwrite repeats them.")
        click.echo(f"Results are in {result.directory}; {result.directory / SWEEP_FILE} has all figures.")
    if result.was_removed:
        raise OutputError(
            f"{result.directory}: was removed, or files in it, during the sweep. Its tables are written there again; "
            "the same command repeats the runs that are lost."
        )
