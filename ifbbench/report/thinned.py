"""The iterations that thinned statistics leave out, as far as anything else tells of them."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# What is known of each iteration by itself: in others it is not known.
OF_ONE_ITERATION = ("host_ms", "device_ms", "tokens_recomputed", "padding_tokens", "context_pass_ms",
                    "generation_pass_ms", "empty_generation_slots", "paused")  # fmt: skip


def filled(iterations: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """A row for each iteration, those that were left out included.

    What ran in them comes from `spans`, exactly. When they ran is interpolated between those recorded. No request was
    paused in them, and they were bound by what the one before was, for those are always recorded. The KV cache and the
    queue stay as they were when they were last recorded, and the columns OF_ONE_ITERATION are empty.
    """
    if iterations.empty:
        return iterations
    recorded = iterations["iteration_counter"].to_numpy(dtype=np.int64)
    last = int(max(recorded[-1], spans["last_iteration"].max() if len(spans) else 0))
    numbers = np.arange(recorded[0], last + 1)
    unknown = [name for name in OF_ONE_ITERATION if name in iterations]
    alone = iterations.set_index("iteration_counter")
    table = alone.reindex(numbers, method="ffill")
    table.loc[~np.isin(numbers, recorded), unknown] = None
    table.loc[~np.isin(numbers, recorded), "pauses"] = 0
    start_s = np.interp(numbers, recorded, alone["start_s"])
    end_s = np.interp(numbers, recorded, alone["start_s"] + alone["latency_ms"] / 1000)
    tokens_a_step = (table["budget_used"] - table["total_context_tokens"]) / table["generation_requests"]
    context = _context(spans, last)[recorded[0] :]
    generation = _generation(spans, last)[recorded[0] :]
    return table.assign(
        start_s=start_s,
        latency_ms=(end_s - start_s) * 1000,
        context_requests=context[:, 0],
        total_context_tokens=context[:, 1],
        generation_requests=generation,
        scheduled_requests=context[:, 0] + generation,
        # A step is as many tokens as a request has beams; requests of one run mostly have the same number.
        budget_used=context[:, 1] + generation * tokens_a_step.ffill().fillna(1.0).to_numpy(dtype=float),
    ).reset_index(names="iteration_counter")


def _context(spans: pd.DataFrame, last: int) -> Floats:
    """How many requests were in their context phase, and with how many tokens; shape [iterations, 2]."""
    with_chunks = spans[spans["phase"].isin(["context", "recompute"])]
    result = np.zeros((last + 1, 2))
    for first, chunks in zip(with_chunks["first_iteration"].tolist(), with_chunks["chunks"], strict=True):
        result[first : first + len(chunks), 0] += 1
        result[first : first + len(chunks), 1] += chunks
    return result


def _generation(spans: pd.DataFrame, last: int) -> Floats:
    """How many requests were in their generation phase; shape [iterations]."""
    generating = spans[spans["phase"] == "generation"]
    steps = np.zeros(last + 2)
    np.add.at(steps, generating["first_iteration"].to_numpy(dtype=np.int64), 1)
    np.add.at(steps, generating["last_iteration"].to_numpy(dtype=np.int64) + 1, -1)
    return np.asarray(steps.cumsum()[:-1], dtype=float)
