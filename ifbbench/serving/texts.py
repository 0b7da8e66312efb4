"""Texts of prompts and answers: the model's tokenizer or bytes, chat templates, and texts that grow token by token."""

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from ifbbench.errors import InputError
from ifbbench.models.named_models import TOKENIZER_FILE, load_tokenizer, weights_path
from ifbbench.workload.texts import chat_text, content_text

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The beginning of a character of UTF-8 has at most so many bytes, and so many tokens; a longer end is not one.
MAX_INCOMPLETE = 3
SAMPLE_TEXT = (
    "This is synthetic text from a simulated device. It computes no tokens; it takes the time that a model would take "
    "to make as many of them. "
)


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """For a model without a tokenizer: the token ids of a text are the bytes of its UTF-8 form.

    An id above 255, which a text does not have, is decoded as a letter, so that the text of random weights has a
    character for each token.

    vocab_size: vocabulary of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        content = text.encode(errors="replace")
        return list(content) if self._vocab_size > 255 else [byte % self._vocab_size for byte in content]

    def decode(self, ids: Sequence[int]) -> str:
        content = bytes(one if 0 <= one < 256 else ord("a") + one % 26 for one in ids)
        return content.decode(errors="replace")


class Texts:
    """The tokenizer and the chat template of a model.

    model: value of --model.
    vocab_size: vocabulary of the model.

    Without a tokenizer texts are bytes, and `has_tokenizer` is false.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        path = weights_path(model)
        self.has_tokenizer = path is not None and (path.is_file() or (path / TOKENIZER_FILE).is_file())
        self.tokenizer: Tokenizer = load_tokenizer(model) if self.has_tokenizer else ByteTokenizer(vocab_size)
        self._template = ChatTemplate.of(path) if path is not None and path.is_dir() else None

    def encode(self, text: str) -> list[int]:
        """The prompt `text` as token ids. InputError if it has none."""
        ids = self.tokenizer.encode(text)
        if not ids:
            raise InputError("the prompt is empty; expected at least one token.")
        return ids

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """A chat as token ids, up to where the answer begins: by the model's template, else role and content in lines
        of their own."""
        text = chat_text(messages, "messages")
        if self._template is None:
            return self.encode(text + "assistant\n")
        plain = [{**one, "content": content_text(one.get("content"), "content")} for one in messages]
        return self.tokenizer.encode(self._template.render(plain), add_special_tokens=False)

    def stop_sequence(self, text: str) -> list[int]:
        """The token ids of a stop text where it begins a token."""
        return self.tokenizer.encode(text, add_special_tokens=False)


class ChatTemplate:
    """The Jinja template of a Hugging Face model."""

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(template)
        except Exception as error:  # of a syntax error, and of what is evaluated beforehand
            raise InputError(
                f"the model's chat template cannot be read: {type(error).__name__}: {str(error)[:200]}. "
                "Download the model's files again."
            ) from error
        self._special_tokens = special_tokens

    @classmethod
    def of(cls, directory: Path) -> "ChatTemplate | None":
        """The tokenizer of a model directory, None if it has none."""
        path = directory / "tokenizer_config.json"
        try:
            config = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
            file = directory / "chat_template.jinja"
            template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
            if isinstance(template, list):  # several, by name
                template = next((one.get("template") for one in template if one.get("name") == "default"), None)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Download the file again.") from error
        if not isinstance(template, str):
            return None
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        texts = {name: one.get("content", "") if isinstance(one, dict) else one for name, one in tokens.items()}
        return cls(template, {name: text for name, text in texts.items() if isinstance(text, str)})

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The text of a chat, up to where the answer begins. InputError if the template does not take it."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except InputError:
            raise
        except Exception as error:  # a template is a program, which may raise anything
            raise InputError(f"messages: the model's chat template does not take them ({str(error)[:200]}).") from None


def _raise(message: str) -> None:
    raise InputError(f"messages: {message}")


class GrowingText:
    """The text of tokens that come one after another. Characters of several tokens are held back until complete, and
    so is what may be the beginning of a stop text.

    stops: texts that end it, which are not part of it.
    stop: the one that was found first; None before.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.stop: str | None = None
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        # Tokens before `_start` are done; those from there to `_read` are decoded again for the spaces between tokens.
        self._start = self._read = 0
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that is new with these tokens."""
        self._ids.extend(ids)
        decode, end = self._tokenizer.decode, self._complete_end()
        if end <= self._read:
            return ""
        before, text = decode(self._ids[self._start : self._read]), decode(self._ids[self._start : end])
        self._start, self._read = self._read, end
        return self._until_stop(text[len(before) :])

    def _complete_end(self) -> int:
        """The number of tokens without those at the end that may be the beginning of a character."""
        end = len(self._ids)
        for shorter in range(end, max(end - MAX_INCOMPLETE, self._start) - 1, -1):
            if not self._tokenizer.decode(self._ids[self._start : shorter]).endswith(REPLACEMENT):
                return shorter
        return end

    def end(self) -> str:
        """The rest of the text, when there are no more tokens."""
        if self.stop is not None:
            return ""
        text = self._tokenizer.decode(self._ids[self._start :])
        rest = text[len(self._tokenizer.decode(self._ids[self._start : self._read])) :]
        self._start = self._read = len(self._ids)
        new = self._until_stop(rest)
        return new + self._held if self.stop is None else new

    def _until_stop(self, new: str) -> str:
        if self.stop is not None:
            return ""
        if not self._stops:
            return new
        text = self._held + new
        found = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            position, self.stop = min(found, key=itemgetter(0))
            return text[:position]
        held = max((_common(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _common(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
