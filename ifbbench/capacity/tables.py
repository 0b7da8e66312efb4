"""The tables of `ifbbench capacity`."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.capacity.fit import Fit
from ifbbench.capacity.study import Study
from ifbbench.capacity.text import memory, requests_line, sentences, title
from ifbbench.report.tables import LIMIT_NAMES
from ifbbench.report.units import NOTHING, count, significant

HINT = "Give --input-len and --output-len, or --trace, to see how many requests run at once."


def print_study(study: Study, console: Console) -> None:
    """Print what fits."""
    console.print()
    console.print(f"[bold]{escape(study.config.model)}[/bold]  {escape(title(study))}", highlight=False)
    console.print()
    console.print(_memory_table(study))
    console.print()
    if study.requests:
        console.print(requests_line(study), style="bold", highlight=False)
        console.print()
        console.print(_fit_table(study))
        console.print()
    for sentence in sentences(study):
        # A file or pipe gets a sentence a line; a terminal is not to break words.
        console.print(escape(sentence), highlight=False, soft_wrap=not console.is_terminal)
    if not study.requests:
        console.print(HINT, highlight=False)


def _memory_table(study: Study) -> Table:
    pool, device = study.pool, study.device
    table = Table.grid(padding=(0, 3))
    for style in ("dim", None, "dim", None):
        table.add_column(style=style)
    per_block = sum(window.bytes_per_block for window in pool.windows)
    tokens = " + ".join(count(window.num_blocks * window.attention_window.tokens_per_block) for window in pool.windows)
    num_devices = study.config.tp_size * study.config.pp_size
    each, of_all = (" of each GPU", f" of all {num_devices}") if num_devices > 1 else ("", "")
    rows = [
        (f"Free memory{each}", NOTHING if device.free_bytes is None else memory(device.free_bytes),
         "One token", f"{memory(pool.bytes_per_token)} in {count(study.model.num_layers)} layers"),
        (f"Weights{each}", memory(pool.weight_bytes),
         "One block", f"{memory(per_block)} for {count(study.limits.tokens_per_block)} tokens"),
        (f"For the KV cache{of_all}", memory(pool.kv_bytes if pool.budget_bytes is None else pool.budget_bytes),
         "Blocks", f"[bold]{' + '.join(count(window.num_blocks) for window in pool.windows)}[/bold]"),
        ("", "", "Tokens", tokens),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    taken = [window.blocks_of_run for window in pool.windows]
    if taken != [window.num_blocks for window in pool.windows]:
        table.add_row("", "", "A run takes", f"{' + '.join(map(count, taken))} blocks, a full batch")
    if study.config.kv_host_cache_bytes:
        on_host = " + ".join(count(window.layout.num_host_blocks) for window in pool.windows)
        table.add_row("On the host", memory(study.config.kv_host_cache_bytes), "Host blocks", on_host)
    return table


def _fit_table(study: Study) -> Table:
    is_trace = len(study.requests) > 1
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column("Policy")
    for name in ("blocks\neach", "cache\nholds", "at\nonce"):
        table.add_column(name, justify="right")
    if is_trace:
        table.add_column("packed\nin order", justify="right")
    table.add_column("bound by")
    for found in study.fits:
        table.add_row(*_fit_row(found, is_trace))
    contiguous = study.contiguous
    bound = "memory" if contiguous.fit <= study.limits.max_batch_size else LIMIT_NAMES["batch_size"]
    first = [NOTHING] if is_trace else []
    table.add_row("contiguous cache", NOTHING, count(contiguous.fit), count(contiguous.at_once), *first, bound)
    return table


def _fit_row(found: Fit, is_trace: bool) -> list[str]:
    moment = f"[dim], {found.way.moment}[/dim]" if found.way.moment else ""
    first = [count(found.first)] if is_trace else []
    mean = float(found.mean_blocks)
    return [
        f"{found.way.label}{moment}",
        count(mean) if mean.is_integer() else significant(mean),
        count(found.by_blocks),
        f"[bold]{count(found.at_once)}[/bold]",
        *first,
        LIMIT_NAMES[found.bound_by],
    ]
