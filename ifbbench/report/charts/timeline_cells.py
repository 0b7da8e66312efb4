"""The scheduler timeline as data: what each request did in each iteration."""

from typing import Any

import numpy as np
import pandas as pd

from ifbbench.errors import InputError
from ifbbench.recording.run_directory import find_lines
from ifbbench.report.load import RunData

CHUNK_LETTERS = {"context": "C", "recompute": "R"}
CELL_COLUMNS = ("request_id", "iteration", "label", "phase")


def timeline_cells(run: RunData) -> pd.DataFrame:
    """One row a request and iteration: `request_id`, `iteration`, `label`, `phase`, as the timeline draws them.

    Labels: `C5` context, a chunk of 5 tokens; `R5` recompute, likewise; `G2` second generation step; `P` paused;
    empty while waiting or skipped. Requests are in the order of their rows.
    """
    spans = run.spans
    lengths = (spans["last_iteration"] - spans["first_iteration"] + 1).to_numpy(dtype=int)
    if not len(spans):
        return pd.DataFrame(columns=list(CELL_COLUMNS))
    fields = (spans[name].tolist() for name in ("request_id", "phase", "first_output", "chunks"))
    labels: list[str] = []
    for request, phase, first_output, chunks, length in zip(*fields, lengths.tolist(), strict=True):
        if phase in CHUNK_LETTERS:
            _check_chunks(run, request, phase, chunks, length)
            labels += [f"{CHUNK_LETTERS[phase]}{chunk}" for chunk in chunks]
        elif phase == "generation":
            labels += [f"G{int(first_output) + step}" for step in range(length)]
        else:
            labels += ["P" if phase == "paused" else ""] * length
    within_span = np.concatenate([np.arange(length) for length in lengths])
    cells = pd.DataFrame(
        {
            "request_id": np.repeat(spans["request_id"].to_numpy(), lengths),
            "iteration": np.repeat(spans["first_iteration"].to_numpy(), lengths) + within_span,
            "label": labels,
            "phase": np.repeat(spans["phase"].to_numpy(), lengths),
        }
    )
    rows = {request: row for row, request in enumerate(request_order(run))}
    order = cells["request_id"].map(rows)
    return cells.assign(row=order).sort_values(["row", "iteration"], ignore_index=True)[list(CELL_COLUMNS)]


def request_order(run: RunData) -> list[str]:
    """Every request of the run, a row each: by index in the trace; those still running when it was killed come last."""
    known = run.requests["request_id"].tolist()
    first_seen = run.spans.sort_values("first_iteration", kind="stable")["request_id"]
    return list(dict.fromkeys([*known, *first_seen]))


def _check_chunks(run: RunData, request: str, phase: str, chunks: Any, length: int) -> None:
    known = len(chunks) if isinstance(chunks, list) else 0
    if known != length:
        raise InputError(
            f"{find_lines(run.path, 'spans')}: request {request}: {known} chunks for a {phase} span of {length} "
            "iterations; expected one chunk size an iteration. Run again to record it anew."
        )
