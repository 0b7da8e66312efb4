"""Charts of a run and of a sweep, as PNG and SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.recording.run_directory import find_lines
from ifbbench.report.charts.kv_cache import draw_kv_cache
from ifbbench.report.charts.latency import draw_latency
from ifbbench.report.charts.style import save, styled
from ifbbench.report.charts.sweep import draw_sweep
from ifbbench.report.charts.throughput import draw_throughput
from ifbbench.report.charts.timeline import draw_timeline
from ifbbench.report.charts.timeline_cells import timeline_cells
from ifbbench.report.load import RunData

__all__ = ["plot_run", "plot_sweep", "timeline_cells"]


def plot_run(run: RunData, directory: Path | None = None) -> list[Path]:
    """Draw the charts of `run` into `directory`, by default `charts` in the run directory; return the files written.

    They are throughput, kv_cache (not for a contiguous cache), latency and timeline, each as .png and .svg.
    InputError if the run has no iteration to draw.
    """
    if run.iterations.empty:
        raise InputError(
            f"{find_lines(run.path, 'iterations')}: no iterations, so there is nothing to draw; expected those of a "
            "run that began its work. Run again, or name another run."
        )
    charts = {"throughput": draw_throughput, "latency": draw_latency, "timeline": draw_timeline}
    if run.iterations["max_kv_cache_blocks"].max() > 0:
        charts["kv_cache"] = draw_kv_cache
    directory = directory or run.path / "charts"
    with styled():
        return [path for name, draw in sorted(charts.items()) for path in save(draw(run), directory, name)]


def plot_sweep(rows: Sequence[Mapping[str, Any]], over: str, directory: Path) -> list[Path]:
    """Draw throughput and TTFT against the setting `over` into `directory`; return the files written.

    A row is a flattened summary (`ttft_s.p99`) with the settings beside it. InputError if a row lacks the setting.
    """
    if not rows or any(over not in row for row in rows):
        raise InputError(
            f"sweep: not every row has a value of {over!r}; expected the rows of `ifbbench sweep --over {over}=…`."
        )
    with styled():
        return save(draw_sweep(rows, over), directory, "sweep")
