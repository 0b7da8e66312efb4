"""Tokens a second over time, and what the batch was made of."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ifbbench.report.charts.style import INK, PHASE_COLOURS, draw_limit, heading, thousands
from ifbbench.report.charts.time_axis import Floats, TimeBins
from ifbbench.report.load import RunData
from ifbbench.report.token_times import output_tokens
from ifbbench.report.units import significant


def draw_throughput(run: RunData) -> Figure:
    """Output tokens/s, context tokens/s and requests in the batch, one above the other on one axis of time."""
    figure = Figure(figsize=(9, 6.2))
    output, context, batch = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1.4, 2]})
    bins, iterations = TimeBins.of(run), run.iterations
    _rate(output, bins, output_tokens(run), "generation", "output tokens/s")
    _rate(context, bins, iterations["total_context_tokens"].to_numpy(dtype=float), "context", "context tokens/s")
    _composition(batch, bins, run)
    bins.label(batch)
    heading(output, "Throughput", run)
    figure.align_ylabels()
    return figure


def _rate(axes: Axes, bins: TimeBins, tokens: Floats, phase: str, label: str) -> None:
    rates = bins.rates(tokens)
    axes.stairs(rates, bins.edges, fill=True, color=PHASE_COLOURS[phase], linewidth=0)
    mean = tokens[tokens == tokens].sum() / (bins.edges_s[-1] - bins.edges_s[0])
    axes.axhline(mean, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"mean {significant(mean)}", (1, mean), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", color=INK, fontsize=8, va="center",
    )  # fmt: skip
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    thousands(axes.yaxis)


def _composition(axes: Axes, bins: TimeBins, run: RunData) -> None:
    iterations = run.iterations
    generation = bins.means(iterations["generation_requests"].to_numpy(dtype=float))
    total = generation + bins.means(iterations["context_requests"].to_numpy(dtype=float))
    axes.stairs(
        total, bins.edges, baseline=generation, fill=True, color=PHASE_COLOURS["context"], linewidth=0,
        label="in context phase",
    )  # fmt: skip
    axes.stairs(
        generation, bins.edges, fill=True, color=PHASE_COLOURS["generation"], linewidth=0, label="in generation phase"
    )
    axes.set_ylabel("requests in the batch")
    draw_limit(axes, "max_batch_size", run.config.get("max_batch_size"), float(total.max()))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
