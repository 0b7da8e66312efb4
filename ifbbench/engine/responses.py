"""Responses: new tokens of a request, or why it failed."""

from collections.abc import Iterator

import numpy as np

from ifbbench.engine.arrays import FloatArray, IntArray
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request, RequestTable


class Response:
    """Tokens of one request, or an error.

    A streaming request gets a response with its new tokens in each iteration that yields some; others get one response
    with all tokens at the end. Exactly one response of a request is final, and an error is always final.
    With several beams, a streamed response has all beams so far as a whole, which replace those of the response before.

    tokens: the output of each beam, best first, without the prompt; empty from executors without a model.
    log_probs, generation_logits: log-probabilities and logits of the same tokens, if asked for; [output tokens] and
        [output tokens, vocabulary].
    cumulative_log_probs: [beams], log-probability of all output tokens so far, if log-probabilities were asked for.
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


def streamed(iteration: InFlightIteration, table: RequestTable) -> Iterator[Response]:
    """The new tokens of `iteration` of streaming requests that it did not complete."""
    last = {request.slot for request in iteration.record.finished} | iteration.dropped
    rows = iteration.output_rows
    for row in rows[table.is_special[rows]].tolist():
        if row in last or not (request := table.requests[row]).options.streaming:
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
