"""What `ifbbench why` prints of a run: its findings, one request, one iteration."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from ifbbench.analysis.bounds import LowerBound, part_names
from ifbbench.analysis.client_side import PART_WORDS, ClientFindings
from ifbbench.analysis.explain import IterationFacts, RequestLife, Stretch
from ifbbench.analysis.findings import Findings, SlowRequest
from ifbbench.analysis.generation_time import HELD, PARTS, PROMPTS, SLOWEST_SHARE, GenerationTime, shares
from ifbbench.analysis.number_texts import count, number_of, percent, significant
from ifbbench.analysis.words import Words, window_name
from ifbbench.report import bar, plain_table, print_fitting
from ifbbench.report.tables import settings_line

IDS_SHOWN = 12
PAUSES_SHOWN = 10


def print_findings(findings: Findings, slow: list[SlowRequest], slowest: int, console: Console) -> None:
    run = findings.run.data
    console.print(f"\n[bold]{run.name}[/bold]  {settings_line(run)}")
    if run.partial:
        console.print("[yellow]Partial: the run did not reach its end; this covers what was recorded.[/yellow]")
    if run.recorded_every > 1:
        thinned = (
            f"Thinned: one of {run.recorded_every} iterations has its statistics recorded. Who held the line, and "
        )
        thinned += "times between these iterations, are estimates."
        console.print(f"[yellow]{thinned}[/yellow]", highlight=False, soft_wrap=True)
    console.print(f"\n{findings.waiting_text}\n", soft_wrap=True, markup=False)
    if text := findings.turns.text:
        console.print(f"{text}\n", soft_wrap=True, markup=False)
    for culprit in findings.culprits:
        console.print(culprit.text, soft_wrap=True, markup=False)
    if findings.culprits:
        console.print()
    _print_limits(findings, console)
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
        _print_generation(findings.generation, findings.words, console)
    if run.lacks_requests:
        return
    _print_lower_bound(findings.lower_bound, console)
    console.print(f"`ifbbench why {run.path} --request {slow[0].request_id if slow else 'ID'}` explains one request.")


def _print_limits(findings: Findings, console: Console) -> None:
    """What bound iterations, and what requests waited for."""
    waited = findings.all_waiting_s
    total = sum(waited.values())
    table = plain_table("Bound by", numbers=["of time", "of iterations", "of waiting"])
    table.add_column("")
    names = dict.fromkeys([*findings.by_time, *waited])
    for name in names:
        share = waited.get(name, 0.0) / total if total else 0.0
        by_time, by_iterations = findings.by_time.get(name), findings.by_iterations.get(name)
        table.add_row(
            findings.words.limit_name(name),
            percent(by_time),
            percent(by_iterations),
            percent(share),
            f"[cyan]{bar(share)}[/cyan]",
        )
    console.print(table)
    console.print()


def _print_generation(found: GenerationTime, words: Words, console: Console) -> None:
    names = PARTS | {HELD: words.held}
    of_all, of_slowest = shares(found.of_run), shares(found.of_slowest)
    highest = f"of highest {percent(SLOWEST_SHARE)} TPOT"
    table = plain_table("From first to last token", numbers=["request-seconds", "share", highest])
    table.add_column("")
    for part, seconds in found.of_run.items():
        cells = (significant(seconds), percent(of_all[part]), percent(of_slowest[part]))
        table.add_row(names[part], *cells, f"[cyan]{bar(of_slowest[part])}[/cyan]")
    console.print(table)
    console.print()


def _print_groups(title: str, groups: dict[str, Any], console: Console) -> None:
    """The figures of each class or priority, if there are several."""

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


def print_seen(findings: ClientFindings, slowest: int, console: Console) -> None:
    """The findings of a run against an endpoint."""

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


def _print_ledger(findings: Findings, console: Console) -> None:
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
    numbers = [f"{words.block}s freed", "tokens again", "lost s", "gained s"]
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


def _print_lower_bound(bound: LowerBound | str, console: Console) -> None:
    if isinstance(bound, str):
        console.print(f"No lower bound of the duration: {bound}\n", soft_wrap=True, markup=False)
        return

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


def print_life(life: RequestLife, console: Console) -> None:
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


def _grouped(stretches: list[Stretch]) -> list[list[Stretch]]:
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


def _in_words(stretches: list[Stretch], words: Words) -> str:
    first = stretches[0]
    behind = list(dict.fromkeys(one.behind for one in stretches))
    if len(behind) < 2:
        return first.reason(words)
    return (
        f"waits behind {len(behind):,} requests in turn, {behind[0]} to {behind[-1]}, each of which waits for "
        f"{words.waits_for(first.limit)}"
    )


def print_iteration(facts: IterationFacts, console: Console) -> None:
    left_out = f"{number_of(facts.waiting, 'request')} had arrived and {'was' if facts.waiting == 1 else 'were'}"
    ran = f"{number_of(len(facts.contexts) + len(facts.recomputes), 'context chunk')} and "
    ran += number_of(len(facts.generating), "generation request")
    aside = f"; {number_of(facts.aside, 'running request')} stood aside for prompts" if facts.aside else ""
    ahead = ""
    if facts.own_s is not None and facts.own_s < 0.999 * facts.duration_s:
        ahead = f", the last {facts.own_s * 1000:,.2f} of them after the one before it had ended"
    console.print(
        f"\nIteration {facts.number:,} began at {facts.start_s:,.3f} s and took {facts.duration_s * 1000:,.2f} ms"
        f"{ahead}. It ran {ran}{aside}; {left_out} left out.\n",
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
        of = f"for {facts.words.limit_name(limit)}{missing}"
        console.print(f"First left out: request {request_id}, {'which stood aside' if facts.aside else of}.")
    if facts.queue_head is not None:
        request_id, limit = facts.queue_head
        console.print(f"The queue waited for request {request_id}, which waited for {facts.words.waits_for(limit)}.")
    for victim, beneficiary in facts.paused:
        whom = "itself" if victim == beneficiary else f"request {beneficiary}"
        console.print(f"Request {victim} was {facts.words.paused} to make room for {whom}.")
    for title, chunks in (("Context chunks", facts.contexts), ("Recomputed", facts.recomputes)):
        if chunks:
            sizes = [f"{one} ({number_of(tokens, 'token')})" for one, tokens in chunks]
            console.print(f"{title}: {_some(sizes)}", soft_wrap=True)
    if facts.generating:
        console.print(f"Generating: {_some([str(one) for one in facts.generating])}", soft_wrap=True)


UNITS = {"batch_size": "slot", "num_tokens": "tokens", "kv_blocks": "blocks"}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - IDS_SHOWN:,} more" if len(names) > IDS_SHOWN else ""
    return ", ".join(names[:IDS_SHOWN]) + more
