"""Confirmation of what only some requests have: log-probabilities and logits, beams, stop sequences, draft tokens."""

import numpy as np

from ifbbench.engine.arrays import BoolArray, Int64Array, Rows
from ifbbench.engine.batch import StepOutputs
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.drafts import DraftCounts, DraftInputs, DraftVerifier
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request, RequestTable


def confirm_context(iteration: InFlightIteration, outputs: StepOutputs) -> None:
    """Take in the logits of the context chunks of `iteration`."""
    for index, logits in outputs.context_logits.items():
        chunk = iteration.record.context[index]
        if chunk.request.numbers is not None and chunk.request.slot not in iteration.dropped:
            chunk.request.numbers.add_context(chunk.start, logits)


def confirm_special(
    rows: Rows, indices: Int64Array, done: BoolArray, outputs: StepOutputs, table: RequestTable
) -> None:
    """Confirm the special requests among `rows`; `done` becomes true for those that end.

    indices: [rows], index of each row's output in `outputs`."""
    for at in np.flatnonzero(table.is_special[rows]).tolist():
        request, index = table.requests[int(rows[at])], int(indices[at])
        if request.numbers is not None:
            position = request.num_outputs - 1
            if outputs.log_probs is not None and request.beam_width == 1:
                request.numbers.add_log_prob(position, float(outputs.log_probs[index]))
            if (logits := outputs.generation_logits.get(index)) is not None:
                request.numbers.add_generation(position, logits)
        if request.beam_width > 1:
            if (candidates := outputs.candidates) is not None:
                search = request.search
                if search is None:
                    search = BeamSearch(request.beam_width, request.sampling, request.stop, request.max_new_tokens)
                    request.search = search
                done[at] = search.advance(
                    candidates.tokens[index],
                    candidates.beams[index],
                    candidates.scores[index],
                    is_last=bool(done[at]),
                )
        elif request.stop.stop_sequences and outputs.tokens is not None:
            done[at] |= _ends_with_stop_sequence(request)


def confirm_drafted(
    iteration: InFlightIteration,
    rows: Rows,
    inputs: DraftInputs,
    outputs: StepOutputs,
    table: RequestTable,
    drafts: DraftVerifier,
) -> list[Request]:
    """Confirm a pass with draft tokens, of which each output is one token or several; returns the requests that are
    complete. rows: [outputs], the table row of each."""
    kept = np.arange(len(rows))
    if iteration.dropped:
        kept = np.flatnonzero(~np.isin(rows, list(iteration.dropped)))
    rows, asked = rows[kept], inputs.counts[kept]
    accepted = drafts.accepted(rows, asked) if outputs.accepted is None else outputs.accepted[kept]
    confirm_context(iteration, outputs)
    yielded, done = _confirm_tokens(rows, kept, accepted.astype(np.int64) + 1, outputs, table)
    drafts.settle(rows)
    requests = [table.requests[row] for row in rows.tolist()]
    if iteration.record.drafts is None:
        iteration.record.drafts = DraftCounts()
    iteration.record.drafts.add(asked, yielded - 1, requests, outputs.draft_s)
    return [request for request, is_done in zip(requests, done.tolist(), strict=True) if is_done]


def _confirm_tokens(
    rows: Rows, indices: Int64Array, yielded: Int64Array, outputs: StepOutputs, table: RequestTable
) -> tuple[Int64Array, BoolArray]:
    """Store the first `yielded` tokens of each of `rows`, at most up to the one that ends its request. Returns how many
    were stored, and which requests end. indices: [rows], index of each row's output in `outputs`."""
    before = table.confirmed[rows]
    yielded = np.minimum(yielded, table.stop_after[rows] - before)
    done = before + yielded == table.stop_after[rows]
    if outputs.tokens is not None:
        tokens = outputs.tokens[indices]
        steps = np.arange(tokens.shape[1])
        if table.any_end_tokens:
            ends = (tokens[:, :, None] == table.end_tokens[rows][:, None, :]).any(axis=2) & (steps < yielded[:, None])
            is_ended = ends.any(axis=1)
            yielded = np.where(is_ended, ends.argmax(axis=1) + 1, yielded)
            done |= is_ended
        is_valid = steps < yielded[:, None]
        columns = (table.joined[rows] + before)[:, None] + steps
        table.write_outputs(np.repeat(rows, yielded), columns[is_valid], tokens[is_valid])
    table.confirmed[rows] = before + yielded
    for at in np.flatnonzero(table.is_special[rows]).tolist():
        request, index, row = table.requests[int(rows[at])], int(indices[at]), int(rows[at])
        for step in range(int(yielded[at])):
            table.confirmed[row] = before[at] + step + 1
            position = request.num_outputs - 1
            if request.numbers is not None:
                if outputs.log_probs is not None:
                    request.numbers.add_log_prob(position, float(outputs.log_probs[index, step]))
                if (logits := outputs.generation_logits.get(index)) is not None:
                    request.numbers.add_generation(position, logits[step : step + 1])
            if request.stop.stop_sequences and outputs.tokens is not None and _ends_with_stop_sequence(request):
                yielded[at], done[at] = step + 1, True
                break
    # Nothing of these requests is in flight any more.
    table.generated[rows] = table.confirmed[rows]
    return yielded, done


def _ends_with_stop_sequence(request: Request) -> bool:
    """Whether the newest output tokens are a stop sequence of the request. The prompt is never part of a match."""
    assert request.table is not None
    num_outputs = request.num_outputs
    longest = max(map(len, request.stop.stop_sequences))
    tail = tuple(request.table.outputs(request.slot, max(0, num_outputs - longest), num_outputs).tolist())
    return any(tail[-len(sequence) :] == sequence for sequence in request.stop.stop_sequences)
