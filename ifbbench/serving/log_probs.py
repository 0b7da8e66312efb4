"""Log-probabilities of tokens, from the logits of the model, and their forms in answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.arrays import FloatArray
from ifbbench.serving.texts import Tokenizer


class Likely(NamedTuple):
    """One of the most likely tokens at a place."""

    id: int
    text: str
    log_prob: float


@dataclass(slots=True)
class LogProb:
    """The log-probability of the token at one position.

    log_prob: None for the first token of a prompt, which follows none.
    top: the most likely tokens there, in order.
    rank: among all tokens, 1 for the most likely; for prompts only.
    """

    id: int
    text: str
    log_prob: float | None
    top: list[Likely]
    rank: int = 1


def of_outputs(
    ids: Sequence[int], numbers: Sequence[float], logits: FloatArray | None, top: int, tokenizer: Tokenizer
) -> list[LogProb]:
    """Output tokens with these log-probabilities. logits: [tokens, vocabulary], for the `top` most likely tokens."""
    found = [LogProb(one, tokenizer.decode([one]), number, []) for one, number in zip(ids, numbers, strict=False)]
    if logits is not None and top:
        for one, row in zip(found, _normalized(logits), strict=False):
            one.top = _most_likely(row, top, tokenizer)
    return found


def of_prompt(ids: Sequence[int], logits: FloatArray | None, top: int, tokenizer: Tokenizer) -> list[LogProb]:
    """The tokens of a prompt. logits: [tokens, vocabulary]; None on a simulated device, where each token is
    certain."""
    found = [LogProb(one, tokenizer.decode([one]), None if index == 0 else 0.0, []) for index, one in enumerate(ids)]
    if logits is not None:
        for one, row in zip(found[1:], _normalized(logits), strict=False):
            one.log_prob = float(row[one.id])
            one.rank = 1 + int((row > row[one.id]).sum())
            one.top = _most_likely(row, top, tokenizer)
    return found


def _normalized(logits: FloatArray) -> Iterator[NDArray[np.float64]]:
    """The log-probabilities of all tokens, place by place: those of a long prompt take gigabytes."""
    for row in logits:
        shifted = row.astype(np.float64) - row.max()
        yield shifted - np.log(np.exp(shifted).sum())


def _most_likely(row: NDArray[np.float64], count: int, tokenizer: Tokenizer) -> list[Likely]:
    if not count:
        return []
    best = np.argpartition(row, -count)[-count:]
    order = best[np.argsort(-row[best], kind="stable")]
    return [Likely(token, tokenizer.decode([token]), float(row[token])) for token in order.tolist()]


# Forms in answers.


def completion_form(log_probs: Sequence[LogProb], start: int) -> dict[str, Any]:
    """The form of text completions. start: position of the first token in the text."""
    offsets = np.cumsum([start, *(len(one.text) for one in log_probs)])[:-1].tolist()
    return {
        "tokens": [one.text for one in log_probs],
        "token_logprobs": [one.log_prob for one in log_probs],
        "top_logprobs": [
            None if one.log_prob is None else {text: number for _, text, number in one.top} | {one.text: one.log_prob}
            for one in log_probs
        ],
        "text_offset": offsets,
    }


def chat_form(log_probs: Sequence[LogProb]) -> dict[str, Any]:
    """The form of chats."""
    return {
        "content": [
            _of_chat(one.text, one.log_prob) | {"top_logprobs": [_of_chat(text, number) for _, text, number in one.top]}
            for one in log_probs
        ]
    }


def _of_chat(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


def prompt_form(log_probs: Sequence[LogProb]) -> list[dict[str, Any] | None]:
    """The form of vLLM's `prompt_logprobs`: by token id, the token itself and the most likely ones."""
    answers: list[dict[str, Any] | None] = []
    for one in log_probs:
        ranked = [(rank, *likely) for rank, likely in enumerate(one.top, 1)]
        known = [(one.rank, one.id, one.text, one.log_prob), *ranked]
        answers.append(
            None
            if one.log_prob is None
            else {
                str(token): {"logprob": number, "rank": rank, "decoded_token": text}
                for rank, token, text, number in known
            }
        )
    return answers
