"""The colours of all charts and pages. Each means one thing: a limit, a phase of requests, a series, or a mark.

What a limit is of has the colour of that limit: KV blocks in use have the colour of the limit `kv_blocks`. Series are
runs, percentiles, or values of a setting; they can be told apart with colour-blindness. Charts of single requests
(cells, lanes) have a colour for each request instead, and show no limits. On a dark ground, pages have lighter series
and a lighter context phase.
"""

import json
from collections.abc import Iterable

INK, MUTED, GRID, FAINT = "#222222", "#6B6B6B", "#E3E3E3", "#BBBBBB"
# Lines at the value of a limit, and what failed.
LIMIT = "#B3202A"
# Marks of pauses, and gaps between tokens over a pause.
PAUSE = "#B0006A"
LIMIT_COLOURS = {
    "batch_size": "#0072B2",
    "num_tokens": "#D55E00",
    "kv_blocks": "#009E73",
    "watermark": "#5FBF9F",
    "full_prompt": "#00543D",
    "prefill": "#7A9EB1",
    "none": "#C4C4C4",
    "head_of_line": "#A89F91",
    "paused": "#F0C000",
    "static_batch": "#A67C52",
    "reuse_delay": "#E8998D",
    "attention_dp": "#3E8E7E",
    "lora_pages": "#5C4033",
    "beam_width": "#5B7F95",
}
# Limits without a colour of their own take these in turn.
OTHER_LIMITS = ("#CC79A7", "#8C8C00", "#4D4D4D")
PHASE_COLOURS = {
    "context": "#14507A",
    "generation": "#86BFE3",
    "recompute": "#7B2FE0",
    "paused": LIMIT_COLOURS["paused"],
    "waiting": "#DEDEDE",
    "skipped": "#B9A3CF",
}
SERIES = ("#332288", "#7FBC41", "#AA4499", "#B8860B", "#4B5D16", "#882255")
CONTEXT_ON_DARK = "#2F7FC4"
SERIES_ON_DARK = ("#9A8CFF", "#9BD45F", "#D983CC", "#E0AD2E", "#C9D68A", "#E0709F")
# p50 and p99.
PERCENTILES = ("#8F8FE0", SERIES[0])
# Colours of requests: dark, so that white letters are legible on them.
REQUEST_COLOURS = ("#0072B2", "#D55E00", "#007F5F", "#A8447F", "#B07A00", "#2F8FBF", "#6A4C93", "#7A5C3E")


def page_style() -> str:
    """What is lighter on a dark ground as variables of CSS: `--context`, `--series-0` and so on."""
    light, dark = (
        f"--context: {context}; " + " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(colours))
        for context, colours in ((PHASE_COLOURS["context"], SERIES), (CONTEXT_ON_DARK, SERIES_ON_DARK))
    )
    return (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
    )


def page_script() -> str:
    """The other colours as a constant of JavaScript."""
    series = [f"var(--series-{index})" for index in range(len(SERIES))]
    table = {"phases": PHASE_COLOURS, "limits": LIMIT_COLOURS, "requests": REQUEST_COLOURS, "series": series}
    return f"const COLOURS = {json.dumps(table)};\n"


def limit_colours(limits: Iterable[str]) -> dict[str, str]:
    """A colour for each of `limits`, the known ones first."""
    found = set(limits)
    known = {name: LIMIT_COLOURS[name] for name in LIMIT_COLOURS if name in found}
    others = sorted(found - known.keys())
    return known | {name: OTHER_LIMITS[index % len(OTHER_LIMITS)] for index, name in enumerate(others)}
