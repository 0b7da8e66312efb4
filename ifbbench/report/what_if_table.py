"""The table of other settings that were tried on a run's own trace, and the sentences about the best of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.report import plain_table, print_fitting
from ifbbench.rundir.what_if import FAILED
from ifbbench.settings.command_line import option_words


class Figure(NamedTuple):
    """A figure as it is shown.

    scale: factor from the unit of summary.json.
    """

    name: str
    unit: str = ""
    scale: float = 1.0
    is_better_high: bool = False

    @property
    def heading(self) -> str:
        return f"{self.name} {self.unit}".strip()


# By their path in summary.json.
FIGURES = {
    "ttft_s.p50": Figure("TTFT p50", "s"),
    "ttft_s.p99": Figure("TTFT p99", "s"),
    "tpot_s.p99": Figure("TPOT p99", "ms", 1e3),
    "e2e_s.mean": Figure("E2E mean", "s"),
    "output_throughput_tokens_per_s": Figure("", "tokens/s", is_better_high=True),
    "goodput_requests_per_s": Figure("goodput", "1/s", is_better_high=True),
    "goodput_share": Figure("good share", is_better_high=True),
    FAILED: Figure("fails"),
}
NAME_WIDTH = 40
# Changes of less are not shown.
SHOWN_CHANGE = 0.005
# What a change does beside the figures.
REMARKS = {
    "kv_cache_dtype": "It rounds keys and values otherwise, which may change answers; that is not measured here.",
    "max_queue_size": "It refuses requests.",
    "max_seq_len": "It refuses longer requests, of which the trace has none.",
}


class Cell(NamedTuple):
    """A figure under other settings.

    change: change against the run, in percent.
    effect: better, worse, or empty for none.
    """

    text: str
    change: str = ""
    effect: str = ""


class Row(NamedTuple):
    """A change as its options, with a cell for each figure."""

    options: str
    cells: list[Cell]
    command: str


class Best(NamedTuple):
    """A change that is named below the table.

    effect: effect on the goal.
    better, worse: effects on other figures.
    commands: the command that runs it; for a run on a real device, before it the one that measures it.
    """

    title: str
    options: str
    effect: str
    better: list[str]
    worse: list[str]
    remarks: list[str]
    commands: list[str]

    @property
    def heading(self) -> str:
        """What stands above the commands; empty for one that needs no words."""
        return "To measure it, and to repeat the prediction:" if len(self.commands) > 1 else ""


class WhatIfTable(NamedTuple):
    """What was tried, as it is shown.

    window: what was replayed, if not all.
    own: rows of the run itself.
    without: the changes without an effect, in a sentence.
    to_run: text above the command to which a row's options are added.
    best: the recommended change and the best second one; without any, `nothing` says why.
    """

    title: str
    window: str
    headings: list[str]
    own: list[tuple[str, list[str]]]
    rows: list[Row]
    without: str
    sentences: list[str]
    to_run: str
    command: str
    best: list[Best]
    nothing: str


def figure_of(path: str) -> Figure:
    """The figure at a path of summary.json, also of an objective such as itl_s.p95."""
    latency, _, statistic = path.partition("_s.")
    return FIGURES.get(path) or Figure(f"{latency.replace('_', ' ').upper()} {statistic}", "s")


def what_if_table(found: Mapping[str, Any]) -> WhatIfTable:
    """found: as `what_if` of `why --json`, of changes that were tried."""
    changes, baseline = found["changes"], found["baseline"]
    rows = [one for one in changes if any(map(_is_shown, one["effects"].values()))]
    without = [options_of(one, found) for one in changes if one not in rows]
    paths = [
        path
        for path in baseline
        if path != FAILED or baseline[FAILED] or any(one["effects"][FAILED]["after"] for one in rows)
    ]
    index, best = found["recommended"], list[Best]()
    if index is not None:
        chosen, where = found["on_all"] or changes[index], ", on all requests" if found["on_all"] else ""
        alone = f", if only {_name(found['goal'])} counts" if chosen["loses_more"] else ""
        best = [_best(f"Recommended{alone}{where}", chosen, found)]
        if chosen["loses_more"] and found["milder"] is None:
            best[0].remarks.append("So do all others that help.")
    if found["then"]:
        best.append(_best("Then, on these requests" if found["window"] else "Then", found["then"], found))
    if (milder := found["milder"]) is not None:
        best.append(_best("Recommended, if the others count as much", changes[milder], found))
    errors = ", or not beyond the errors below" if found["errors"] else ""
    return WhatIfTable(
        _title(found),
        found["window"]["text"] if found["window"] else "",
        [figure_of(path).heading for path in paths],
        _own_rows(found, paths),
        [
            Row(options_of(one, found), [_cell(path, one["effects"][path]) for path in paths], one["command"])
            for one in rows
        ],
        f"Change no figure by {percent(SHOWN_CHANGE, 1)}{errors}: {', '.join(without)}." if without else "",
        _sentences(found),
        f"To {'predict' if found['recorded'] else 'run'} a line, add its options to:" if rows else "",
        found["command"],
        best,
        "" if best else f"Nothing that was tried helps: {found['reason']}.",
    )


def options_of(change: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The settings of a change as they are given on the command line, by the names of the engine of the run."""
    return " ".join(option_words(change["settings"], found["engine"]))


def _title(found: Mapping[str, Any]) -> str:
    best = f"best {_name(found['goal'])} first"
    if len(targets := found["objectives"]) > 1:
        named = ", ".join(figure_of(path).name for path in targets)
        best = f"those nearest to all objectives first: {named}"
    why = f" ({found['goal_chosen']})" if found["goal_chosen"] else ""
    tried = "tried on the trace of this run"
    if found["recorded"]:
        tried = "predicted by a simulated device that was fitted to this run"
    return f"Other settings, {tried}, {best}{why}"


def _own_rows(found: Mapping[str, Any], paths: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The rows of the run itself: of one on a real device what was measured and how near its replay comes; of a window
    its requests."""
    baseline, recorded, replayed = found["baseline"], found["recorded"], found["replayed"]
    own, rows = "this run", []
    if recorded:
        rows.append((own, [_shown(path, recorded[path]) for path in paths]))
        own = "its replay there"
        rows.append((own, [_with_change(path, recorded[path], replayed[path]) for path in paths]))
    if found["window"] or not recorded:
        name = f"{own}, these requests" if found["window"] else own
        rows.append((name, [_shown(path, baseline[path]) for path in paths]))
    return rows


def _is_shown(effect: Mapping[str, Any]) -> bool:
    before, after = effect["before"], effect["after"]
    if effect["is_noise"] or before is None or after is None:
        return False
    return bool(abs(after - before) >= SHOWN_CHANGE * abs(before) and after != before)


def _shown(path: str, value: float | None) -> str:
    return count(value) if path == FAILED else significant(value, figure_of(path).scale)


def _cell(path: str, effect: Mapping[str, Any]) -> Cell:
    before, after = effect["before"], effect["after"]
    shown = _shown(path, after)
    if not _is_shown(effect):
        return Cell(shown)
    change = "" if path == FAILED or not before else _change(after / before)
    return Cell(shown, change, "better" if (after > before) == figure_of(path).is_better_high else "worse")


def _with_change(path: str, before: float | None, after: float | None) -> str:
    """The figure `after`, with its distance to `before` in percent."""
    return f"{_shown(path, after)} {_change(after / before)}" if before and after is not None else _shown(path, after)


def _change(ratio: float) -> str:
    percents = 100 * (ratio - 1)
    return f"x{ratio:,.0f}" if percents >= 1000 else f"{round(percents):+}%" if round(percents) else "0%"


def _sentences(found: Mapping[str, Any]) -> list[str]:
    texts = list(found["notes"])
    if found["recorded"]:
        texts.append(
            "An effect that is smaller than the distance of the replay to the run counts as none. What a fit to this "
            "run does not tell (tp_size, kv_cache_dtype, overlap) is not tried."
        )
    elif errors := found["errors"]:
        named = ", ".join(f"{_name(path)} {percent(error)}" for path, error in errors.items())
        texts.append(f"A smaller effect than the expected error of a difference counts as none: {named}.")
    if untried := found["untried"]:
        named = ", ".join(options_of({"settings": one}, found) for one in untried)
        texts.append(f"Not tried for lack of time (--budget gives more): {named}.")
    if refused := found["refused"]:
        named = ", ".join(options_of(one, found) for one in refused)
        texts.append(f"Not possible here: {named}; --json has the reasons.")
    return texts


def _best(title: str, change: Mapping[str, Any], found: Mapping[str, Any]) -> Best:
    better: list[str] = []
    worse: list[str] = []
    for path, effect in change["effects"].items():
        if path != found["goal"] and _is_shown(effect):
            is_better = _cell(path, effect).effect == "better"
            (better if is_better else worse).append(_from_to(path, effect))
    remarks = [remark for name, remark in REMARKS.items() if name in change["settings"]]
    if change["needs_more_gpus"]:
        remarks.append(f"It needs {change['gpus']} GPUs.")
    if change["loses_more"]:
        remarks.append("It costs more than it gains: another figure gets worse by a larger factor.")
    effect = _from_to(found["goal"], change["effects"][found["goal"]])
    commands = list(filter(None, [change.get("real_command"), change["command"]]))
    return Best(title, options_of(change, found), effect, better, worse, remarks, commands)


def _from_to(path: str, effect: Mapping[str, Any]) -> str:
    unit = figure_of(path).unit
    return f"{_name(path)} {_shown(path, effect['before'])} → {_shown(path, effect['after'])} {unit}".rstrip()


def _name(path: str) -> str:
    return figure_of(path).name or "output throughput"


def print_what_if(found: Mapping[str, Any], console: Console) -> None:
    """Print what was tried, the best first. found: as `what_if` of `why --json`."""
    if found["goal"] is None:
        console.print(f"No other settings were tried: {found['reason']}.", soft_wrap=True, markup=False)
        return
    shown = what_if_table(found)
    console.print(shown.title, soft_wrap=True, markup=False, style="bold")
    if shown.window:
        console.print(shown.window, soft_wrap=True, markup=False)
    if shown.rows or found["recorded"]:
        table = plain_table("", numbers=shown.headings)
        table.padding = (0, 1)
        table.columns[0].max_width = NAME_WIDTH
        for name, values in shown.own:
            table.add_row(f"[bold]{name}[/bold]", *values)
        for row in shown.rows:
            table.add_row(row.options, *map(_coloured, row.cells))
        print_fitting(console, table)
    if shown.without:
        console.print(shown.without, soft_wrap=True, markup=False)
    if shown.to_run:
        console.print(shown.to_run)
        _print_command(shown.command, console)
    for text in shown.sentences:
        console.print(text, soft_wrap=True, markup=False)
    if shown.nothing:
        console.print(f"\n{shown.nothing}", soft_wrap=True, markup=False, style="bold")
    for best in shown.best:
        text = f"\n[bold]{best.title}: {best.options}[/bold]: {best.effect}"
        text += f"; better: {', '.join(best.better)}" if best.better else ""
        text += f"; [red]worse:[/red] {', '.join(best.worse)}." if best.worse else "; nothing listed is worse."
        console.print(" ".join([text, *best.remarks]), soft_wrap=True)
        if best.heading:
            console.print(best.heading)
        for command in best.commands:
            _print_command(command, console)


def _print_command(command: str, console: Console) -> None:
    """Never broken into lines, so that it can be copied."""
    console.file.write(f"{command}\n")


def _coloured(cell: Cell) -> str:
    if not cell.effect:
        return f"[dim]{cell.text}[/dim]"
    colour = {"better": "green", "worse": "red"}[cell.effect]
    return f"{cell.text} [{colour}]{cell.change}[/{colour}]" if cell.change else f"[{colour}]{cell.text}[/{colour}]"
