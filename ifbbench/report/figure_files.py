"""How figures are written as files: laid out once, drawn once for each format, without dates."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from ifbbench.files import replace_file
from ifbbench.report.chart_files import FORMATS
from ifbbench.report.style import STYLE

METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": "ifbbench"},
    ".pdf": {"CreationDate": None},
}
POSITION_DIGITS = 5


def save(
    figure: Figure, directory: Path, name: str, formats: Sequence[str] = FORMATS, dpi: float | None = None
) -> list[Path]:
    """Write `figure` as `name`.png, `name`.svg and so on, without dates, so that equal figures are equal files."""
    paths = [directory / f"{name}.{kind}" for kind in formats]
    # Layout and PNG file have one renderer, which measures each text once.
    figure.dpi = dpi or STYLE["savefig.dpi"]
    canvas = FigureCanvasAgg(figure)
    # The layout is the same in each format. With a layout engine, every file would be drawn twice.
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    with mpl.rc_context({"figure.constrained_layout.use": False, "figure.autolayout": False}):
        figure.set_layout_engine(None)
        for axes in figure.axes:
            # The solver's last digits differ from one layout to the next.
            left, bottom, width, height = (round(part, POSITION_DIGITS) for part in axes.get_position().bounds)
            axes.set_position((left, bottom, width, height))
        for path in sorted(paths, key=lambda path: path.suffix != ".png"):
            if path.suffix == ".png":
                _write_png(canvas, path)
                _keep_labels(figure)
            else:
                _write_drawing(figure, path)
    return paths


def _write_png(canvas: FigureCanvasAgg, path: Path) -> None:
    """Draw, and write a PNG file. A figure has no transparent pixels, and without alpha it is encoded sooner."""
    canvas.draw()  # type: ignore[no-untyped-call]
    content, dpi = BytesIO(), canvas.figure.dpi
    pixels = canvas.buffer_rgba()  # type: ignore[no-untyped-call]
    image = Image.fromarray(np.asarray(pixels)).convert("RGB")
    image.save(content, format="png", compress_level=1, dpi=(dpi, dpi))
    replace_file(path, content.getvalue())


def _keep_labels(figure: Figure) -> None:
    """Let the labels of axes stay where they were drawn: else each drawing measures all tick labels for them again."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn_at = axis.label.get_transform().transform(axis.label.get_position())
            x, y = figure.transFigure.inverted().transform(drawn_at)
            axis.set_label_coords(x, y, transform=figure.transFigure)


def _write_drawing(figure: Figure, path: Path) -> None:
    """Draw, and write an SVG or PDF file."""
    content = BytesIO()
    figure.savefig(content, format=path.suffix[1:], metadata=METADATA[path.suffix], dpi=figure.dpi)
    replace_file(path, content.getvalue())
