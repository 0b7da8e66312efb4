"""Several servers that share the requests of a run: what each has recorded, and the figures of all together."""

from typing import Any

import numpy as np

from ifbbench.rundir.drafts import DraftTotals
from ifbbench.rundir.recorder import IterationTotals, SummaryRecorder

# Values of IterationTotals that are added up over several servers, and those of which the largest counts.
_SUMS = (
    "slots", "padded_slots", "empty_generation_slots", "pauses", "recomputed_tokens", "computed_tokens", "iterations",
)  # fmt: skip
_PEAKS = (
    "peak_scheduled", "peak_active", "peak_used_blocks", "max_blocks", "tokens_per_block", "max_tokens",
    "peak_held_tokens", "peak_filled_tokens", "num_micro_batches",
)  # fmt: skip


def parts_of(recorder: SummaryRecorder) -> tuple[Any, ...]:
    """All that the figures of a server are made of, as what another process can be sent."""
    totals = recorder.totals
    known = {name: getattr(totals, name) for name in (*_SUMS, *_PEAKS, "windows", "limit_of", "drafts")}
    return recorder.metrics.parts(), known | {"limits": list(totals.limits)}, recorder.starts_s, recorder.ends_s


def add_server(recorder: SummaryRecorder, parts: tuple[Any, ...]) -> None:
    """Take in the run of another server that shared the requests, its `parts_of`. Times and limits of its iterations
    move, as they are many: its own columns of them are empty then."""
    metrics, totals, starts, ends = parts
    recorder.metrics.add_server(metrics, recorder.totals.iterations)
    _add_totals(recorder.totals, totals)
    for column, others in ((recorder.starts_s, starts), (recorder.ends_s, ends)):
        column.extend(others)
        del others[:]


def _add_totals(totals: IterationTotals, parts: dict[str, Any]) -> None:
    """Take in the iterations of another server, as if they followed those so far. Of the cache and of peaks, the
    largest values of one server count."""
    for name in _SUMS:
        setattr(totals, name, getattr(totals, name) + parts[name])
    for name in _PEAKS:
        known = [value for value in (getattr(totals, name), parts[name]) if value is not None]
        setattr(totals, name, max(known, default=None))
    for size, blocks in parts["windows"].items():
        mine = totals.windows.setdefault(size, dict(blocks))
        mine["peak_used"] = max(mine["peak_used"], blocks["peak_used"])
    numbers = np.array([totals.limits[name] for name in parts["limits"]], np.intc)
    totals.limit_of.frombytes(numbers[np.asarray(parts["limit_of"])].tobytes())
    del parts["limit_of"][:]
    if parts["drafts"] is not None:
        totals.drafts = totals.drafts or DraftTotals()
        totals.drafts.add_totals(parts["drafts"])
