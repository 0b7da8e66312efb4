"""The scheduler timeline: cells with letters while they can be read, bars over time beyond that."""

from matplotlib.figure import Figure

from ifbbench.report.charts.timeline_bars import draw_bars
from ifbbench.report.charts.timeline_cells import request_order
from ifbbench.report.charts.timeline_grid import draw_grid
from ifbbench.report.load import RunData

MOST_ROWS_WITH_LETTERS = 16
MOST_COLUMNS_WITH_LETTERS = 64


def draw_timeline(run: RunData) -> Figure:
    """One row a request, one column an iteration; on an axis of time if there are too many of either for letters."""
    numbers = run.iterations["iteration_counter"]
    columns = int(numbers.max() - numbers.min()) + 1
    small = columns <= MOST_COLUMNS_WITH_LETTERS and len(request_order(run)) <= MOST_ROWS_WITH_LETTERS
    return draw_grid(run) if small else draw_bars(run)
