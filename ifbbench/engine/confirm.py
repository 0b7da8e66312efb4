"""What the loop does with an executor's answer: write tokens down, and find the requests that end with them."""

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.active import ActiveRequests
from ifbbench.engine.batch import StepOutputs
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.flight import Flight
from ifbbench.engine.request import Request


def confirm(flight: Flight, outputs: StepOutputs, active: ActiveRequests) -> list[Request]:
    """Write down the outputs of `flight`; returns the requests that have all their tokens now, in batch order."""
    table, rows = active.table, flight.output_rows
    places = None
    if flight.dropped:
        places = np.flatnonzero(~np.isin(rows, list(flight.dropped)))
        rows = rows[places]
    confirmed = table.confirmed[rows] + 1
    table.confirmed[rows] = confirmed
    done = confirmed == table.stop_after[rows]
    if outputs.tokens is not None:
        tokens = outputs.tokens if places is None else outputs.tokens[places]
        table.write_outputs(rows, table.joined[rows] + confirmed - 1, tokens)
        if table.any_end_tokens:
            done |= (tokens[:, None] == table.end_tokens[rows]).any(axis=1)
    if table.num_special:
        _keep_context_logits(flight, outputs)
        _confirm_special(rows, np.arange(len(rows)) if places is None else places, done, outputs, active)
    return [active.by_slot[row] for row in rows[done].tolist()]


def _keep_context_logits(flight: Flight, outputs: StepOutputs) -> None:
    for index, logits in outputs.context_logits.items():
        chunk = flight.record.context[index]
        if chunk.request.numbers is not None and chunk.request.slot not in flight.dropped:
            chunk.request.numbers.add_context(chunk.start, logits)


def _confirm_special(
    rows: NDArray[np.int64], places: NDArray[np.intp], done: NDArray[np.bool_], outputs: StepOutputs,
    active: ActiveRequests,
) -> None:
    """The requests among `rows` whose tokens need more than being written down; `done` becomes true for those that end.

    places: [rows], where the outputs of each row lie.
    """
    for index in np.flatnonzero(active.table.is_special[rows]).tolist():
        request, place = active.by_slot[int(rows[index])], int(places[index])
        _keep_numbers(request, outputs, place)
        if request.beam_width > 1:
            if outputs.candidates is not None:
                done[index] = _search(request, outputs, place, is_last=bool(done[index]))
        elif request.stop.stop_sequences and outputs.tokens is not None:
            done[index] |= _ends_with_stop_sequence(request)


def _keep_numbers(request: Request, outputs: StepOutputs, place: int) -> None:
    if request.numbers is None:
        return
    position = request.num_outputs - 1
    if outputs.log_probs is not None and request.beam_width == 1:
        request.numbers.add_log_prob(position, float(outputs.log_probs[place]))
    logits = outputs.generation_logits.get(place)
    if logits is not None:
        request.numbers.add_generation(position, logits)


def _search(request: Request, outputs: StepOutputs, place: int, is_last: bool) -> bool:
    candidates = outputs.candidates
    assert candidates is not None
    if request.search is None:
        request.search = BeamSearch(request.beam_width, request.sampling, request.stop, request.max_new_tokens)
    return request.search.advance(
        candidates.tokens[place], candidates.beams[place], candidates.scores[place], is_last=is_last
    )


def _ends_with_stop_sequence(request: Request) -> bool:
    """Whether the newest output tokens are one of the request's stop sequences. The prompt never counts."""
    assert request.table is not None
    num_outputs = request.num_outputs
    longest = max(map(len, request.stop.stop_sequences))
    tail = tuple(request.table.outputs(request.slot, max(0, num_outputs - longest), num_outputs).tolist())
    return any(tail[-len(sequence) :] == sequence for sequence in request.stop.stop_sequences)
