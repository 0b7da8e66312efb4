"""Where the time of a profiled run went, and how near the device came to what it can do."""

from dataclasses import dataclass

from rich.table import Table

from ifbbench.report.load import RunData
from ifbbench.report.units import bar, percent, significant, time_unit

ON_CPU = {"schedule": "Schedule", "prepare": "Prepare", "device_busy": "Forward pass", "collect": "Collect"}
ON_GPU = {"schedule": "Schedule", "prepare": "Prepare", "launch": "Launch", "collect": "Wait for the GPU"}
REST = "Answer, record, wait"
SCALES = {"T": 1e12, "G": 1e9, "M": 1e6}


@dataclass(frozen=True, slots=True)
class Reached:
    """What a device did a second while it was busy, in FLOPs or bytes, and the most that large operations reach."""

    per_s: float
    most_per_s: float

    @property
    def share(self) -> float:
        return self.per_s / self.most_per_s


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """Of a whole run. parts: mean seconds an iteration of what the host does, which together are the run's duration.

    device_busy: share of the duration in which the device computes. bandwidth: reached in iterations of generation
    alone, by weights, keys and values. arithmetic: reached in iterations with context. None where there were none.
    """

    parts: dict[str, float]
    device_busy: float
    bandwidth: Reached | None
    arithmetic: Reached | None


def profile_figures(run: RunData) -> ProfileFigures | None:
    """The figures of a run with --profile; None of others, and where nothing was run."""
    limits = run.run.get("device_limits")
    if limits is None:
        return None
    # Read only now: of other runs they are many, and not needed.
    iterations = run.iterations
    if iterations.empty:
        return None
    names = ON_CPU if str(run.config.get("device")).startswith("cpu") else ON_GPU
    ends_s = iterations["start_s"] + iterations["latency_ms"] / 1000
    duration_s, count = float(ends_s.iloc[-1] - iterations["start_s"].iloc[0]), len(iterations)
    parts = {title: float(iterations[f"{name}_ms"].sum()) / 1000 / count for name, title in names.items()}
    parts[REST] = max(0.0, duration_s / count - sum(parts.values()))
    busy_s = iterations["device_busy_ms"] / 1000
    has_context = iterations["total_context_tokens"] > 0

    def reached(kind: str, most_per_s: float) -> Reached | None:
        rows = (has_context if kind == "flops" else ~has_context) & (busy_s > 0)
        if not rows.any():
            return None
        return Reached(float(iterations.loc[rows, kind].sum() / busy_s[rows].sum()), most_per_s)

    return ProfileFigures(
        parts, float(busy_s.sum()) / duration_s, reached("bytes", limits["bytes_per_s"]),
        reached("flops", limits["flops_per_s"]),
    )  # fmt: skip


def profile_table(figures: ProfileFigures) -> Table:
    """The parts of a mean iteration, with their shares."""
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    unit, scale = time_unit(figures.parts.values())
    for heading in ("Where the time goes", ""):
        table.add_column(heading)
    for heading in ("share", f"{unit} an iteration"):
        table.add_column(heading, justify="right")
    whole = sum(figures.parts.values())
    for title, seconds in figures.parts.items():
        share = seconds / whole
        table.add_row(title, f"[cyan]{bar(share)}[/cyan]", percent(share), significant(seconds * scale))
    return table


def profile_sentence(figures: ProfileFigures) -> str:
    """How busy the device was, and with what."""
    sentence = f"The device was busy {percent(figures.device_busy)} of the time"
    if (reached := figures.bandwidth) is not None:
        sentence += (f"; in generation it read and wrote weights, keys and values at {percent(reached.share)} of the "
                     f"speed of a large copy (MBU, {_of(reached)}B/s)")  # fmt: skip
    if (reached := figures.arithmetic) is not None:
        sentence += (f"; in iterations with context it computed at {percent(reached.share)} of the speed of a large "
                     f"matrix product (MFU, {_of(reached)}FLOP/s)")  # fmt: skip
    return f"{sentence}."


def _of(reached: Reached) -> str:
    """`12.3 of 19.8 G`."""
    letter, scale = next((item for item in SCALES.items() if reached.most_per_s >= item[1]), ("M", 1e6))
    return f"{significant(reached.per_s / scale)} of {significant(reached.most_per_s / scale)} {letter}"
