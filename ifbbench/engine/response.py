"""What goes back to the client."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.request import Request
from ifbbench.engine.request_table import IntArray

FloatArray = NDArray[np.float32]


class Response(NamedTuple):
    """Tokens of one request, or an error.

    A streaming request gets a response with its new tokens in each iteration that makes some; others get one with all
    of them at the end. Exactly one response of a request is final, and an error always is.

    tokens: the output of each beam, best first, the prompt left out; empty from executors that make no tokens.
    log_probs, generation_logits: of the same tokens, where asked for; [output tokens] and [output tokens, vocabulary].
    cumulative_log_probs: [beams], of all output tokens so far, where log-probabilities were asked for.
    context_logits: [prompt length, vocabulary], in the final response, where asked for.
    """

    request: Request
    is_final: bool
    tokens: tuple[IntArray, ...] = ()
    log_probs: tuple[FloatArray, ...] = ()
    cumulative_log_probs: FloatArray | None = None
    context_logits: FloatArray | None = None
    generation_logits: tuple[FloatArray, ...] = ()
    error: str | None = None

    @property
    def output_tokens(self) -> IntArray | None:
        """The output of the best beam; None from executors that make no tokens."""
        return self.tokens[0] if self.tokens else None


def response_of(request: Request, is_final: bool) -> Response:
    """The response that `request` has coming now, built before its row is given back."""
    if request.search is not None:
        return _beam_response(request)
    assert request.table is not None
    sent = request.num_sent
    tokens = request.table.outputs(request.slot, sent, max(sent, request.num_outputs))
    numbers, options = request.numbers, request.options
    if numbers is None:
        return Response(request, is_final, (tokens,))
    logits = numbers.generation_logits(sent)
    return Response(
        request, is_final, (tokens,),
        log_probs=(numbers.log_probs(sent),) if options.return_log_probs else (),
        cumulative_log_probs=np.array([numbers.cumulative_log_prob], np.float32) if options.return_log_probs else None,
        context_logits=numbers.context_logits if is_final else None,
        generation_logits=() if logits is None else (logits,),
    )  # fmt: skip


def _beam_response(request: Request) -> Response:
    assert request.search is not None
    beams = request.search.final()
    numbers = request.numbers
    asked = request.options.return_log_probs
    logits = [None if numbers is None else numbers.generation_logits(path=beam.path) for beam in beams]
    return Response(
        request, True, tuple(beam.tokens for beam in beams),
        log_probs=tuple(beam.log_probs for beam in beams) if asked else (),
        cumulative_log_probs=np.array([beam.cumulative_log_prob for beam in beams], np.float32) if asked else None,
        context_logits=None if numbers is None else numbers.context_logits,
        generation_logits=tuple(item for item in logits if item is not None),
    )  # fmt: skip
