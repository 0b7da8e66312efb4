"""`ifbbench why`: what bound a run, what other settings did, what a request waited for, what an iteration decided."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ifbbench.cli.options import COUNT, NOT_NEGATIVE_INTEGER, Command, json_instead_of_tables
from ifbbench.errors import InputError
from ifbbench.files import check_new_file

if TYPE_CHECKING:
    from rich.console import Console

    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.clock import Clock
    from ifbbench.rundir.reader import RunData
    from ifbbench.studies.what_if import WhatIf

FIGURES = ("e2e", "ttft", "tpot", "queue_time")
# What is left of the budget for starting the program, ending the trials and the output: seconds, and a share of the
# time that reading the run took, because both take longer on a busy machine.
SPARE_S, SPARE_SHARE = 2.0, 0.2
GOALS = ("ttft.p99", "tpot.p99", "e2e.mean", "output_throughput", "goodput", "slo")
UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}


def _seconds(ctx: click.Context, option: click.Parameter, value: str) -> float:
    """The callback of an option with a time such as 30s; a number alone is in seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|min|m|h|)", value.strip().lower())
    if match is None:
        raise click.BadParameter(f"{value!r} is no time; expected one such as 30s or 2min, 0 for no trials.")
    return float(match[1]) * UNITS_S[match[2]]


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--request", "request_id", metavar="ID", help="What this request did and waited for.")
@click.option("--iteration", type=NOT_NEGATIVE_INTEGER, metavar="N", help="What this iteration decided.")
@click.option(
    "--slowest",
    type=COUNT,
    default=5,
    show_default=True,
    metavar="N",
    help="How many of the slowest requests and of the requests that held others are listed.",
)
@click.option(
    "--by",
    type=click.Choice(FIGURES),
    metavar="FIGURE",
    help=f"The figure by which requests are slowest: {', '.join(FIGURES)}. Default: e2e.",
)
@click.option("--class", "of_class", metavar="NAME", help="List the slowest requests of this class only.")
@click.option("--missed", is_flag=True, help="List the slowest requests of those that miss an objective only.")
@click.option(
    "--pauses-csv",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the pause ledger here, a row for each pause.",
)
@click.option(
    "--improve",
    type=click.Choice(GOALS),
    metavar="FIGURE",
    help=f"What other settings are to improve: {', '.join(GOALS)}. Default: the objectives of the run, else the figure "
    "that is furthest from what the device could do.",
)
@click.option(
    "--what_if",
    multiple=True,
    metavar="NAME=VALUE",
    help="Try this other value of a setting, and no others. May be given several times.",
)
@click.option(
    "--budget",
    default="30s",
    show_default=True,
    callback=_seconds,
    metavar="TIME",
    help="How long the command may take to try other settings, each on the trace of the run; 0 tries none.",
)
@click.option(
    "--server",
    metavar="LINE",
    help='Of a run against an endpoint: the command line that started the server, such as "vllm serve MODEL '
    '--max-num-seqs 64". Its requests are replayed with these settings on a simulated --device, fitted to the run.',
)
@click.option(
    "--device",
    metavar="GPU",
    help="With --server, and of an imported log: the GPU of the server, such as h100-sxm.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Of a recorded server and an imported log, to try other settings: the model, where the run names none that is "
    "found here. A built-in name, or a directory with config.json.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@json_instead_of_tables
def why(
    run: Path,
    request_id: str | None,
    iteration: int | None,
    slowest: int,
    by: str | None,
    of_class: str | None,
    missed: bool,
    pauses_csv: Path | None,
    improve: str | None,
    what_if: tuple[str, ...],
    budget: float,
    server: str | None,
    device: str | None,
    model: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Explain RUN, a run directory: what bound it, and which request waited for what, behind which. Then other settings
    are tried on its trace, and the best one is named with what it improved and what it made worse.

    With --request or --iteration, explain one request or one iteration of it.
    """
    is_of_one, lists_some = request_id is not None or iteration is not None, bool(by or of_class or missed)
    if request_id is not None and iteration is not None:
        raise click.UsageError("--request and --iteration exclude each other; leave out one of them.")
    if (improve or what_if) and is_of_one:
        raise click.UsageError("--improve and --what_if are of the whole run; leave out --request and --iteration.")
    if lists_some and is_of_one:
        raise click.UsageError("--by, --class and --missed are of the whole run; leave out --request and --iteration.")
    if server is not None and device is None:
        raise click.UsageError("--server and --device belong together; add --device.")
    if pauses_csv is not None:
        check_new_file(pauses_csv, "--pauses-csv", overwrite)

    from ifbbench.clock import WallClock

    clock = WallClock()  # before the imports that take long

    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.rundir.reader import load_run

    only = _parsed(what_if)
    fleet = load_run(run)
    if fleet.is_fleet:
        if iteration is not None or pauses_csv is not None or lists_some or improve or what_if:
            raise _not_of_fleets(run, fleet)
        if _explain_replicas(fleet, request_id, as_json):
            return
        assert request_id is not None
        run = _replica_of(fleet, request_id)
    is_of_all = request_id is None and iteration is None and pauses_csv is None
    recorded = RecordedRun.load(run, or_endpoint=iteration is None and pauses_csv is None, or_empty=is_of_all)
    if improve:
        _check_goal(improve, recorded)
    wanted = Wanted(improve, only, budget, clock)
    if recorded.data.endpoint:
        if lists_some:
            raise InputError("--by, --class, --missed: RUN is against an endpoint; leave them out.")
        if model is not None or (device is not None and server is None):
            raise InputError("--device, --model: RUN is against an endpoint; give --server and --device.")
        of_server = _server_settings(server, device) if server and device else {}
        _explain_endpoint(recorded, request_id, slowest, as_json, wanted, of_server)
        return
    if server is not None:
        raise InputError(f"--server: {recorded.data.path} is no run against an endpoint; leave it out.")
    if device is not None or model is not None:
        from ifbbench.studies.fitted_run import name_server

        name_server(recorded, model, device)
    if recorded.nothing_ran:
        text = f"There is nothing to explain: {recorded.nothing_ran}."
        facts = {"run": str(recorded.data.path), "partial": recorded.data.partial, "text": text}
        _print_json(facts) if as_json else click.echo(f"{recorded.data.path}: {text}")
        return
    slow = Slow(slowest, by or "e2e", of_class, missed)
    _explain_engine(recorded, request_id, iteration, pauses_csv, slow, wanted, as_json)


class Slow(NamedTuple):
    """Which requests are listed as slow: so many, by this figure, of one class, of those that miss an objective."""

    number: int
    by: str
    of_class: str | None
    missed: bool


def _explain_engine(
    run: "RecordedRun",
    request_id: str | None,
    iteration: int | None,
    pauses_csv: Path | None,
    slow: Slow,
    wanted: "Wanted",
    as_json: bool,
) -> None:
    """Explain a run of one engine, or a request or an iteration of it."""
    from ifbbench.analysis.explain import iteration_facts
    from ifbbench.analysis.findings import Findings
    from ifbbench.cli.console import report_console
    from ifbbench.report.why_tables import print_findings, print_iteration, print_life

    findings = Findings(run)

    def trials(fit_s: float) -> "WhatIf":
        from ifbbench.studies.what_if import WhatIf

        return WhatIf(findings, fit_s=fit_s)

    if pauses_csv is not None:
        findings.ledger.write_csv(pauses_csv)
    console = report_console(highlight=False)
    if request_id is not None:
        life = findings.life(run.known_id(request_id))
        _print_json(life.as_dict()) if as_json else print_life(life, console)
    elif iteration is not None:
        found = iteration_facts(run, iteration)
        _print_json(found.as_dict()) if as_json else print_iteration(found, console)
    elif as_json:
        _print_json(findings.as_dict(*slow) | {"what_if": _tried(run, trials, wanted)})
    else:
        print_findings(findings, findings.slowest(*slow), slow.number, console)
        console.print()
        if not console.is_terminal:
            sys.stdout.flush()  # the trials take longer
        _print_trials(_tried(run, trials, wanted), console)


def _parsed(changes: tuple[str, ...]) -> "list[dict[str, Any]]":
    """The settings of each --what_if. InputError for what is no change."""
    if not changes:
        return []
    from ifbbench.studies.what_if import parse_change  # takes a moment

    return [parse_change(text) for text in changes]


def _check_goal(name: str, run: "RecordedRun") -> None:
    """InputError if a run does not have the figure of --improve."""
    from ifbbench.studies.what_if import check_goal

    check_goal(name, run.config.get("slo"))


def _not_of_fleets(path: Path, fleet: "RunData") -> InputError:
    """The error about options of one engine."""
    from ifbbench.rundir.fleet import replica_directory

    return InputError(
        f"{path}: a fleet; of the options of one engine it takes --request. Name one replica, such as "
        f"{replica_directory(fleet.path, 0)}."
    )


def _explain_replicas(fleet: "RunData", request_id: str | None, as_json: bool) -> bool:
    """Explain a fleet, or one of its requests; returns False if a replica knows more of the request."""
    if fleet.is_disaggregated and not fleet.requests.empty:
        _explain_sides(fleet, request_id, as_json)
        return True
    if request_id is None:
        _explain_fleet(fleet, as_json)
    return request_id is None


def _explain_fleet(run: "RunData", as_json: bool) -> None:
    """Explain what the router of a fleet did."""
    from ifbbench.analysis.fleet import FleetFindings
    from ifbbench.cli.console import report_console

    if run.requests.empty:  # it was killed; its replicas have what they did
        text = f"There is nothing to explain: no request is recorded of the fleet. Name a replica in {run.path}."
        facts = {"run": str(run.path), "partial": run.partial, "text": text}
        _print_json(facts) if as_json else click.echo(text)
        return
    findings = FleetFindings(run)
    if as_json:
        _print_json(findings.as_dict())
        return
    console = report_console(highlight=False)
    for sentence in findings.sentences():
        console.print(sentence, markup=False, soft_wrap=True)


def _explain_sides(run: "RunData", request_id: str | None, as_json: bool) -> None:
    """Explain what a fleet with prefill and decode apart did, or one of its requests."""
    from ifbbench.analysis.sides import SidesFindings, attribution_of
    from ifbbench.cli.console import report_console

    findings = SidesFindings(run)
    if as_json and request_id is None:
        _print_json(findings.as_dict())
        return
    if request_id is None:
        sentences = findings.sentences()
    else:
        row = _row_of(run, request_id)
        sentences = findings.request_sentences(row)
        if as_json:
            facts = {"run": str(run.path), "request_id": request_id, "attribution_s": attribution_of(row)}
            _print_json(facts | {"text": "\n".join(sentences)})
            return
    console = report_console(highlight=False)
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)


def _replica_of(run: "RunData", request_id: str) -> Path:
    """The run directory of the replica that had a request. InputError if there is no such request."""
    from ifbbench.rundir.fleet import replica_directory

    return replica_directory(run.path, int(_row_of(run, request_id)["replica"]))


def _row_of(run: "RunData", request_id: str) -> Mapping[str, Any]:
    """The row of a request in the table of a fleet. InputError if there is none."""
    found = run.requests[run.requests["request_id"] == request_id]
    if found.empty:
        raise InputError(f"{run.path}: no request {request_id} has ended; requests.jsonl has the ids.")
    return {str(name): value for name, value in found.iloc[0].items()}


class Wanted(NamedTuple):
    """The trials that the command asks for.

    only: the changes that are tried; all where empty.
    clock: the budget began at its 0.
    """

    improve: str | None
    only: "list[dict[str, Any]]"
    budget_s: float
    clock: "Clock"


def _explain_endpoint(
    run: "RecordedRun", request_id: str | None, slowest: int, as_json: bool, wanted: Wanted, server: Mapping[str, Any]
) -> None:
    """Explain a run against an endpoint, or one request of it. server: its settings and device; empty if not given."""
    from ifbbench.analysis.client_side import ClientFindings
    from ifbbench.cli.console import report_console
    from ifbbench.report.why_tables import print_seen
    from ifbbench.studies.what_if import WhatIf

    def trials(fit_s: float) -> WhatIf:
        return WhatIf.of_endpoint(run, server, fit_s)

    seen = ClientFindings(run)
    if request_id is not None:
        _print_json(seen.life(run.known_id(request_id)))
    elif as_json:
        _print_json(seen.as_dict(slowest) | {"what_if": _tried(run, trials, wanted, bool(server))})
    else:
        console = report_console(highlight=False)
        print_seen(seen, slowest, console)
        console.print()
        _print_trials(_tried(run, trials, wanted, bool(server)), console)


def _server_settings(line: str, device: str) -> dict[str, Any]:
    """The settings of a server from the line that started it, with its GPU."""
    from ifbbench.models.named_models import has_experts
    from ifbbench.settings.devices import SIMULATED
    from ifbbench.settings.servers import read_line

    found = read_line(line, has_experts)
    for remark in found.remarks():
        click.echo(remark, err=True)
    return found.values | {"device": SIMULATED + device.removeprefix(SIMULATED)}


def _tried(
    run: "RecordedRun", make_trials: "Callable[[float], WhatIf]", wanted: Wanted, is_server_known: bool = False
) -> dict[str, Any]:
    """`what_if` of `--json`. make_trials: takes the seconds that a fit may take."""
    from ifbbench.cli.console import progress_line
    from ifbbench.processes import TimeIsUp
    from ifbbench.rundir.what_if import keep_what_if
    from ifbbench.studies.replayed_settings import why_not
    from ifbbench.studies.what_if_outcome import not_tried

    improve, only, budget_s, clock = wanted
    if reason := why_not(run, is_server_known):
        if only or improve:
            raise InputError(f"{run.path}: no other settings can be tried: {reason}.")
        return not_tried(reason)
    if not budget_s and not only:
        return not_tried("--budget 0")

    def left_s() -> float:
        return budget_s - clock.now() - min(SPARE_S + SPARE_SHARE * clock.now(), budget_s / 4)

    def check_time() -> None:
        if left_s() <= 0 and not only:
            raise TimeIsUp

    try:
        check_time()
        with progress_line("why", quiet=False) as progress:
            progress.stage("preparing the trials")
            trials = make_trials(inf if only else left_s())
            goal = trials.goal(improve)
            check_time()
            found = trials.try_all(goal, only, left_s(), progress=progress).as_dict()
    except TimeIsUp:
        taken = f"{clock.now():,.0f} s of --budget {budget_s:g}s"
        return not_tried(f"reading the run and preparing the trials took {taken}; give more")
    except InputError as error:
        if only or improve or is_server_known:
            raise
        return not_tried(str(error).rstrip("."))
    if problem := keep_what_if(run.path, found):
        click.echo(f"What was tried is not kept for the run page: {problem}", err=True)
    return found


def _print_trials(found: dict[str, Any], console: "Console") -> None:
    from ifbbench.report.what_if_table import print_what_if

    print_what_if(found, console)


def _print_json(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2))
