"""Answers in the OpenAI API: choices as their tokens come, as one object or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ifbbench.errors import IfbbenchError
from ifbbench.serving.log_probs import LogProb, chat_form, completion_form, of_outputs, of_prompt, prompt_form
from ifbbench.serving.protocol import ChatRequest, CompletionRequest, Generating
from ifbbench.serving.service import Generation
from ifbbench.serving.texts import GrowingText, Tokenizer

encode = msgspec.json.Encoder().encode
END_OF_EVENTS = b"data: [DONE]\n\n"


class GenerationFailed(IfbbenchError):
    """The engine ended a request with an error."""


@dataclass(slots=True)
class Part:
    """What is new of a choice.

    finish_reason: why the choice has ended, in its last part.
    stop_reason: stop text, or stop token of the client, that ended it.
    restarts: number of restarts of its generation; parts with fewer do not count.
    """

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[LogProb] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    restarts: int = 0


class Choice:
    """One answer to a prompt, as the tokens of its generation come.

    max_new_tokens: maximum number of its tokens; with 0, the token that the engine makes is dropped.
    """

    def __init__(
        self, index: int, generation: Generation, tokenizer: Tokenizer, body: Generating, max_new_tokens: int
    ) -> None:
        self.generation = generation
        self.num_tokens = 0
        self.is_done = False
        self.index = index
        self._tokenizer = tokenizer
        self._text, self._stops, self._restarts = GrowingText(tokenizer, body.stops), body.stops, 0
        self._stop_token_ids = body.stop_token_ids or ()
        self._max_new_tokens = max_new_tokens
        self._top = body.top_log_probs or 0

    def advance(self) -> list[Part]:
        """What is new: at most one part, but one of each beam after a beam search. GenerationFailed if there is an
        error instead."""
        if self.is_done:
            return []
        if self.generation.restarts > self._restarts:
            self._restarts, self.num_tokens = self.generation.restarts, 0
            self._text = GrowingText(self._tokenizer, self._stops)
        new, is_final = self.generation.take(), self.generation.is_done
        if not self._max_new_tokens:
            new = []
        if self.generation.error:
            self.is_done = True
            raise GenerationFailed(self.generation.error)
        if new and new[-1].beams:
            self.is_done = True
            return self._beams(new[-1].beams)
        part = Part(self.index, restarts=self._restarts)
        stop_ids = self.generation.request.stop_ids
        for tokens in new:
            part.ids += tokens.ids
            if tokens.log_probs:
                logits = None if tokens.logits is None else tokens.logits[0]
                part.log_probs += of_outputs(tokens.ids, tokens.log_probs, logits, self._top, self._tokenizer)
        self.num_tokens += len(part.ids)
        ends_with_token = is_final and bool(part.ids) and part.ids[-1] in stop_ids
        part.text = self._text.add(part.ids[:-1] if ends_with_token else part.ids)
        if is_final:
            part.text += self._text.end()
        self.is_done = is_final or self._text.stop is not None
        if self.is_done:
            is_full = self.num_tokens >= self._max_new_tokens
            is_stopped = ends_with_token or self._text.stop is not None
            part.finish_reason = "length" if is_full and not is_stopped else "stop"
            part.stop_reason = self._text.stop
            if ends_with_token and self._text.stop is None and part.ids[-1] in self._stop_token_ids:
                part.stop_reason = part.ids[-1]
        return [part] if new or self.is_done else []

    def _beams(self, beams: list[tuple[list[int], list[float]]]) -> list[Part]:
        parts = []
        for number, (ids, numbers) in enumerate(beams):
            log_probs = of_outputs(ids, numbers, None, 0, self._tokenizer) if numbers else []
            reason = "length" if len(ids) >= self._max_new_tokens else "stop"
            self.num_tokens += len(ids)
            parts.append(Part(self.index + number, self._tokenizer.decode(ids), ids, log_probs, reason))
        return parts

    def prompt_log_probs(self, top: int) -> list[LogProb]:
        """The log-probabilities of the prompt, after the final response, and of the `top` most likely tokens."""
        tokens = self.generation.request.input_ids
        return of_prompt(list(tokens), self.generation.context_logits, top, self._tokenizer)


class Answer:
    """The answer to one HTTP request.

    request_id: last part of its id.
    choices: choices of all prompts, in order.
    prompt_tokens: number of tokens of all prompts.
    echoes: prompt of each choice, if answers begin with it.
    stop(generations): ends them early.
    on_complete(n, outputs): is called with the choices of a prompt and, of each prompt, the most output tokens that one
        of them has.
    """

    def __init__(
        self,
        body: Generating,
        model: str,
        request_id: str,
        created: int,
        choices: Sequence[Choice],
        prompt_tokens: int,
        echoes: Sequence[str],
        stop: Callable[[Sequence[Generation]], None],
        on_complete: Callable[[int, list[int]], None],
    ) -> None:
        self.generations = [choice.generation for choice in choices]
        self._body = body
        self._is_chat = isinstance(body, ChatRequest)
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._echoes = echoes
        self._stop, self._on_complete = stop, on_complete
        self._offsets: dict[int, int] = {}
        # By the index of the choice, if they were asked for.
        self._prompt_log_probs: dict[int, list[LogProb]] = {}
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "object": kind, "created": created, "model": model}

    async def complete(self) -> dict[str, Any]:
        """The whole answer as one object. GenerationFailed if the engine fails."""
        wholes: dict[int, Part] = {}
        async for parts in self._parts():
            for part in parts:
                whole = wholes.setdefault(part.index, Part(part.index))
                if part.restarts > whole.restarts:
                    whole = wholes[part.index] = Part(part.index, restarts=part.restarts)
                whole.text += part.text
                whole.ids += part.ids
                whole.log_probs += part.log_probs
                whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        for choice in self._choices if self._body.scores_prompt else ():
            await ended(choice.generation)
            top = max(self._body.prompt_logprobs or 0, self._body.top_log_probs or 0)
            scores = await asyncio.to_thread(choice.prompt_log_probs, top)
            beams = range(choice.generation.request.beam_width)
            self._prompt_log_probs |= {choice.index + beam: scores for beam in beams}
        choices = [self._choice(wholes[index], is_chunk=False) for index in sorted(wholes)]
        answer = {**self._head, "choices": choices, "usage": self._usage()}
        if self._is_chat and self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_form(self._prompt_log_probs[0])
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; those that are due at the same time are joined."""
        options = self._body.stream_options
        has_usage = bool(options and options.continuous_usage_stats)
        if self._is_chat:
            self._head["object"] = "chat.completion.chunk"
        begun = set[int]()
        try:
            async for parts in self._parts():
                choices = []
                for part in parts:
                    # The role comes with the first token and not before, because clients take it for the first token.
                    if self._is_chat and part.index not in begun:
                        begun.add(part.index)
                        role = {"role": "assistant", "content": ""}
                        choices.append({"index": part.index, "delta": role, "finish_reason": None})
                    choices.append(self._choice(part, is_chunk=True))
                yield b"".join(self._event([choice], has_usage) for choice in choices)
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
                outputs, number = [one.num_outputs for one in self.generations], self._body.num_prompts
                each = len(outputs) // number
                self._on_complete(
                    self._body.num_choices, [max(outputs[at : at + each]) for at in range(0, len(outputs), each)]
                )
                return
            await changed.wait()

    def _event(self, choices: list[dict[str, Any]], has_usage: bool) -> bytes:
        chunk = {**self._head, "choices": choices}
        if has_usage:
            chunk["usage"] = self._usage()
        return b"data: " + encode(chunk) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        """Token counts. The prompt's cached tokens are those of the first choice of each prompt."""
        outputs = sum(choice.num_tokens for choice in self._choices)
        first_choices = self.generations[:: len(self.generations) // self._body.num_prompts]
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": outputs,
            "total_tokens": self._prompt_tokens + outputs,
            "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in first_choices)},
        }

    def _choice(self, part: Part, is_chunk: bool) -> dict[str, Any]:
        asked = self._body.top_log_probs is not None
        choice: dict[str, Any] = {
            "index": part.index,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._is_chat:
            choice["logprobs"] = chat_form(part.log_probs) if asked else None
            text = {"content": part.text}
            choice |= {"delta": text} if is_chunk else {"message": {"role": "assistant", **text}}
        else:
            is_first = part.index not in self._offsets
            echo = self._echoes[part.index] if is_first and self._echoes else ""
            start = self._offsets.setdefault(part.index, 0)
            scored = self._prompt_log_probs.get(part.index, [])
            choice["text"] = echo + part.text
            if asked and echo:
                choice["logprobs"] = completion_form([*scored, *part.log_probs], 0)
            else:
                choice["logprobs"] = completion_form(part.log_probs, start) if asked else None
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_form(scored)
            self._offsets[part.index] = start + len(echo) + len(part.text)
        if self._body.return_token_ids:
            choice["token_ids"] = part.ids
        return choice


async def ended(generation: Generation) -> None:
    """Wait for the final response, which a choice that a stop text has ended does not. GenerationFailed if it is an
    error."""
    while not generation.is_done:
        generation.changed.clear()
        await generation.changed.wait()
    if generation.error:
        raise GenerationFailed(generation.error)


def error_object(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    """The value of `error` in a response."""
    return {"message": message, "type": kind, "param": param, "code": code}


def echoes_of(body: Generating, prompts: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of the prompt of each choice if `body` wants it in the answer; else none."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return []
    texts = [body.prompt] if isinstance(body.prompt, str) else [tokenizer.decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(body.num_choices)]
