"""A response as named tensors, NumPy arrays on the CPU, under the names of TensorRT-LLM's batch manager."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.in_flight import Response

Tensors = dict[str, NDArray[Any]]


def response_tensors(response: Response) -> Tensors:
    """The tensors of `response`; none with an error.

    output_ids: int32 [1, beams, longest sequence], filled up with the pad id. The prompt comes first, unless the
        request excludes it or streams (a stream has new tokens only).
    sequence_length: int32 [1, beams], how many of each beam's output_ids are real.
    context_logits: float32 [1, prompt length, vocabulary], or zeros [1, 1, 1] where not asked for, and in a stream
        before its end.
    generation_logits: float32 [1, beams, output length, vocabulary], or zeros [1, 1, 1, 1].
    output_log_probs: float32 [1, beams, output length], and cum_log_probs: float32 [1, beams], where asked for.
    """
    if response.error is not None:
        return {}
    sequences = [_sequence(response, tokens) for tokens in response.tokens or (np.zeros(0, np.int32),)]
    context, generation = response.context_logits, response.generation_logits
    tensors: Tensors = {
        "output_ids": _padded(sequences, response.request.options.pad_id),
        "sequence_length": np.array([[len(sequence) for sequence in sequences]], np.int32),
        "context_logits": np.zeros((1, 1, 1), np.float32) if context is None else context[None],
        "generation_logits": _padded(generation) if generation else np.zeros((1, 1, 1, 1), np.float32),
    }
    if response.request.options.return_log_probs:
        cumulative = response.cumulative_log_probs
        tensors["output_log_probs"] = _padded(response.log_probs or (np.zeros(0, np.float32),))
        tensors["cum_log_probs"] = np.zeros((1, 1), np.float32) if cumulative is None else cumulative[None]
    return tensors


def _sequence(response: Response, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    request = response.request
    if request.options.streaming or request.options.exclude_input_from_output or request.prompt_tokens is None:
        return tokens
    return np.concatenate([request.prompt_tokens[: request.original_prompt_len], tokens])


def _padded(rows: Sequence[NDArray[Any]], fill: float = 0) -> NDArray[Any]:
    """[1, rows, longest, …] from arrays [length, …]."""
    padded = np.full((1, len(rows), max(map(len, rows)), *rows[0].shape[1:]), fill, rows[0].dtype)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded
