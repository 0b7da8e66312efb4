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

    from ifbbench.analysis.bounds import LowerBound
    from ifbbench.analysis.client_side import ClientFindings
    from ifbbench.analysis.explain import IterationFacts, RequestLife, Stretch
    from ifbbench.analysis.findings import Findings, SlowRequest
    from ifbbench.analysis.generation_time import GenerationTime
    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.analysis.words import Words
    from ifbbench.clock import Clock
    from ifbbench.rundir.reader import RunData
    from ifbbench.studies.what_if import WhatIf

FIGURES = ("e2e", "ttft", "tpot", "queue_time")
# What is left of the budget for starting the program, ending the trials and the output: seconds, and a share of the
# time that reading the run took, because both take longer on a busy machine.
SPARE_S, SPARE_SHARE = 2.0, 0.2
IDS_SHOWN = 12
PAUSES_SHOWN = 10
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
@click.option("--device", metavar="GPU", help="With --server: the GPU of the server, such as h100-sxm.")
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
    overwrite: bool,
    as_json: bool,
) -> None:
    """Explain RUN, a run directory: what bound it, and which request waited for what, behind which. Then other settings
    are tried on its trace, and the best one is named with what it improved and what it made worse.

    With --request or --iteration, explain one request or one iteration of it.
    """
    if request_id is not None and iteration is not None:
        raise click.UsageError("--request and --iteration exclude each other; leave out one of them.")
    if (improve or what_if) and (request_id is not None or iteration is not None):
        raise click.UsageError("--improve and --what_if are of the whole run; leave out --request and --iteration.")
    if (by or of_class or missed) and (request_id is not None or iteration is not None):
        raise click.UsageError("--by, --class and --missed are of the whole run; leave out --request and --iteration.")
    if (server is None) != (device is None):
        raise click.UsageError("--server and --device belong together; give both, or none.")
    if pauses_csv is not None:
        check_new_file(pauses_csv, "--pauses-csv", overwrite)

    from ifbbench.clock import WallClock

    clock = WallClock()  # before the imports that take long

    from ifbbench.analysis.explain import iteration_facts
    from ifbbench.analysis.findings import Findings
    from ifbbench.analysis.recorded import RecordedRun
    from ifbbench.cli.console import report_console
    from ifbbench.rundir.fleet import replica_directory
    from ifbbench.rundir.reader import load_run

    only = _parsed(what_if)
    fleet = load_run(run)
    if fleet.is_fleet:
        if iteration is not None or pauses_csv is not None or by or of_class or missed or improve or what_if:
            raise InputError(
                f"{run}: a fleet; of the options of one engine it takes --request. Name one replica, such as "
                f"{replica_directory(fleet.path, 0)}."
            )
        if fleet.is_disaggregated and not fleet.requests.empty:
            _explain_sides(fleet, request_id, as_json)
            return
        if request_id is None:
            _explain_fleet(fleet, as_json)
            return
        run = _replica_of(fleet, request_id)
    is_of_all = request_id is None and iteration is None and pauses_csv is None
    recorded = RecordedRun.load(run, or_endpoint=iteration is None and pauses_csv is None, or_empty=is_of_all)
    if improve:
        _check_goal(improve, recorded)
    wanted = Wanted(improve, only, budget, clock)
    if recorded.data.endpoint:
        if by or of_class or missed:
            raise InputError("--by, --class, --missed: RUN is against an endpoint; leave them out.")
        of_server = _server_settings(server, device) if server and device else {}
        _explain_endpoint(recorded, request_id, slowest, as_json, wanted, of_server)
        return
    if server is not None:
        raise InputError(f"--server: {recorded.data.path} is no run against an endpoint; leave it out.")
    if recorded.nothing_ran:
        text = f"There is nothing to explain: {recorded.nothing_ran}."
        facts = {"run": str(recorded.data.path), "partial": recorded.data.partial, "text": text}
        _print_json(facts) if as_json else click.echo(f"{recorded.data.path}: {text}")
        return
    findings = Findings(recorded)

    def trials(fit_s: float) -> "WhatIf":
        from ifbbench.studies.what_if import WhatIf

        return WhatIf(findings, fit_s=fit_s)

    if pauses_csv is not None:
        findings.ledger.write_csv(pauses_csv)
    console = report_console(highlight=False)
    if request_id is not None:
        life = findings.life(recorded.known_id(request_id))
        _print_json(life.as_dict()) if as_json else _print_life(life, console)
    elif iteration is not None:
        found = iteration_facts(recorded, iteration)
        _print_json(found.as_dict()) if as_json else _print_iteration(found, console)
    elif as_json:
        facts = findings.as_dict(slowest, by or "e2e", of_class, missed)
        _print_json(facts | {"what_if": _tried(recorded, trials, wanted)})
    else:
        slow = findings.slowest(slowest, by or "e2e", of_class, missed)
        _print_findings(findings, slow, slowest, console)
        console.print()
        if not console.is_terminal:
            sys.stdout.flush()  # the trials take longer
        _print_trials(_tried(recorded, trials, wanted), console)


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
    """The trials that the command asks for. only: the changes that are tried; all where empty. clock: the budget began
    at its 0."""

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
        _print_seen(seen, slowest, console)
        console.print()
        _print_trials(_tried(run, trials, wanted, bool(server)), console)


def _server_settings(line: str, device: str) -> dict[str, Any]:
    """The settings of a server from the line that started it, with its GPU."""
    from ifbbench.settings.config import SIMULATED
    from ifbbench.settings.servers import read_line

    found = read_line(line)
    if found.ignored:
        click.echo(f"Without effect here: {', '.join(f'--{name}' for name in found.ignored)}.", err=True)
    return found.values | {"device": SIMULATED + device.removeprefix(SIMULATED)}


def _tried(
    run: "RecordedRun", make_trials: "Callable[[float], WhatIf]", wanted: Wanted, is_server_known: bool = False
) -> dict[str, Any]:
    """`what_if` of `--json`. make_trials: takes the seconds that a fit may take."""
    from ifbbench.cli.console import progress_line
    from ifbbench.processes import TimeIsUp
    from ifbbench.rundir.what_if import keep_what_if
    from ifbbench.studies.what_if import why_not
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


def _print_findings(findings: "Findings", slow: "list[SlowRequest]", slowest: int, console: "Console") -> None:
    from ifbbench.analysis.number_texts import percent, significant
    from ifbbench.report import bar, plain_table
    from ifbbench.report.tables import settings_line

    run = findings.run.data
    console.print(f"\n[bold]{run.name}[/bold]  {settings_line(run)}")
    if run.partial:
        console.print("[yellow]Partial: the run did not reach its end; this covers what was recorded.[/yellow]")
    console.print(f"\n{findings.waiting_text}\n", soft_wrap=True, markup=False)
    for culprit in findings.culprits:
        console.print(culprit.text, soft_wrap=True, markup=False)
    if findings.culprits:
        console.print()
    waited = findings.waiting_s
    total = sum(waited.values())
    table = plain_table("Bound by", numbers=["of time", "of iterations", "of waiting"])
    table.add_column("")
    names = dict.fromkeys([*findings.by_time, *waited])
    for name in names:
        share = waited.get(name, 0.0) / total if total else 0.0
        waiting = "" if name == "none" else percent(share)
        by_time, by_iterations = findings.by_time.get(name), findings.by_iterations.get(name)
        table.add_row(
            findings.words.limit_name(name),
            percent(by_time),
            percent(by_iterations),
            waiting,
            f"[cyan]{bar(share)}[/cyan]",
        )
    console.print(table)
    console.print()
    if blockers := findings.heads.blockers[:slowest]:
        table = plain_table("Held the line", "for", numbers=["others waited s", "at most", "iterations"])
        for blocker in blockers:
            table.add_row(
                str(blocker.request_id),
                findings.words.limit_name(blocker.limit),
                significant(blocker.waited_s),
                f"{blocker.max_behind:,} request{'s' * (blocker.max_behind != 1)}",
                f"{blocker.first:,} – {blocker.last:,}",
            )
        console.print(table)
        console.print()
    for title, key in (("Class", "by_class"), ("Priority", "by_priority")):
        _print_groups(title, (run.summary or {}).get(key) or {}, console)
    if slow:
        table = plain_table("Slowest", numbers=["E2E s", "TTFT s", "TPOT s", "share"])
        table.add_column("mainly")
        for one in slow:
            latencies = map(significant, (one.e2e_s, one.ttft_s, one.tpot_s))
            table.add_row(str(one.request_id), *latencies, percent(one.share), one.cause)
        console.print(table)
        console.print()
    _print_ledger(findings, console)
    if findings.generation is not None and findings.generation.of_run:
        _print_generation(findings.generation, console)
    if run.lacks_requests:
        return
    _print_lower_bound(findings.lower_bound, console)
    console.print(f"`ifbbench why {run.path} --request {slow[0].request_id if slow else 'ID'}` explains one request.")


def _print_generation(found: "GenerationTime", console: "Console") -> None:
    from ifbbench.analysis.generation_time import PARTS, SLOWEST_SHARE, shares
    from ifbbench.analysis.number_texts import percent, significant
    from ifbbench.report import bar, plain_table

    of_all, of_slowest = shares(found.of_run), shares(found.of_slowest)
    highest = f"of highest {percent(SLOWEST_SHARE)} TPOT"
    table = plain_table("From first to last token", numbers=["request-seconds", "share", highest])
    table.add_column("")
    for part, seconds in found.of_run.items():
        cells = (significant(seconds), percent(of_all[part]), percent(of_slowest[part]))
        table.add_row(PARTS[part], *cells, f"[cyan]{bar(of_slowest[part])}[/cyan]")
    console.print(table)
    console.print()


def _print_groups(title: str, groups: dict[str, Any], console: "Console") -> None:
    """The figures of each class or priority, if there are several."""
    from rich.markup import escape

    from ifbbench.analysis.number_texts import count, significant
    from ifbbench.report import plain_table, print_fitting

    if len(groups) < 2:
        return
    names = ("requests", "TTFT p50 s", "TTFT p99 s", "TPOT p99 s", "E2E mean s", "queued s, mean")
    table = plain_table(title, numbers=names)
    paths = (("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p99"), ("e2e_s", "mean"), ("queue_time_s", "mean"))
    for name, figures in groups.items():
        values = (significant(figures[latency][statistic]) for latency, statistic in paths)
        table.add_row(escape(str(name)), count(figures["requests"]["completed"]), *values)
    print_fitting(console, table)
    console.print()


def _print_seen(findings: "ClientFindings", slowest: int, console: "Console") -> None:
    """The findings of a run against an endpoint."""
    from ifbbench.analysis.client_side import PART_WORDS
    from ifbbench.analysis.number_texts import percent, significant
    from ifbbench.report import bar, plain_table
    from ifbbench.report.tables import settings_line

    run = findings.run.data
    console.print(f"\n[bold]{run.name}[/bold]  {settings_line(run)}\n\n{findings.text}\n", soft_wrap=True)
    total = sum(findings.spent_s.values())
    table = plain_table("Where requests spent their time", numbers=["request-seconds", "share"])
    table.add_column("")
    for part, seconds in findings.spent_s.items():
        share = seconds / total if total else 0.0
        table.add_row(PART_WORDS[part], significant(seconds), percent(share), f"[cyan]{bar(share)}[/cyan]")
    console.print(table)
    console.print()
    table = plain_table("Slowest", numbers=["E2E s", "TTFT s", "share"])
    table.add_column("mainly")
    for one in findings.slowest(slowest):
        table.add_row(
            str(one["request_id"]),
            significant(one["e2e_s"]),
            significant(one["ttft_s"]),
            percent(one["share"]),
            one["cause"],
        )
    console.print(table)
    if findings.load:
        console.print()
        table = plain_table("The server's metrics", numbers=["mean", "max"])
        for name, values in findings.load.items():
            table.add_row(name, significant(values["mean"]), significant(values["max"]))
        console.print(table)


def _print_ledger(findings: "Findings", console: "Console") -> None:
    from ifbbench.analysis.number_texts import count, significant
    from ifbbench.report import plain_table, print_fitting

    ledger, words = findings.ledger, findings.words
    if not ledger.entries:
        return
    lost_s = sum(entry.lost_s for entry in ledger.entries)
    gained_s = sum(entry.gained_s for entry in ledger.entries)
    console.print(
        f"{count(len(ledger.entries))} {words.pauses}: {count(ledger.tokens_recomputed)} tokens computed again, "
        f"{significant(lost_s)} s lost by the victims, {significant(gained_s)} s gained by the beneficiaries.",
        soft_wrap=True,
    )
    if thrashing := ledger.thrashing():
        named = ", ".join(f"{request_id} ({times} times)" for request_id, times in thrashing[:5])
        more = f" and {len(thrashing) - 5:,} more" if len(thrashing) > 5 else ""
        console.print(f"{words.paused.capitalize()} again and again: {named}{more}.", soft_wrap=True)
    if chains := ledger.chains():
        longest = f", which was {words.paused} for ".join(map(str, chains[0]))
        console.print(f"{count(len(chains))} chains of {words.pauses}; the longest: {longest}.", soft_wrap=True)
    numbers = ["blocks freed", "tokens again", "lost s", "gained s"]
    table = plain_table(f"Costliest {words.pauses}", "iteration", "victim", "made room for", numbers=numbers)
    for entry in ledger.costliest()[:PAUSES_SHOWN]:
        table.add_row(
            f"{entry.time_s:,.3f} s",
            f"{entry.iteration:,}",
            str(entry.victim),
            str(entry.beneficiary),
            count(entry.blocks_freed),
            count(entry.tokens_recomputed),
            significant(entry.lost_s),
            significant(entry.gained_s),
        )
    print_fitting(console, table, keys=3)
    console.print()


def _print_lower_bound(bound: "LowerBound | str", console: "Console") -> None:
    from ifbbench.analysis.number_texts import percent, significant
    from ifbbench.report import bar, plain_table

    if isinstance(bound, str):
        console.print(f"No lower bound of the duration: {bound}\n", soft_wrap=True, markup=False)
        return
    from ifbbench.analysis.bounds import part_names

    names = part_names(bound.words)
    table = plain_table("Where the time went", numbers=["s", "share"])
    table.add_column("")
    for name, spent in bound.parts_s.items():
        share = spent / bound.duration_s if bound.duration_s else 0.0
        if spent > 0:
            table.add_row(names[name], significant(spent), percent(share), f"[cyan]{bar(share)}[/cyan]")
    table.add_row("[bold]in all[/bold]", significant(bound.duration_s), "", "")
    console.print(table)
    console.print(f"{bound.sentence}\n", soft_wrap=True, markup=False)


def _print_life(life: "RequestLife", console: "Console") -> None:
    from ifbbench.analysis.generation_time import PROMPTS
    from ifbbench.analysis.number_texts import percent, significant
    from ifbbench.report import plain_table

    console.print(f"\n{life.summary}\n", soft_wrap=True, markup=False)
    table = plain_table(numbers=["from s", "for s", "iterations"])
    table.add_column("the request")
    for stretches in _grouped(life.stretches):
        first, last = stretches[0], stretches[-1]
        spent_s = sum(one.duration_s for one in stretches)
        iterations = f"{first.first:,}" if first.first == last.last else f"{first.first:,} – {last.last:,}"
        table.add_row(f"{first.start_s:,.3f}", f"{spent_s:,.4f}", iterations, _in_words(stretches, life.words))
    console.print(table)
    if not life.attribution_s:
        return
    e2e_s = sum(life.attribution_s.values())
    console.print()
    table = plain_table("End-to-end time", numbers=["s", "share"])
    for name, spent in sorted(life.attribution_s.items(), key=lambda item: -item[1]):
        table.add_row(life.words.part_name(name), significant(spent), percent(spent / e2e_s if e2e_s else None))
        if name == "generation" and (prompts_s := life.generation_s.get(PROMPTS)):
            table.add_row("  of it for prompts of others", significant(prompts_s), percent(prompts_s / e2e_s))
    table.add_row("[bold]in all[/bold]", significant(e2e_s), "")
    console.print(table)


def _grouped(stretches: "list[Stretch]") -> "list[list[Stretch]]":
    """Consecutive stretches of waiting behind others for the same limit as one."""
    groups: list[list[Stretch]] = []
    for stretch in stretches:
        latest = groups[-1][-1] if groups else None
        joins = latest is not None and stretch.behind is not None and latest.behind is not None
        if joins and latest is not None and latest.limit == stretch.limit:
            groups[-1].append(stretch)
        else:
            groups.append([stretch])
    return groups


def _in_words(stretches: "list[Stretch]", words: "Words") -> str:
    first = stretches[0]
    behind = list(dict.fromkeys(one.behind for one in stretches))
    if len(behind) < 2:
        return first.reason(words)
    return (
        f"waits behind {len(behind):,} requests in turn, {behind[0]} to {behind[-1]}, each of which waits for "
        f"{words.waits_for(first.limit)}"
    )


def _print_iteration(facts: "IterationFacts", console: "Console") -> None:
    from ifbbench.analysis.number_texts import percent
    from ifbbench.analysis.words import window_name
    from ifbbench.report import bar, plain_table

    console.print(
        f"\nIteration {facts.number:,} began at {facts.start_s:,.3f} s and took {facts.duration_s * 1000:,.2f} ms. It "
        f"ran {len(facts.contexts) + len(facts.recomputes):,} context chunks and {len(facts.generating):,} generation "
        f"requests; {facts.waiting:,} requests had arrived and were left out.\n",
        soft_wrap=True,
    )
    table = plain_table("Limit", numbers=["used", "of"])
    table.add_column("")
    for name, used in facts.used.items():
        available = facts.available.get(name)
        share = used / available if available else 0.0
        of_window = f", {window_name(facts.window)}" if name == "kv_blocks" and facts.window else ""
        table.add_row(
            facts.words.limit_name(name) + of_window,
            f"{used:,}",
            f"{available:,}" if available else "no limit",
            f"[cyan]{bar(share)}[/cyan] {percent(share)}" if available else "",
        )
    console.print(table)
    console.print()
    if facts.left_out is None:
        console.print("No limit left a request out.")
    else:
        request_id, limit = facts.left_out
        missing = "" if facts.missing is None else f"; it missed by {facts.missing:,.0f} {UNITS.get(limit, '')}"
        console.print(f"First left out: request {request_id}, for {facts.words.limit_name(limit)}{missing}.")
    for victim, beneficiary in facts.paused:
        whom = "itself" if victim == beneficiary else f"request {beneficiary}"
        console.print(f"Request {victim} was {facts.words.paused} to make room for {whom}.")
    for title, chunks in (("Context chunks", facts.contexts), ("Recomputed", facts.recomputes)):
        if chunks:
            console.print(f"{title}: {_some([f'{one} ({tokens:,} tokens)' for one, tokens in chunks])}", soft_wrap=True)
    if facts.generating:
        console.print(f"Generating: {_some([str(one) for one in facts.generating])}", soft_wrap=True)


UNITS = {"batch_size": "slot", "num_tokens": "tokens", "kv_blocks": "blocks"}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - IDS_SHOWN:,} more" if len(names) > IDS_SHOWN else ""
    return ", ".join(names[:IDS_SHOWN]) + more
