"""An iteration in flight: submission, collection, confirmation of its outputs, responses, and storing its blocks."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ifbbench.engine.active import ActiveRequests, BoolArray, FloatArray, Int64Array, IntArray, RequestTable, Rows
from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs, check_outputs
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.drafts import DraftCounts, Drafts
from ifbbench.engine.interfaces import Executor
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.kv.interface import KvCache
from ifbbench.schedulers.tensorrt_llm.scheduler import Plan


@dataclass(slots=True)
class InFlightIteration:
    """One iteration from its submission to its outputs.

    batches: its passes. output_rows: [outputs], the table row of each output. dropped: rows with outputs to ignore,
    because the request has left or only pads the batch. num_submitted: passes that were not collected yet.
    """

    record: IterationRecord
    batches: tuple[Batch, ...]
    output_rows: Rows
    dropped: set[int] = field(default_factory=set)
    num_submitted: int = 0
    error: Exception | None = None

    def submit(self, executor: Executor) -> None:
        """Submit all passes. An exception is kept in `error`."""
        try:
            for batch in self.batches:
                executor.submit(batch)
                self.num_submitted += 1
        except Exception as error:
            self.error = error

    def collect(self, executor: Executor, now: Callable[[], float]) -> list[StepOutputs]:
        """The outputs of each pass. An exception, also of outputs that do not fit the pass, is kept in `error`."""
        outputs = list[StepOutputs]()
        for batch in self.batches[: self.num_submitted]:
            self.num_submitted -= 1
            try:
                of_pass = executor.collect()
                check_outputs(of_pass, batch)
                outputs.append(of_pass)
            except Exception as error:
                self.error = self.error or error
            if len(self.batches) > 1 and self.record.context_end_s is None:
                self.record.context_end_s = now()
        return outputs


def forget_empty_turns(in_flight: deque[InFlightIteration]) -> int:
    """Remove the latest of the iterations in flight, the oldest of which is the first, if they are turns of micro
    batches without requests; returns how many."""
    count = 0
    while in_flight and not in_flight[-1].batches:
        in_flight.pop()
        count += 1
    return count


def is_pause_in_flight(in_flight: deque[InFlightIteration], plan: Plan, table: RequestTable, is_async: bool) -> bool:
    """Whether a request that `plan` pauses is in one of the iterations in flight."""
    if is_async:
        return bool(in_flight)
    micro_batches = {iteration.record.micro_batch for iteration in in_flight}
    return any(int(table.micro_batch[pause.victim.slot]) in micro_batches for pause in plan.paused)


# Confirmation: store the tokens, and find the requests that end with them.


def confirm(
    iteration: InFlightIteration, outputs: list[StepOutputs], active: ActiveRequests, drafts: Drafts
) -> list[Request]:
    """Store the outputs of each pass of `iteration`; returns the requests that are complete, in batch order."""
    rows = iteration.output_rows
    if active.table.max_draft_tokens and any(batch.drafts is not None for batch in iteration.batches):
        return _confirm_drafted(iteration, outputs, active, drafts)
    if len(outputs) < 2:
        return _confirm_pass(iteration, rows, outputs[0] if outputs else NO_OUTPUTS, active)
    num_context = iteration.batches[0].num_last_chunks
    done = _confirm_pass(iteration, rows[:num_context], outputs[0], active)
    return done + _confirm_pass(iteration, rows[num_context:], outputs[1], active)


def _confirm_pass(
    iteration: InFlightIteration, rows: Rows, outputs: StepOutputs, active: ActiveRequests
) -> list[Request]:
    table, indices = active.table, None
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
        _confirm_context(iteration, outputs)
        _confirm_special(rows, np.arange(len(rows)) if indices is None else indices, done, outputs, active)
    return [active.by_slot[row] for row in rows[done].tolist()]


def _confirm_context(iteration: InFlightIteration, outputs: StepOutputs) -> None:
    for index, logits in outputs.context_logits.items():
        chunk = iteration.record.context[index]
        if chunk.request.numbers is not None and chunk.request.slot not in iteration.dropped:
            chunk.request.numbers.add_context(chunk.start, logits)


def _confirm_drafted(
    iteration: InFlightIteration, outputs: list[StepOutputs], active: ActiveRequests, drafts: Drafts
) -> list[Request]:
    """`confirm` of an iteration with draft tokens: each output is one token or several."""
    found, counts = list[Request](), DraftCounts()
    iteration.record.drafts, first = counts, 0
    for batch, of_pass in zip(iteration.batches, outputs, strict=True):
        rows, first = iteration.output_rows[first : first + batch.num_outputs], first + batch.num_outputs
        if batch.drafts is None:
            found += _confirm_pass(iteration, rows, of_pass, active)
            continue
        kept = np.flatnonzero(~np.isin(rows, list(iteration.dropped)))
        rows, asked = rows[kept], batch.drafts.counts[kept]
        accepted = drafts.accepted(rows, asked) if of_pass.accepted is None else of_pass.accepted[kept]
        _confirm_context(iteration, of_pass)
        yielded, done = _confirm_tokens(rows, kept, accepted.astype(np.int64) + 1, of_pass, active)
        drafts.settle(rows)
        requests = [active.by_slot[row] for row in rows.tolist()]
        counts.add(asked, yielded - 1, requests, of_pass.draft_s)
        found += [request for request, is_done in zip(requests, done.tolist(), strict=True) if is_done]
    return found


def _confirm_tokens(
    rows: Rows, indices: Int64Array, yielded: Int64Array, outputs: StepOutputs, active: ActiveRequests
) -> tuple[Int64Array, BoolArray]:
    """Store the first `yielded` tokens of each of `rows`, at most up to the one that ends its request. Returns how many
    were stored, and which requests end. indices: [rows], index of each row's output in `outputs`."""
    table = active.table
    before = table.confirmed[rows]
    yielded = np.minimum(yielded, table.stop_after[rows] - before)
    done = before + yielded == table.stop_after[rows]
    if outputs.tokens is not None:
        tokens = outputs.tokens[indices]
        places = np.arange(tokens.shape[1])
        if table.any_end_tokens:
            ends = (tokens[:, :, None] == table.end_tokens[rows][:, None, :]).any(axis=2) & (places < yielded[:, None])
            is_ended = ends.any(axis=1)
            yielded = np.where(is_ended, ends.argmax(axis=1) + 1, yielded)
            done |= is_ended
        is_valid = places < yielded[:, None]
        columns = (table.joined[rows] + before)[:, None] + places
        table.write_outputs(np.repeat(rows, yielded), columns[is_valid], tokens[is_valid])
    table.confirmed[rows] = before + yielded
    for place in np.flatnonzero(table.is_special[rows]).tolist():
        request, index, row = active.by_slot[int(rows[place])], int(indices[place]), int(rows[place])
        for step in range(int(yielded[place])):
            table.confirmed[row] = before[place] + step + 1
            position = request.num_outputs - 1
            if request.numbers is not None:
                if outputs.log_probs is not None:
                    request.numbers.add_log_prob(position, float(outputs.log_probs[index, step]))
                if (logits := outputs.generation_logits.get(index)) is not None:
                    request.numbers.add_generation(position, logits[step : step + 1])
            if request.stop.stop_sequences and outputs.tokens is not None and _ends_with_stop_sequence(request):
                yielded[place], done[place] = step + 1, True
                break
    # Nothing of these requests is in flight any more.
    table.generated[rows] = table.confirmed[rows]
    return yielded, done


def _confirm_special(
    rows: Rows, indices: Int64Array, done: BoolArray, outputs: StepOutputs, active: ActiveRequests
) -> None:
    """Confirm the special requests among `rows`; `done` becomes true for those that end.

    indices: [rows], index of each row's output in `outputs`."""
    for place in np.flatnonzero(active.table.is_special[rows]).tolist():
        request, index = active.by_slot[int(rows[place])], int(indices[place])
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
                done[place] = search.advance(
                    candidates.tokens[index],
                    candidates.beams[index],
                    candidates.scores[index],
                    is_last=bool(done[place]),
                )
        elif request.stop.stop_sequences and outputs.tokens is not None:
            done[place] |= _ends_with_stop_sequence(request)


def _ends_with_stop_sequence(request: Request) -> bool:
    """Whether the newest output tokens are a stop sequence of the request. The prompt is never part of a match."""
    assert request.table is not None
    num_outputs = request.num_outputs
    longest = max(map(len, request.stop.stop_sequences))
    tail = tuple(request.table.outputs(request.slot, max(0, num_outputs - longest), num_outputs).tolist())
    return any(tail[-len(sequence) :] == sequence for sequence in request.stop.stop_sequences)


# Responses.


class Response:
    """Tokens of one request, or an error.

    A streaming request gets a response with its new tokens in each iteration that yields some; others get one response
    with all tokens at the end. Exactly one response of a request is final, and an error is always final.
    With several beams, a streamed response has all beams so far as a whole, which replace those of the response before.

    tokens: the output of each beam, best first, without the prompt; empty from executors without a model.
    log_probs, generation_logits: of the same tokens, if asked for; [output tokens] and [output tokens, vocabulary].
    cumulative_log_probs: [beams], of all output tokens so far, if log-probabilities were asked for.
    context_logits: [prompt length, vocabulary], in the final response, if asked for.
    """

    def __init__(
        self,
        request: Request,
        is_final: bool,
        tokens: tuple[IntArray, ...] = (),
        log_probs: tuple[FloatArray, ...] = (),
        cumulative_log_probs: FloatArray | None = None,
        context_logits: FloatArray | None = None,
        generation_logits: tuple[FloatArray, ...] = (),
        error: str | None = None,
    ) -> None:
        self.request, self.is_final, self.error = request, is_final, error
        self.tokens, self.log_probs, self.cumulative_log_probs = tokens, log_probs, cumulative_log_probs
        self.context_logits, self.generation_logits = context_logits, generation_logits

    @property
    def output_tokens(self) -> IntArray | None:
        """The output of the best beam; None from executors without a model."""
        return self.tokens[0] if self.tokens else None


def response_of(request: Request, is_final: bool) -> Response:
    """The response with the new tokens of `request`. To be made before its row is returned."""
    assert request.table is not None
    if not request.table.makes_tokens:
        return Response(request, is_final)
    if request.search is not None:
        return _beam_response(request, request.search, is_final)
    sent = request.num_sent
    tokens = request.table.outputs(request.slot, sent, max(sent, request.num_outputs))
    numbers, options = request.numbers, request.options
    if numbers is None:
        return Response(request, is_final, (tokens,))
    logits = numbers.generation_logits(sent)
    return Response(
        request,
        is_final,
        (tokens,),
        log_probs=(numbers.log_probs(sent),) if options.return_log_probs else (),
        cumulative_log_probs=np.array([numbers.cumulative_log_prob], np.float32) if options.return_log_probs else None,
        context_logits=numbers.context_logits if is_final else None,
        generation_logits=() if logits is None else (logits,),
    )


def streamed(iteration: InFlightIteration, active: ActiveRequests) -> Iterator[Response]:
    """The new tokens of `iteration` of streaming requests that it did not complete."""
    last = {request.slot for request in iteration.record.finished} | iteration.dropped
    rows = iteration.output_rows
    for row in rows[active.table.is_special[rows]].tolist():
        if row in last or not (request := active.by_slot[row]).options.streaming:
            continue
        if request.num_outputs > request.num_sent:
            response = response_of(request, is_final=False)
            request.num_sent = request.num_outputs
            yield response


def _beam_response(request: Request, search: BeamSearch, is_final: bool) -> Response:
    beams, numbers = search.final(), request.numbers
    asked = request.options.return_log_probs
    logits = [None if numbers is None else numbers.generation_logits(path=beam.path) for beam in beams]
    return Response(
        request,
        is_final,
        tuple(beam.tokens for beam in beams),
        log_probs=tuple(beam.log_probs for beam in beams) if asked else (),
        cumulative_log_probs=np.array([beam.cumulative_log_prob for beam in beams], np.float32) if asked else None,
        context_logits=numbers.context_logits if numbers is not None and is_final else None,
        generation_logits=tuple(item for item in logits if item is not None),
    )


# Reuse of generated blocks.


def store_generated(active: ActiveRequests, kv_cache: KvCache, rows: Rows, computed: Rows) -> None:
    """Make the blocks that the generation requests in `rows` had filled before their latest step findable.

    The block that iteration i fills is stored when iteration i + 1 is submitted: after its scheduling and after its new
    sequences have looked for blocks, and without the token of iteration i + 1 (engine.md 9.2). That step is counted in
    `generated` already. computed: [requests], tokens of each that were computed before it."""
    # With drafts a step may have filled a block and begun the next one; storing a block again changes nothing.
    filled = np.flatnonzero(computed % kv_cache.attention_window.tokens_per_block <= active.table.max_draft_tokens)
    for row, num_tokens in zip(rows[filled].tolist(), computed[filled].tolist(), strict=True):
        store_known(active.by_slot[row], kv_cache, num_tokens)


def store_known(request: Request, kv_cache: KvCache, num_tokens: int) -> None:
    """Make the full blocks of the first `num_tokens` tokens of a generation request findable, as far as it has one
    beam and its tokens are known."""
    if request.beam_width == 1:
        kv_cache.store_generated(request.slot, min(num_tokens, request.num_known_tokens))
