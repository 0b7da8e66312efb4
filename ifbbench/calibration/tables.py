"""What `ifbbench calibrate` prints: the constants it found, and how well they fit."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.calibration.calibrate import Calibration
from ifbbench.calibration.fit import FITTED_SHARES, FitError
from ifbbench.report.units import count, percent, significant

GIGA = 1e9
MICROSECONDS = 1e6
# Predictions that are further off, in the median, are not worth much.
TOO_LARGE = 0.15
KINDS = ("context", "generation", "mixed")
SHARE_NAMES = {
    "matmul": "Matrix products", "context_attention": "Attention of prompts", "memory": "Weights and activations",
    "generation_attention": "Attention of generation",
}  # fmt: skip


def print_calibration(found: Calibration, console: Console) -> None:
    """Print the constants of the profile and the errors of its predictions."""
    profile = found.profile
    console.print()
    console.print(f"[bold]{escape(profile.name)}[/bold]  {escape(profile.title)}", highlight=False)
    for table in (_constants_table(found), _error_table(found)):
        console.print()
        console.print(table)
    console.print()
    if FitError.of(found.points, found.predicted_s).median > TOO_LARGE:
        console.print(
            "These errors are large. Perhaps something else keeps this machine busy: measure again when it is quiet.\n",
            style="yellow", soft_wrap=True,
        )  # fmt: skip


def _constants_table(found: Calibration) -> Table:
    profile, constants = found.profile, found.profile.constants
    (flops_per_s,) = profile.peak_flops.values()
    table = _table("Constant", "reached", "of the peak")
    for name in FITTED_SHARES:
        is_arithmetic = name in ("matmul", "context_attention")
        peak, unit = (flops_per_s, "GFLOP/s") if is_arithmetic else (profile.memory_bandwidth, "GB/s")
        share = getattr(constants, name)
        table.add_row(SHARE_NAMES[name], f"{significant(share * peak / GIGA)} {unit}", percent(share))
    times = {
        "Start of a kernel": constants.kernel_s,
        "Start of context": constants.context_s,
        "Host, each iteration": profile.host_iteration_s,
        "Host, each request": profile.host_request_s,
    }
    for label, seconds in times.items():
        table.add_row(label, f"{significant(seconds * MICROSECONDS)} µs", "")
    return table


def _error_table(found: Calibration) -> Table:
    table = _table("Predicted against measured", "points", "median", "p90", "worst")
    for kind in (*KINDS, "all"):
        chosen = [index for index, point in enumerate(found.points) if kind in (point.kind, "all")]
        if not chosen:
            continue
        error = FitError.of([found.points[index] for index in chosen], found.predicted_s[chosen])
        table.add_row(
            kind, count(len(chosen)), percent(error.median), percent(error.p90), percent(error.worst),
            style="bold" if kind == "all" else None,
        )  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
