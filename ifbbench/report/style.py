"""What all charts share: fonts and colours, headings, limits, and the axis of time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator

from ifbbench.analysis.number_texts import significant, time_unit
from ifbbench.analysis.token_times import IterationClock
from ifbbench.analysis.words import SIZES, setting_of, words_of
from ifbbench.errors import InputError
from ifbbench.report.colours import GRID, INK, LIMIT, MUTED, SERIES
from ifbbench.rundir.reader import Floats, RunData, once_a_run

LIMIT_DASHES = (0, (4, 3))
# The width of all charts of a run but that of cells, in inches. Pages show them one below the other.
WIDTH = 11.0
# The first line of a set of axes is solid and widest.
DASHES = ("-", "--", ":", "-.")
WIDEST_LINE = 2.4
# The mean width of a digit and the least distance of two lines, in font sizes.
LETTER_WIDTH, LINE_HEIGHT = 0.64, 1.3
MAX_BINS = 150
MAX_SINGLE_ITERATIONS = 200

STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "text.color": INK, "axes.titlelocation": "left",
    "axes.labelcolor": INK, "axes.edgecolor": "#9A9A9A", "axes.linewidth": 0.8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID,
    "grid.linewidth": 0.8, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.frameon": False, "legend.fontsize": 8, "legend.handlelength": 1.2, "legend.columnspacing": 1.4,
    # No chart has ticks at its top. A title that makes room for some looks at the texts of all ticks in each drawing.
    "axes.titley": 1.0,
    "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.06, "savefig.dpi": 150,
    # The same run gives the same bytes: element ids come from this salt, not from a random one.
    "svg.hashsalt": "ifbbench",
}  # fmt: skip


def styled() -> Any:
    """A context in which figures take this style; after it, the caller's own matplotlib settings hold again."""
    return mpl.rc_context(STYLE)


def heading(top: Axes, what: str, run: RunData, legend: bool = False, rows: int = 1) -> None:
    """Put over the topmost axes of a chart: what it shows, of which trace, model and device, and the run's limits.

    legend: there is a legend above the axes, of `rows` rows."""
    config, trace, model = run.config, run.run.get("trace") or {}, run.run.get("model") or {}
    words = words_of(config)
    where = " on ".join(str(name) for name in (model.get("name"), model.get("device")) if name)
    limits = {words.setting_name(limit): limit_of(run, limit) for limit in SIZES}
    parts = [run.decided_by, *(f"{name} {limit}" for name, limit in limits.items() if limit)]
    parts += [words.chunked] if config.get("enable_chunked_context") else []
    parts += ["V1 static batches"] if config.get("type") == "v1" else []
    parts += ["partial run"] if run.partial else []
    parts += [f"one of {run.recorded_every} iterations recorded"] if run.recorded_every > 1 else []
    of = ", ".join(filter(None, (trace.get("name") or run.name, where)))
    title(top, f"{what}: {of}", " · ".join(str(part) for part in parts if part), 15 * max(rows, 1) if legend else 0)


def limit_of(run: RunData, limit: str) -> int | None:
    """The size of a limit, None where the run had none: static batches (V1) have no budget of tokens."""
    value = run.config.get(setting_of(limit))
    return None if value is None or (limit == "num_tokens" and run.config.get("type") == "v1") else int(value)


def title(top: Axes, text: str, subtitle: str = "", room: float = 0) -> None:
    """Put a bold title and a grey subtitle over `top`, both from its left edge. room: points left free below them."""
    top.set_title(text, fontsize=11.5, fontweight="bold", color=INK, pad=(24 if subtitle else 10) + room)
    note = top.annotate(
        subtitle,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10 + room),
        textcoords="offset points",
        color=MUTED,
        fontsize=8.5,
    )
    # The title's padding is its room; in the layout, a long one would squeeze the axes.
    note.set_in_layout(False)


def retitle(figure: Figure, text: str) -> None:
    """Replace the bold title of a chart."""
    axes = next(axes for axes in figure.axes if axes.get_title(loc="left"))
    own = axes.get_title(loc="left")
    for item in axes.get_children():
        if isinstance(item, Text) and item.get_text() == own:
            item.set_text(text)


def line_styles(count: int, colours: Sequence[str] = SERIES, dashed: bool = True) -> list[dict[str, Any]]:
    """The style of each of several lines. Later lines are narrower, so that one that is equal to another one is seen on
    top of it. dashed: they also differ in dashes, which steps that change often hide."""
    return [
        {
            "color": colours[index % len(colours)],
            "linestyle": DASHES[(index if dashed else index // len(colours)) % len(DASHES)],
            "linewidth": max(WIDEST_LINE - 0.5 * index, 1.0),
        }
        for index in range(count)
    ]


def legend_above(axes: Axes, columns: int, handles: Sequence[Any] | None = None) -> Legend:
    """Put the legend over `axes`, from the right edge."""
    given = {} if handles is None else {"handles": handles}
    return axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderaxespad=0.2, **given)


def stack(
    axes: Axes, edges: Floats, layers: Mapping[str, Floats], colours: Mapping[str, str], names: Mapping[str, str]
) -> Floats:
    """Draw `layers`, values of each bin, one upon the other; returns their sums."""
    below = np.zeros(len(edges) - 1)
    for name, values in layers.items():
        steps(
            axes,
            below + values,
            edges,
            baseline=below,
            fill=True,
            color=colours[name],
            linewidth=0,
            label=names.get(name, name),
        )
        below = below + values
    return below


def steps(
    axes: Axes, values: Floats, edges: Floats, baseline: Any = 0, fill: bool = False, color: str = INK, **how: Any
) -> None:
    """Draw `axes.stairs(...)`, which takes most of its time to look for the extrema of each corner, as of a curve."""
    how["facecolor" if fill else "edgecolor"] = color
    patch = StepPatch(values, edges, baseline=baseline, fill=fill, **how)
    axes.add_artist(patch)
    axes.update_datalim(patch.get_path().vertices)
    if baseline is not None:
        patch.sticky_edges.y.append(np.min(baseline))
    axes.autoscale_view()


def boxes(axes: Axes, left: Any, right: Any, top: Any, height: float, colours: Any, **how: Any) -> None:
    """Draw a box for each stretch of time, in the given or the one colour. how: as of PolyCollection. The limits of
    the axes stay as they are."""
    corners = [(left, top), (right, top), (right, top + height), (left, top + height)]
    outlines: Any = np.stack([np.column_stack(corner) for corner in corners], axis=1)
    drawn = PolyCollection(outlines, facecolors=colours, edgecolors=colours, **how)
    axes.add_collection(drawn, autolim=False)


def draw_limit(axes: Axes, run: RunData, limit: str, highest: float) -> None:
    """Scale the y-axis for values up to `highest`; draw the setting of `limit` as a line if it is near, else in
    words."""
    size = limit_of(run, limit)
    near = is_near(size, highest)
    axes.set_ylim(0, max(highest * 1.3, (size or 0) * 1.3 if near else 0.0, 1.0))
    if size is not None:
        label_limit(
            axes,
            f"{words_of(run.config).setting_name(limit)} {size:,}" + ("" if near else " (above this scale)"),
            size,
            near,
        )


def is_near(limit: float | None, highest: float) -> bool:
    """Whether a chart of values up to `highest` has room for a line at `limit`."""
    return limit is not None and limit <= 3 * highest


def label_limit(axes: Axes, text: str, limit: float, near: bool) -> None:
    """A line at `limit` with `text` above it if it is near; else `text` at the top."""
    if near:
        axes.axhline(limit, color=LIMIT, linewidth=1, linestyle=LIMIT_DASHES)
    axes.annotate(
        text,
        (1, limit if near else 1),
        xycoords=("axes fraction", "data" if near else "axes fraction"),
        xytext=(-3, 3 if near else -3),
        textcoords="offset points",
        color=LIMIT,
        fontsize=8,
        ha="right",
        va="bottom" if near else "top",
    )


def label_mean(axes: Axes, mean: float) -> None:
    """The mean in words, to the right of the axes and at its height."""
    axes.annotate(
        f"mean {significant(mean)}",
        (1, mean),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        color=INK,
        fontsize=8,
        va="center",
    )


def note_inside(axes: Axes, text: str, color: str = MUTED, margin: float = 3) -> None:
    """Write `text` at the top right of `axes`, `margin` points below their edge: what a chart would show if there were
    any of it, or a limit that it has."""
    axes.annotate(
        text,
        (1, 1),
        xycoords="axes fraction",
        xytext=(-3, -margin),
        textcoords="offset points",
        color=color,
        fontsize=8,
        ha="right",
        va="top",
    )


def in_full(value: float) -> str:
    """A number of an axis, with thousands separators and without exponent."""
    return f"{value:,.10g}"


def in_percent(share: float) -> str:
    """A share of an axis in percent."""
    return f"{100 * share:,.10g} %"


class RoundTicks(Locator):
    """Ticks at 1, 2 and 5 times powers of ten, or at multiples of these, as many as have room for their texts.

    most: maximum number of ticks.
    whole: whether they are at whole numbers only.
    text: text of a tick.
    """

    def __init__(self, axis: Axis, most: int, whole: bool, text: Callable[[float], str]) -> None:
        self._axis, self._most, self._whole, self._text = axis, most, whole, text
        self._found: dict[tuple[Any, ...], Any] = {}

    def __call__(self) -> Any:
        low, high = sorted(self._axis.get_view_interval())
        # A layout and a drawing ask a dozen times for the ticks of the same axis.
        asked = (low, high, self._axis.get_scale(), *self._axis.axes.bbox.size, self._axis.axes.figure.dpi)
        if asked not in self._found:
            self._found[asked] = self.tick_values(float(low), float(high))
        return self._found[asked]

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks of an axis from `vmin` to `vmax`."""
        found = np.array([vmin])
        for found in self._candidates(vmin, vmax):
            if self.have_room(found, vmin, vmax):
                break
        return found

    def _candidates(self, low: float, high: float) -> Iterator[Floats]:
        """Ticks, fewer and fewer."""
        if self._axis.get_scale() == "log":
            yield from (found for found in _ticks_of_log(low, high, self._most) if len(found) > 1)
        yield from self._linear(low, high)

    def _linear(self, low: float, high: float) -> Iterator[Floats]:
        slack = 1e-9 * (high - low)
        for count in range(self._most, 0, -1):
            locator = MaxNLocator(count, steps=[1, 2, 5, 10], integer=self._whole, min_n_ticks=1)
            found = np.asarray(locator.tick_values(low, high))
            yield found[(found >= low - slack) & (found <= high + slack)]

    def have_room(self, values: Floats, low: float, high: float) -> bool:
        """Whether the texts of these ticks do not touch each other on an axis from `low` to `high`."""
        if len(values) < 2:
            return True
        axes, positions = self._axis.axes, np.array([*values, low, high])
        if self._axis.get_scale() == "log":
            positions = np.log10(positions)
        size, is_across = float(STYLE["xtick.labelsize"]), self._axis is axes.xaxis
        length = (axes.bbox.width if is_across else axes.bbox.height) * 72 / axes.figure.dpi
        gaps = np.diff(positions[:-2]) / (positions[-1] - positions[-2]) * length
        widths = np.array([len(self._text(value)) for value in values]) * LETTER_WIDTH * size
        needed = (widths[1:] + widths[:-1]) / 2 + size if is_across else LINE_HEIGHT * size
        return bool((gaps > needed).all())


class ChosenTicks(RoundTicks):
    """Ticks at given values, without those that have no room for their texts.

    values: values in ascending order.
    """

    def __init__(self, axis: Axis, values: Sequence[float], text: Callable[[float], str]) -> None:
        super().__init__(axis, len(values), False, text)
        self._values = values

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks of an axis from `vmin` to `vmax`: the first one, the last one, and what has room between them."""
        *others, last = self._values
        found: list[float] = []
        for value in others:
            if self.have_room(np.array([*found[-1:], value, last]), vmin, vmax):
                found.append(value)
        return np.array([*found, last])


def _ticks_of_log(low: float, high: float, most: int) -> Iterator[Floats]:
    """Ticks within the ends of a logarithmic axis, fewer and fewer."""
    powers = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    several = [np.outer(powers, steps).ravel() for steps in ([1, 2, 5], [1, 3])]
    for found in (*several, *(powers[::every] for every in range(1, len(powers)))):
        inside = found[(found >= low) & (found <= high)]
        if len(inside) <= 3 * most // 2:
            yield inside


def round_ticks(axis: Axis, most: int = 6, whole: bool = False, text: Callable[[float], str] = in_full) -> None:
    """Let `axis` have round ticks with texts that do not touch: see RoundTicks. A later change of its scale undoes
    it."""
    _set_ticks(axis, RoundTicks(axis, most, whole, text), text)


def chosen_ticks(axis: Axis, values: Sequence[float], text: Callable[[float], str] = in_full) -> None:
    """Let `axis` have ticks at `values`, which ascend, as far as their texts do not touch."""
    _set_ticks(axis, ChosenTicks(axis, values, text), text)


def _set_ticks(axis: Axis, locator: Locator, text: Callable[[float], str]) -> None:
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def nothing_to_draw(run: RunData) -> InputError:
    """The error for a run without iterations."""
    return InputError(
        f"{run.path}: no iterations, so there is nothing to draw; expected those of a run that began its "
        "work. Run again, or name another run."
    )


@dataclass(frozen=True)
class TimeBins:
    """Consecutive bins of a run's time: its iterations and the gaps between them, or even bins if there are many.

    edges_s: [bins + 1].
    """

    clock: IterationClock
    edges_s: Floats

    @classmethod
    @once_a_run
    def of(cls, run: RunData) -> "TimeBins":
        """The bins for the charts of `run`. InputError if it has no iterations."""
        clock = IterationClock.of(run)
        if not len(clock.numbers):
            raise nothing_to_draw(run)
        if len(clock.numbers) <= MAX_SINGLE_ITERATIONS:
            edges = np.unique(np.concatenate([clock.start_s, clock.end_s]))
        else:
            edges = np.linspace(clock.start_s[0], clock.end_s.max(), MAX_BINS + 1)
        if len(edges) < 2 or edges[-1] <= edges[0]:
            # An executor that answers at once on a virtual clock takes no time at all.
            edges = np.array([clock.start_s[0], clock.start_s[0] + 1e-3])
        return cls(clock, edges)

    @cached_property
    def unit(self) -> tuple[str, float]:
        """The axis's unit and the number of them in a second."""
        return time_unit([float(self.edges_s[-1])])

    @property
    def per_bin(self) -> str:
        """What a label of counts adds: the width of even bins, nothing where each iteration has a bin."""
        if len(self.clock.numbers) <= MAX_SINGLE_ITERATIONS:
            return ""
        width_s = float(self.edges_s[1] - self.edges_s[0])
        unit, scale = time_unit([width_s])
        return f"\nper {significant(width_s, scale)} {unit}"

    @property
    def edges(self) -> Floats:
        """The edges in the unit of the axis."""
        return self.scaled(self.edges_s)

    def scaled(self, seconds: Floats) -> Floats:
        """Seconds in the axis's unit."""
        return seconds * self.unit[1]

    def rates(self, amounts: Floats) -> Floats:
        """Per-iteration amounts (tokens) as amount per second in each bin, an iteration's spread over its time."""
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(amounts))])
        known = np.repeat(total, 2)[1:-1]
        gathered: Floats = np.diff(np.interp(self.edges_s, self._bounds, known)) / np.diff(self.edges_s)
        return gathered

    def means(self, values: Floats) -> Floats:
        """Per-iteration values (a count of requests) averaged over the time of each bin; 0 between iterations."""
        begin_s, end_s = self._alone
        return self.rates(values * (end_s - begin_s))

    def until_next(self, values: Floats) -> Floats:
        """Per-iteration values averaged over the time of each bin, those of an iteration from its start to the next."""
        bounds = np.append(self.clock.start_s, max(self.clock.end_s.max(), self.edges_s[-1]))
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values) * np.diff(bounds))])
        gathered: Floats = np.diff(np.interp(self.edges_s, bounds, total)) / np.diff(self.edges_s)
        return gathered

    @cached_property
    def _alone(self) -> tuple[Floats, Floats]:
        """Begin and end of each iteration. With overlap, one begins when the one before has ended."""
        end_s = np.maximum.accumulate(self.clock.end_s)
        return np.maximum(self.clock.start_s, np.concatenate([[-np.inf], end_s[:-1]])), end_s

    @cached_property
    def _bounds(self) -> Floats:
        """Begin and end of the first iteration, of the second one, and so on."""
        return np.column_stack(self._alone).ravel()

    def covered(self, spans: pd.DataFrame, ends_s: "pd.Series[float]") -> Floats:
        """How many of `spans` cover a moment of each bin, on average. ends_s: of these spans and any others."""
        starts, ends = self.clock.starts(spans["first_iteration"]), ends_s[spans.index].to_numpy()
        gathered = np.zeros(len(self.edges_s))
        for times, sign in ((starts, 1.0), (ends, -1.0)):
            ordered = np.sort(times)
            sums = np.concatenate([[0.0], np.cumsum(ordered)])
            before = np.searchsorted(ordered, self.edges_s, side="right")
            gathered += sign * (before * self.edges_s - sums[before])
        return np.asarray(np.maximum(np.diff(gathered) / np.diff(self.edges_s), 0.0))

    def highest(self, values: Floats) -> Floats:
        """The largest value of the iterations that run in each bin; 0 where none does."""
        begin_s, end_s = self._alone
        first = np.clip(np.searchsorted(self.edges_s, begin_s, side="right") - 1, 0, len(self.edges_s) - 2)
        last = np.clip(np.searchsorted(self.edges_s, end_s) - 1, first, len(self.edges_s) - 2)
        found = np.zeros(len(self.edges_s) - 1)
        np.maximum.at(found, last, np.nan_to_num(values))
        for index in np.flatnonzero(last > first):  # at most one for each edge
            part = found[first[index] : last[index]]
            np.maximum(part, values[index], out=part)
        return found

    def peaks(self, values: Floats) -> Floats:
        """The largest per-iteration value of each bin; a bin in which no iteration ended keeps the value before it.

        For values that hold between iterations, such as the blocks in use."""
        bins = np.clip(np.searchsorted(self.edges_s, self.clock.end_s) - 1, 0, len(self.edges_s) - 2)
        peaks = np.full(len(self.edges_s) - 1, -1.0)
        np.maximum.at(peaks, bins, np.nan_to_num(values))
        last_known = np.maximum.accumulate(np.where(peaks >= 0, np.arange(len(peaks)), 0))
        return np.asarray(np.maximum(peaks[last_known], 0.0), dtype=float)

    def label(self, axes: Axes) -> None:
        """Name the time axis, which spans the run."""
        axes.set_xlabel(f"time since the start of the run ({self.unit[0]})")
        round_ticks(axes.xaxis, 12)
        is_window = len(self.clock.numbers) > 0 and self.clock.numbers[0] > 0
        axes.set_xlim(float(self.edges[0]) if is_window else min(0.0, float(self.edges[0])), float(self.edges[-1]))
