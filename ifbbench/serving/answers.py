"""Answers in the OpenAI API: choices as their tokens come, as one object or as server-sent events."""

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ifbbench.errors import IfbbenchError
from ifbbench.serving.protocol import ChatRequest, CompletionRequest, Generating
from ifbbench.serving.service import Generation
from ifbbench.serving.texts import GrowingText, Tokenizer

encode = msgspec.json.Encoder().encode
END_OF_EVENTS = b"data: [DONE]\n\n"


class GenerationFailed(IfbbenchError):
    """The engine ended a request with an error."""


@dataclass(slots=True)
class LogProb:
    """The log-probability of one token, and of the most likely ones, (text, log-probability)."""

    token: str
    log_prob: float
    top: list[tuple[str, float]]


@dataclass(slots=True)
class Part:
    """What is new of a choice. finish_reason: set in its last part."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[LogProb] = field(default_factory=list)
    finish_reason: str | None = None


class Choice:
    """One answer to a prompt, as the tokens of its generation come. max_new_tokens: of which it can have no more."""

    def __init__(
        self, index: int, generation: Generation, tokenizer: Tokenizer, stops: Sequence[str], max_new_tokens: int,
        top_log_probs: int,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.num_tokens = 0
        self.is_done = False
        self._index = index
        self._tokenizer = tokenizer
        self._text = GrowingText(tokenizer, stops)
        self._max_new_tokens = max_new_tokens
        self._top = top_log_probs

    def advance(self) -> list[Part]:
        """What is new: at most one part, but one of each beam after a beam search. GenerationFailed if there is an
        error instead."""
        if self.is_done:
            return []
        new, is_final = self.generation.take(), self.generation.is_done
        if self.generation.error:
            self.is_done = True
            raise GenerationFailed(self.generation.error)
        if new and new[-1].beams:
            self.is_done = True
            return self._beams(new[-1].beams)
        part = Part(self._index)
        stop_ids = self.generation.request.stop_ids
        for tokens in new:
            part.ids += tokens.ids
            if tokens.log_probs:
                part.log_probs += self._log_probs(tokens.ids, tokens.log_probs, tokens.logits)
        self.num_tokens += len(part.ids)
        ends_with_token = is_final and bool(part.ids) and part.ids[-1] in stop_ids
        part.text = self._text.add(part.ids[:-1] if ends_with_token else part.ids)
        if is_final and not self._text.stopped:
            part.text += self._text.end()
        if is_final or self._text.stopped:
            self.is_done = True
            is_full = self.num_tokens >= self._max_new_tokens and not ends_with_token and not self._text.stopped
            part.finish_reason = "length" if is_full else "stop"
        return [part] if new or self.is_done else []

    def _beams(self, beams: list[tuple[list[int], list[float]]]) -> list[Part]:
        parts = []
        for number, (ids, numbers) in enumerate(beams):
            log_probs = self._log_probs(ids, numbers, None) if numbers else []
            reason = "length" if len(ids) >= self._max_new_tokens else "stop"
            self.num_tokens += len(ids)
            parts.append(Part(self._index + number, self._tokenizer.decode(ids), ids, log_probs, reason))
        return parts

    def _log_probs(self, ids: list[int], numbers: list[float], logits: Any) -> list[LogProb]:
        """logits: [1, tokens, vocabulary], for the most likely tokens."""
        decode = self._tokenizer.decode
        found = [LogProb(decode([one]), number, []) for one, number in zip(ids, numbers, strict=False)]
        if logits is not None and self._top:
            rows = logits[0, : len(found)].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            for row, one in zip(rows, found, strict=True):
                best = np.argpartition(row, -self._top)[-self._top :]
                order = best[np.argsort(-row[best], kind="stable")]
                one.top = [(decode([token]), float(row[token])) for token in order.tolist()]
        return found


class Answer:
    """The answer to one HTTP request.

    choices: of all prompts, in order. prompt_tokens: of all prompts. echoes: the prompt of each choice, to begin with.
    stop(generations): ends them early.
    """

    def __init__(
        self, body: Generating, model: str, created: int, choices: Sequence[Choice], prompt_tokens: int,
        echoes: Sequence[str], stop: Callable[[Sequence[Generation]], None],
    ) -> None:  # fmt: skip
        self.generations = [choice.generation for choice in choices]
        self._body = body
        self._is_chat = isinstance(body, ChatRequest)
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._echoes = echoes
        self._stop = stop
        self._offsets: dict[int, int] = {}
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": created, "model": model}

    async def complete(self) -> dict[str, Any]:
        """The whole answer as one object. GenerationFailed if the engine fails."""
        wholes: dict[int, Part] = {}
        async for parts in self._parts():
            for part in parts:
                whole = wholes.setdefault(part.index, Part(part.index))
                whole.text += part.text
                whole.ids += part.ids
                whole.log_probs += part.log_probs
                whole.finish_reason = part.finish_reason
        choices = [self._choice(wholes[index], is_chunk=False) for index in sorted(wholes)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; those that are due at the same time are joined."""
        options = self._body.stream_options
        has_usage = bool(options and options.continuous_usage_stats)
        if self._is_chat:
            self._head["object"] = "chat.completion.chunk"
            first = [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                     for index in range(len(self._choices))]  # fmt: skip
            yield b"".join(self._event([choice], has_usage) for choice in first)
        try:
            async for parts in self._parts():
                yield b"".join(self._event([self._choice(part, is_chunk=True)], has_usage) for part in parts)
        except GenerationFailed as error:
            yield b"data: " + encode({"error": error_object(str(error), "server_error", 500)}) + b"\n\n"
        else:
            if options and options.include_usage:
                yield self._event([], has_usage=True)
        yield END_OF_EVENTS

    async def _parts(self) -> AsyncIterator[list[Part]]:
        """What is new of any choice, until all are done."""
        changed = self.generations[0].changed
        while True:
            changed.clear()
            parts = [part for choice in self._choices for part in choice.advance()]
            if early := [one.generation for one in self._choices if one.is_done and not one.generation.is_done]:
                self._stop(early)
            if parts:
                yield parts
            if all(choice.is_done for choice in self._choices):
                return
            await changed.wait()

    def _event(self, choices: list[dict[str, Any]], has_usage: bool) -> bytes:
        chunk = {**self._head, "choices": choices}
        if has_usage:
            chunk["usage"] = self._usage()
        return b"data: " + encode(chunk) + b"\n\n"

    def _usage(self) -> dict[str, int]:
        outputs = sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": outputs,
                "total_tokens": self._prompt_tokens + outputs}  # fmt: skip

    def _choice(self, part: Part, is_chunk: bool) -> dict[str, Any]:
        asked = self._body.top_log_probs is not None
        choice: dict[str, Any] = {"index": part.index, "finish_reason": part.finish_reason}
        if self._is_chat:
            choice["logprobs"] = {"content": [_chat_log_prob(one) for one in part.log_probs]} if asked else None
            text = {"content": part.text}
            choice |= {"delta": text} if is_chunk else {"message": {"role": "assistant", **text}}
        else:
            is_first = part.index not in self._offsets
            echo = self._echoes[part.index] if is_first and self._echoes else ""
            start = self._offsets.setdefault(part.index, 0) + len(echo)
            choice["text"] = echo + part.text
            choice["logprobs"] = _completion_log_probs(part.log_probs, start) if asked else None
            self._offsets[part.index] = start + len(part.text)
        if self._body.return_token_ids:
            choice["token_ids"] = part.ids
        return choice


def _completion_log_probs(log_probs: list[LogProb], start: int) -> dict[str, Any]:
    offsets = np.cumsum([start, *(len(one.token) for one in log_probs)])[:-1].tolist()
    return {
        "tokens": [one.token for one in log_probs],
        "token_logprobs": [one.log_prob for one in log_probs],
        "top_logprobs": [dict(one.top or [(one.token, one.log_prob)]) for one in log_probs],
        "text_offset": offsets,
    }


def _chat_log_prob(one: LogProb) -> dict[str, Any]:
    top = [{"token": text, "logprob": number, "bytes": list(text.encode())} for text, number in one.top]
    return {"token": one.token, "logprob": one.log_prob, "bytes": list(one.token.encode()), "top_logprobs": top}


def error_object(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    """The value of `error` in a response."""
    return {"message": message, "type": kind, "param": param, "code": code}


def echoes_of(body: Generating, prompts: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of the prompt of each choice if `body` wants it in the answer; else none."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return []
    texts = [body.prompt] if isinstance(body.prompt, str) else [tokenizer.decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(body.num_choices)]
