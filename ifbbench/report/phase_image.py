"""What many requests do, as an image in the colours of their phases: bars would be thinner than a pixel."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from ifbbench.report.colours import PHASE_COLOURS
from ifbbench.rundir.reader import Floats

Integers = NDArray[np.int64]

# With more rows, several are in one row of cells.
MAX_ROWS = 500
WHITE = 255.0


def draw_phase_image(
    axes: Axes,
    phases: "pd.Series[str]",
    rows: Integers,
    left: Floats,
    right: Floats,
    extent: tuple[float, float, int],
    columns: int,
) -> None:
    """Fill `axes` with cells in which the colours of phases are mixed by how much of it each covers, and white by how
    much none does.

    rows, left, right: where each stretch of `phases` is.
    extent: the ends of the axis of time, and the number of rows.
    columns: number of columns of cells.
    """
    first, last, count = extent
    shape = (min(MAX_ROWS, max(count, 1)), columns)
    rows_of_cells = rows * shape[0] // max(count, 1)
    begin, end = (np.clip((times - first) * columns / (last - first), 0, columns) for times in (left, right))
    # With an alpha channel, matplotlib resamples single precision; without it double, in twice the memory.
    pixels = np.full((*shape, 4), WHITE, np.float32)
    for phase, colour in PHASE_COLOURS.items():
        chosen = (phases == phase).to_numpy(dtype=bool)
        if chosen.any():
            share = _coverage(rows_of_cells[chosen], begin[chosen], end[chosen], shape) * shape[0] / count
            for channel, value in enumerate(to_rgb(colour)):
                pixels[..., channel] -= WHITE * (1.0 - value) * share
    axes.imshow(
        np.clip(pixels, 0, WHITE).astype(np.uint8),
        aspect="auto",
        interpolation="none",  # so that SVG and PDF have the cells, and not the pixels of one resolution
        extent=(first, last, count - 0.5, -0.5),
    )
    axes.grid(visible=False)


def _coverage(rows: Integers, begin: Floats, end: Floats, shape: tuple[int, int]) -> Floats:
    """How much of each cell the stretches from `begin` to `end` cover, summed over the stretches of its row."""
    count, width = shape[0], shape[1] + 2
    # The integral of the coverage up to each column edge: a ramp from begin to end is a difference of two kinks.
    positions, weights = [], []
    for edge, sign in ((begin, 1.0), (end, -1.0)):
        cell = edge.astype(np.int64)
        inside = edge - cell
        positions += [rows * width + cell, rows * width + cell + 1]
        weights += [sign * (1.0 - inside), sign * inside]
    slopes = np.bincount(np.concatenate(positions), np.concatenate(weights), count * width)
    return np.asarray(slopes.reshape(count, width).cumsum(axis=1)[:, : shape[1]])
