"""Confirmation of outputs: their tokens are stored, and the requests that end with them are found."""

from collections.abc import Sequence

import numpy as np

from ifbbench.engine.arrays import Rows
from ifbbench.engine.batch import NO_OUTPUTS, StepOutputs
from ifbbench.engine.confirm_special import confirm_context, confirm_drafted, confirm_special
from ifbbench.engine.drafts import DraftVerifier
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request, RequestTable


def confirm(
    iteration: InFlightIteration,
    outputs: Sequence[StepOutputs],
    table: RequestTable,
    drafts: DraftVerifier | None = None,
) -> list[Request]:
    """Store the outputs of each pass of `iteration`; returns the requests that are complete, in batch order. drafts:
    None of a scheduler without draft tokens."""
    if outputs:
        table.makes_tokens = outputs[-1].tokens is not None or outputs[-1].candidates is not None
    rows, done = iteration.output_rows, list[Request]()
    for batch, of_pass in zip(iteration.batches, outputs, strict=True):
        count = len(rows) if len(outputs) == 1 else batch.num_outputs
        if batch.drafts is None or drafts is None:
            done += _confirm_pass(iteration, rows[:count], of_pass, table)
        else:
            done += confirm_drafted(iteration, rows[:count], batch.drafts, of_pass, table, drafts)
        rows = rows[count:]
    return done


def _confirm_pass(iteration: InFlightIteration, rows: Rows, outputs: StepOutputs, table: RequestTable) -> list[Request]:
    indices = None
    if iteration.dropped:
        indices = np.flatnonzero(~np.isin(rows, list(iteration.dropped)))
        rows = rows[indices]
    confirmed = table.confirmed[rows] + 1
    table.confirmed[rows] = confirmed
    done = confirmed == table.stop_after[rows]
    if outputs.tokens is not None:
        tokens = outputs.tokens if indices is None else outputs.tokens[indices]
        table.write_outputs(rows, table.joined[rows] + confirmed - 1, tokens)
        if table.any_end_tokens:
            done |= (tokens[:, None] == table.end_tokens[rows]).any(axis=1)
    if table.num_special and outputs is not NO_OUTPUTS:
        confirm_context(iteration, outputs)
        confirm_special(rows, np.arange(len(rows)) if indices is None else indices, done, outputs, table)
    return [table.requests[row] for row in rows[done].tolist()]
