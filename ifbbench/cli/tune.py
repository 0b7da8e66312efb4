"""`ifbbench tune`: find the settings with which a simulated device serves a trace best."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifbbench.cli.given_settings import engine_defaults, given_config, is_run, read_command_keys, read_config_file
from ifbbench.cli.options import COUNT, POSITIVE, SettingsCommand, json_instead_of_tables
from ifbbench.clock import WallClock
from ifbbench.errors import InputError
from ifbbench.progress import Progress
from ifbbench.settings.config import SIDE_SETTINGS, RunConfig
from ifbbench.settings.devices import profile_name
from ifbbench.settings.names import from_mapping, usual_settings

if TYPE_CHECKING:
    from ifbbench.analysis.words import Words
    from ifbbench.settings.config import RunConfig
    from ifbbench.studies.deployments import Deployment
    from ifbbench.studies.tune_candidates import Candidate, Goal
    from ifbbench.studies.tune_search import Tuning


class Prices(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """`X`, or `DEVICE=X,DEVICE=Y`: prices by device, that of all others by an empty name."""

    name = "prices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        found = {}
        for part in str(value).split(","):
            device, _, price = part.rpartition("=")
            found[profile_name(device.strip()) if device else ""] = float(POSITIVE.convert(price, param, ctx))
        return found


class Sides(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """`together`, `apart`, or both of them with a comma."""

    name = "sides"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        if not set(found) <= {TOGETHER, APART}:
            self.fail(f"expected {TOGETHER}, {APART} or {TOGETHER},{APART}, not {value!r}.", param, ctx)
        return found


PRICES = Prices()
# Settings of which --goal cost compares several values.
COMPARED = ("device", "dtype", "tp_size", "pp_size", "router")
# Settings of a fleet that the command decides, or does not search over.
NOT_TUNED = ("replicas", "replica_config", "replica_events", "autoscale", "prefill_replicas", "decode_replicas")
# Whether replicas do both prefill and decode.
TOGETHER, APART = "together", "apart"
GOAL_NAMES = ("goodput", "output_throughput", "max_rate", "cost", "energy")
HELP = {
    "output": "Directory of the answer, its files and the recorded run. Default: results/tune-<trace>.",
    "overwrite": "Replace the answer in an existing directory.",
    "seed": "Seed of arrivals that are drawn; the highest rate is also found with the next ones.",
}


@click.command(cls=SettingsCommand, setting_help=HELP)
@click.argument("trace", required=False)
@click.option(
    "--goal",
    type=click.Choice(GOAL_NAMES),
    help="What is best: requests/s that meet every objective "
    "(default with an objective of each request), output tokens/s (default without), the highest rate of "
    "arrivals that meets them, the cost of enough GPUs, or their energy for an output token.",
)
@click.option(
    "--max-gpus",
    type=COUNT,
    metavar="N",
    help="GPUs of all replicas together. Default: as many as one replica needs; 64 for --goal cost and energy.",
)
@click.option(
    "--gpu-hour-price",
    type=PRICES,
    metavar="X",
    help="With --goal cost: the price of a GPU for an hour, in any currency; for several devices DEVICE=X,DEVICE=Y. "
    "Default: 1, so that costs are GPU hours; of several deployments the round figures in USD of the device profiles.",
)
@click.option(
    "--sides",
    type=Sides(),
    metavar="FORMS",
    help="With --goal cost: together (replicas that do both prefill and decode, the default), apart "
    "(--prefill_replicas and --decode_replicas in every ratio), or both of them, to see which costs less.",
)
@json_instead_of_tables
@click.pass_context
def tune(
    context: click.Context,
    /,
    trace: str | None,
    goal: str | None,
    max_gpus: int | None,
    gpu_hour_price: dict[str, float] | None,
    sides: tuple[str, ...] | None,
    as_json: bool,
    config_file: Path | None,
    **options: Any,
) -> None:
    """Find the best settings for TRACE on a simulated device, under the objectives of --slo.

    With --goal cost, --device, --dtype, --tp_size, --pp_size and --router take several values with commas between
    them; the deployments are then compared, the cheapest of each device first. --sides together,apart also compares
    prefill and decode apart with replicas that do both.

    Searched are max_batch_size, max_num_tokens, policy, chunked context and its policy, tokens_per_block, reuse of
    blocks (if prompts share prefixes) and tp_size. A setting that is given is not searched.

    Example: ifbbench tune chat --model llama-3.1-8b --device h100-sxm --slo ttft=1s --slo tpot=50ms
    """
    choices = _choices(options)
    config, fixed = _settings(config_file, options, choices)
    keys = read_command_keys(config_file, ("trace",), "tune")
    trace = keys.get("trace") if trace is None else trace

    from ifbbench.cli.console import progress_line, report_console
    from ifbbench.cli.tune_tables import print_answer, print_deployments, print_sides
    from ifbbench.studies.deployments import compare_sides, described_deployment
    from ifbbench.studies.tune_candidates import Goal
    from ifbbench.studies.tune_files import (
        answer,
        decided,
        record_best,
        server_remarks,
        write_answer,
        write_run_config,
        write_server_files,
    )

    wanted = Goal.of(goal, config.slo)
    _check_sides(config, sides, wanted)
    if choices and wanted.name != "cost":
        raise InputError(
            f"--{next(iter(choices))}: several values are compared by what they cost; give --goal cost, or one value."
        )
    search = Search(trace, config, fixed, wanted, max_gpus, gpu_hour_price or {}, sides or ())
    with progress_line("tune", config.quiet) as progress:
        tuning, directory, compared = search.compare(choices, progress) if choices or sides else search.tune(progress)
        assert tuning.best is not None
        progress.stage("recording the best run")
        recorded = record_best(tuning, directory, config.overwrite)
        found = answer(tuning, recorded, commands_of(trace, tuning))
        if compared:
            found["deployments"] = [described_deployment(one) for one in compared]
            found["sides"] = compare_sides(compared, tuning.goal)
        write_answer(found, directory)
        is_apart = tuning.best.run.case.is_apart  # no line of a server says what it sends to whom
        server_files = [] if is_apart else write_server_files(decided(tuning), directory)
        write_run_config(tuning, trace, directory)
        _plot(tuning, directory)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        console = report_console(highlight=False)
        if compared:
            print_deployments(found["deployments"], tuning, console)
            print_sides(found["sides"], console)
        print_answer(found, tuning, console)
        files = ", ".join(("tune.json", "pareto.png", "run.yaml", *(path.name for path in server_files)))
        for remark in server_remarks(decided(tuning)) if server_files else ():
            click.echo(remark)
        click.echo(f"Results are in {directory}: {files}, and the run in run/.")
    if not tuning.is_complete:
        click.echo("Interrupted: this is the best that was found so far.", err=True)
        context.exit(130)
    if not found["recommendation"]["meets_slo"]:
        context.exit(1)


@dataclass(frozen=True)
class Search:
    """What is asked for.

    fixed: names of settings that are not searched over.
    prices: given prices of a GPU for an hour, by device.
    sides: replicas of --sides.
    """

    trace: str | None
    config: RunConfig
    fixed: frozenset[str]
    goal: "Goal"
    max_gpus: int | None
    prices: dict[str, float]
    sides: tuple[str, ...]

    def compare(self, choices: dict[str, list[Any]], progress: Progress) -> "tuple[Tuning, Path, list[Deployment]]":
        """The cheapest deployment, the directory of the answer, and all deployments."""
        from ifbbench.studies.deployments import compare_deployments, price_of
        from ifbbench.studies.tune_load import COST_GPUS

        directory = self._directory(Path(self.trace or "default").stem)
        devices = choices.get("device", [self.config.device])
        compared = compare_deployments(
            self.trace,
            self.config,
            choices,
            self.fixed,
            self.goal,
            self.max_gpus or COST_GPUS,
            {device: price_of(device, self.prices) for device in devices},
            self.sides,
            progress,
            self._reporter(_deployment_line),
        )
        tuning = next(one.tuning for one in compared if one.tuning is not None)
        return tuning, directory, compared

    def tune(self, progress: Progress) -> "tuple[Tuning, Path, list[Deployment]]":
        """The settings of one deployment, the directory of the answer, and no deployments."""
        from ifbbench.analysis.words import words_of
        from ifbbench.studies.deployments import price_of
        from ifbbench.studies.tune import Tuner

        prices, words = self.prices, words_of(self.config.as_dict())
        price = price_of(self.config.device, prices) if prices and "" not in prices else prices.get("", 1.0)
        report_best = self._reporter(lambda best: _best_line(best, self.goal, words))
        tuner = Tuner(self.trace, self.config, self.fixed, self.goal, self.max_gpus, price, progress, report_best)
        directory = self._directory(tuner.runs.trace.name)
        return tuner.run(), directory, []

    def _directory(self, name: str) -> Path:
        """The directory of the answer, which can be written."""
        from ifbbench.rundir.run_directory import default_directory
        from ifbbench.studies.tune_files import check

        config = self.config
        found = Path(config.output) if config.output else default_directory(f"tune-{name}", config.overwrite)
        check(found, config.overwrite)
        return found

    def _reporter(self, line_of: Callable[[Any], str]) -> Callable[[Any], None]:
        """Prints the line of what was found, after how long."""
        from ifbbench.cli.console import echo_beside_bar

        clock = WallClock()

        def report(found: Any) -> None:
            if not self.config.quiet:
                echo_beside_bar(f"{clock.now():.0f} s: {line_of(found)}")

        return report


def _settings(
    config_file: Path | None, options: dict[str, Any], choices: dict[str, list[Any]]
) -> tuple[RunConfig, frozenset[str]]:
    """The settings, and the names of those that are given, which are not searched over. choices: see `_choices`."""
    config = given_config(
        config_file,
        {name: values[0] for name, values in choices.items()}
        | {name: value for name, value in options.items() if name not in choices},
        runs_fleets=True,
    )
    for name in NOT_TUNED:
        if getattr(config, name) != getattr(RunConfig(), name):
            more = "--router chooses theirs" if name not in SIDE_SETTINGS else "--sides apart compares such fleets"
            raise InputError(f"--{name}: tune finds the number of replicas, which are alike; leave it out. {more}.")
    from_file = read_config_file(config_file) if config_file else {}
    if config_file and is_run(config_file):  # that of a run has the defaults, too
        usual = usual_settings(engine_defaults(config.as_dict()))
        from_file = {name: value for name, value in from_file.items() if value != usual[name]}
    return config, frozenset(from_file) | {name for name, value in options.items() if value not in (None, ())}


def _check_sides(config: RunConfig, sides: tuple[str, ...] | None, goal: "Goal") -> None:
    """InputError for settings of two sides that are not compared, and for --sides with another goal."""
    if sides and goal.name != "cost":
        raise InputError("--sides: forms of deployments are compared by what they cost; give --goal cost.")
    for name in SIDE_SETTINGS:
        if APART not in (sides or ()) and getattr(config, name) != getattr(RunConfig(), name):
            raise InputError(f"--{name}: is for prefill and decode apart; add --sides {APART} or {TOGETHER},{APART}.")


def _choices(options: dict[str, Any]) -> dict[str, list[Any]]:
    """The settings of COMPARED that were given several values, with these."""
    found = {}
    for name in COMPARED:
        texts = [text.strip() for text in str(options.get(name) or "").split(",")]
        if len(texts) > 1:
            values = [getattr(from_mapping({name: text}, command_line=True), name) for text in texts]
            found[name] = list(dict.fromkeys(values))
    return found


def commands_of(trace: str | None, tuning: "Tuning") -> list[list[str]]:
    """The words of the commands that run the recommendation, one for each replica."""
    from ifbbench.settings.command_line import option_words
    from ifbbench.studies.tune_files import settings_of_best

    assert tuning.best is not None
    words = ["ifbbench", "run", *([trace] if trace else [])]
    words += option_words(settings_of_best(tuning), tuning.runs.base.engine)
    if (replicas := tuning.best.run.case.replicas) == 1 or tuning.best.run.case.is_apart:
        return [words]
    if tuning.runs.base.router is not None:
        return [[*words, "--replicas", str(replicas)]]
    return [[*words, "--replica", f"{number}/{replicas}"] for number in range(1, replicas + 1)]


def _best_line(best: "Candidate", goal: "Goal", words: "Words") -> str:
    from ifbbench.analysis.words import SIZES, setting_of
    from ifbbench.studies.tune_candidates import misses_text

    ran = "all requests" if best.run.case.requests is None else f"the first {best.run.case.requests:,} requests"
    names = [name for name in (*map(setting_of, SIZES), "policy") if name in best.settings]
    limits = words.with_values({name: best.settings[name] for name in names})
    missed = goal.shortfalls(best.summary)
    figure = misses_text(missed) if missed else f"{abs(best.score):,.4g} {goal.unit}"
    return f"{figure} over {ran}, with {limits}"


def _deployment_line(one: "Deployment") -> str:
    from ifbbench.studies.deployments import text_of

    assert one.best is not None
    case = one.best.run.case
    replicas = f"{case.replicas} + {case.decode_replicas}" if case.is_apart else str(case.replicas)
    return f"{replicas} × {text_of(one.values)}, {one.cost:,.2f} an hour, before the search"


def _plot(tuning: "Tuning", directory: Path) -> None:
    from ifbbench.studies.tune_files import Point, latency, pareto, plot_candidates, throughput

    goal, best = tuning.goal, tuning.best
    assert best is not None

    def point(one: "Candidate") -> Point:
        return Point(latency(one, goal), throughput(one, goal), not goal.shortfalls(one.summary))

    alike = [one for one in (*tuning.candidates, *tuning.baselines) if one.run.case.requests == best.run.case.requests]
    first = goal.objectives[0] if goal.objectives else None
    name = f"{first.latency.removesuffix('_s').upper()} {first.statistic or 'p99'}" if first else "mean latency"
    named = {"recommended": point(best), **{one.name: point(one) for one in tuning.baselines}}
    plot_candidates(
        [point(one) for one in alike],
        [point(one) for one in pareto(alike, goal)],
        named,
        name.replace("_", " "),
        "output tokens/s of a GPU" if goal.is_minimised else "output tokens/s",
        first.target_s if first else None,
        f"{tuning.runs.trace.name} · {tuning.runs.base.model} · {tuning.runs.base.device} · goal {goal.name}",
        directory,
    )
