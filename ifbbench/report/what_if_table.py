"""The table of other settings that were tried on a run's own trace, and the sentences about the best of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.report import plain_table, print_fitting
from ifbbench.settings.fields import as_text

FAILED = "requests.failed"


class Figure(NamedTuple):
    """A figure as it is shown. scale: from the unit of summary.json."""

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
NAME_WIDTH = 30
# Changes of less are not shown.
SHOWN_CHANGE = 0.005
# What a change does beside the figures.
REMARKS = {
    "kv_cache_dtype": "It rounds keys and values otherwise, which may change answers; that is not measured here.",
    "max_queue_size": "It refuses requests.",
}


def figure_of(path: str) -> Figure:
    """The figure at a path of summary.json, also of an objective such as itl_s.p95."""
    latency, _, statistic = path.partition("_s.")
    return FIGURES.get(path) or Figure(f"{latency.replace('_', ' ').upper()} {statistic}", "s")


def options_of(settings: Mapping[str, Any]) -> str:
    """Settings as they are given on the command line."""
    return " ".join(
        f"--{'' if value else 'no_'}{name}" if isinstance(value, bool) else f"--{name} {as_text(value)}"
        for name, value in settings.items()
    )


def print_what_if(found: Mapping[str, Any], console: Console) -> None:
    """Print what was tried, the best first. found: as `what_if` of `why --json`."""
    if found["goal"] is None:
        console.print(f"No other settings were tried: {found['reason']}.", soft_wrap=True, markup=False)
        return
    best = f"best {_name(found['goal'])} first"
    if len(targets := found["objectives"]) > 1:
        named = ", ".join(figure_of(path).name for path in targets)
        best = f"those nearest to all objectives first: {named}"
    why = f" ({found['goal_chosen']})" if found["goal_chosen"] else ""
    changes, baseline = found["changes"], found["baseline"]
    console.print(f"[bold]Other settings, tried on the trace of this run[/bold], {best}{why}", soft_wrap=True)
    without = [one for one in changes if not any(map(_is_shown, one["effects"].values()))]
    rows = [one for one in changes if one not in without]
    if rows:
        _print_table(rows, baseline, console)
    if without:
        named = ", ".join(options_of(one["settings"]) for one in without)
        console.print(f"Change no figure by {percent(SHOWN_CHANGE, 1)}: {named}.", soft_wrap=True, markup=False)
    if rows:
        console.print("To run a line, add its options to:")
        _print_command(found["command"], console)
    for text in _sentences(found):
        console.print(text, soft_wrap=True, markup=False)
    if (index := found["recommended"]) is None:
        console.print(f"\n[bold]Nothing that was tried helps:[/bold] {found['reason']}.", soft_wrap=True)
        return
    _print_best("Recommended", changes[index], found["goal"], console)
    if found["then"]:
        _print_best("Then", found["then"], found["goal"], console)


def _is_shown(effect: Mapping[str, Any]) -> bool:
    before, after = effect["before"], effect["after"]
    if effect["is_noise"] or before is None or after is None:
        return False
    return bool(abs(after - before) >= SHOWN_CHANGE * abs(before) and after != before)


def _print_command(command: str, console: Console) -> None:
    """Never broken into lines, so that it can be copied."""
    console.file.write(f"{command}\n")


def _print_table(rows: Sequence[Mapping[str, Any]], baseline: Mapping[str, Any], console: Console) -> None:
    paths = list(baseline)
    if not any(one["effects"][FAILED]["after"] or baseline[FAILED] for one in rows):
        paths.remove(FAILED)
    table = plain_table("", numbers=[figure_of(path).heading for path in paths])
    table.padding = (0, 1)
    table.columns[0].max_width = NAME_WIDTH
    table.add_row("[bold]this run[/bold]", *(_shown(path, baseline[path]) for path in paths))
    for one in rows:
        table.add_row(options_of(one["settings"]), *(_cell(path, one["effects"][path]) for path in paths))
    print_fitting(console, table)


def _shown(path: str, value: float | None) -> str:
    return count(value) if path == FAILED else significant(value, figure_of(path).scale)


def _cell(path: str, effect: Mapping[str, Any]) -> str:
    """The figure, with its change in percent: green where it is better, red where it is worse."""
    before, after = effect["before"], effect["after"]
    shown = _shown(path, after)
    if not _is_shown(effect):
        return f"[dim]{shown}[/dim]"
    colour = "green" if (after > before) == figure_of(path).is_better_high else "red"
    change = "" if path == FAILED or not before else _change(after / before)
    return f"{shown} [{colour}]{change}[/{colour}]" if change else f"[{colour}]{shown}[/{colour}]"


def _change(ratio: float) -> str:
    percents = 100 * (ratio - 1)
    return f"x{ratio:,.0f}" if percents >= 1000 else f"{percents:+.0f}%"


def _sentences(found: Mapping[str, Any]) -> list[str]:
    texts = list(found["notes"])
    if untried := found["untried"]:
        named = ", ".join(map(options_of, untried))
        texts.append(f"Not tried for lack of time (--budget gives more): {named}.")
    if refused := found["refused"]:
        named = ", ".join(options_of(one["settings"]) for one in refused)
        texts.append(f"Not possible here: {named}; --json has the reasons.")
    return texts


def _print_best(title: str, change: Mapping[str, Any], goal: str, console: Console) -> None:
    """The change with what becomes better and worse, and its command on a line of its own."""
    better: list[str] = []
    worse: list[str] = []
    for path, effect in change["effects"].items():
        if path == goal or not _is_shown(effect):
            continue
        is_better = (effect["after"] > effect["before"]) == figure_of(path).is_better_high
        (better if is_better else worse).append(_from_to(path, effect))
    text = f"[bold]{title}: {options_of(change['settings'])}[/bold]: {_from_to(goal, change['effects'][goal])}"
    text += f"; better: {', '.join(better)}" if better else ""
    text += f"; [red]worse:[/red] {', '.join(worse)}." if worse else "; nothing listed is worse."
    remarks = [remark for name, remark in REMARKS.items() if name in change["settings"]]
    if change["needs_more_gpus"]:
        remarks.append(f"It needs {change['gpus']} GPUs.")
    console.print()
    console.print(" ".join([text, *remarks]), soft_wrap=True)
    _print_command(change["command"], console)


def _from_to(path: str, effect: Mapping[str, Any]) -> str:
    unit = figure_of(path).unit
    return f"{_name(path)} {_shown(path, effect['before'])} → {_shown(path, effect['after'])} {unit}".rstrip()


def _name(path: str) -> str:
    return figure_of(path).name or "output throughput"
