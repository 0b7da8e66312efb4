"""Where the time of a profiled run went, and what its device reached of what it could do."""

from dataclasses import dataclass

from rich.console import Console

from ifbbench.analysis.number_texts import percent, significant, time_unit
from ifbbench.report import bar, plain_table
from ifbbench.rundir.reader import RunData

# Parts of a profiled iteration, by the field that has their time: of a CPU, and of a GPU.
ON_CPU = {"schedule": "Schedule", "prepare": "Prepare", "device_busy": "Forward pass", "collect": "Collect"}
ON_GPU = {"schedule": "Schedule", "prepare": "Prepare", "launch": "Launch", "collect": "Wait for the GPU"}
REST = "Answer, record, wait"
SCALES = {"T": 1e12, "G": 1e9, "M": 1e6}


@dataclass(frozen=True, slots=True)
class Reached:
    """What a device did a second while it was busy, in FLOPs or bytes, and the maximum that large operations reach."""

    per_s: float
    max_per_s: float

    @property
    def share(self) -> float:
        return self.per_s / self.max_per_s

    def __str__(self) -> str:
        """`12.3 of 19.8 G`."""
        letter, scale = next((item for item in SCALES.items() if self.max_per_s >= item[1]), ("M", 1e6))
        return f"{significant(self.per_s / scale)} of {significant(self.max_per_s / scale)} {letter}"


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """The profile of a whole run.

    parts: mean seconds an iteration of what the host does, which together are the run's duration.
    device_busy: share of the duration in which the device computes.
    bandwidth: reached in iterations of generation alone, by weights, keys and values.
    arithmetic: reached in iterations with context. None where there were none.
    """

    parts: dict[str, float]
    device_busy: float
    bandwidth: Reached | None
    arithmetic: Reached | None


def profile_figures(run: RunData) -> ProfileFigures | None:
    """The figures of a run with --profile; None of others, and where nothing was run."""
    limits = run.run.get("device_limits")
    # The table of iterations is read only then: it is large, and other runs do not need it.
    if limits is None or (iterations := run.iterations).empty:
        return None
    names = ON_CPU if str(run.config.get("device")).startswith("cpu") else ON_GPU
    ends_s = iterations["start_s"] + iterations["latency_ms"] / 1000
    duration_s, count = float(ends_s.iloc[-1] - iterations["start_s"].iloc[0]), len(iterations)
    parts = {title: float(iterations[f"{name}_ms"].sum()) / 1000 / count for name, title in names.items()}
    parts[REST] = max(0.0, duration_s / count - sum(parts.values()))
    busy_s = iterations["device_busy_ms"] / 1000
    has_context = iterations["total_context_tokens"] > 0

    def reached(kind: str, max_per_s: float) -> Reached | None:
        rows = (has_context if kind == "flops" else ~has_context) & (busy_s > 0)
        if not rows.any():
            return None
        return Reached(float(iterations.loc[rows, kind].sum() / busy_s[rows].sum()), max_per_s)

    return ProfileFigures(
        parts,
        float(busy_s.sum()) / duration_s,
        reached("bytes", limits["bytes_per_s"]),
        reached("flops", limits["flops_per_s"]),
    )


def profile_sentence(profile: ProfileFigures) -> str:
    """How busy the device was, and with what."""
    sentence = f"The device was busy {percent(profile.device_busy)} of the time"
    if (reached := profile.bandwidth) is not None:
        sentence += (
            f"; in generation it read and wrote weights, keys and values at {percent(reached.share)} of the "
            f"speed of a large copy (MBU, {reached}B/s)"
        )
    if (reached := profile.arithmetic) is not None:
        sentence += (
            f"; in iterations with context it computed at {percent(reached.share)} of the speed of a large "
            f"matrix product (MFU, {reached}FLOP/s)"
        )
    return f"{sentence}."


def print_profile(run: RunData, console: Console) -> None:
    profile = profile_figures(run)
    if profile is None:
        return
    unit, scale = time_unit(profile.parts.values())
    table = plain_table("Where the time goes", "", numbers=("share", f"{unit} an iteration"))
    for title, seconds in profile.parts.items():
        share = seconds / sum(profile.parts.values())
        table.add_row(title, f"[cyan]{bar(share)}[/cyan]", percent(share), significant(seconds, scale))
    console.print()
    console.print(table)
    console.print()
    console.print(profile_sentence(profile), highlight=False, soft_wrap=True)
