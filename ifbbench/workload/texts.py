"""Texts of prompts and answers as token ids, or as lengths by a rule."""

from math import ceil
from typing import TYPE_CHECKING, Any

from ifbbench.errors import InputError
from ifbbench.settings.fields import shown, text, unexpected
from ifbbench.workload.formats import ReadOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PromptTexts:
    """Measures texts: with the tokenizer of the options, else as characters / `characters_per_token`, rounded up."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
        self._has_measured = False

    def prompt(self, value: Any, name: str) -> tuple[int, tuple[int, ...] | None]:
        """The length of the prompt `value`, the field `name`, and its token ids if there is a tokenizer."""
        if not isinstance(value, str) or not value:
            raise unexpected(name, value, "a text")
        if self._tokenizer is None:
            return self.length(value), None
        ids = tuple(encoded(self._tokenizer, value, add_special_tokens=True))
        if not ids:
            raise InputError(f"{name} is {shown(value)}; expected a text of at least one token.")
        return len(ids), ids

    def output_len(self, value: Any, name: str) -> int:
        """The number of tokens of the answer `value`, the field `name`."""
        return max(self.length(text(value, name)), 1)

    def length(self, value: str) -> int:
        """The number of tokens of a text."""
        self._has_measured = True
        if self._tokenizer is None:
            return max(ceil(len(value) / self._options.characters_per_token), 1)
        return len(encoded(self._tokenizer, value, add_special_tokens=False))

    def notes(self) -> list[str]:
        """The rule, if a text was measured by it."""
        if not self._has_measured or self._tokenizer is not None:
            return []
        return [
            f"texts are counted as one token for each {self._options.characters_per_token:g} characters "
            "(--characters_per_token), and no prefix is shared; --tokenizer FILE gives token ids"
        ]


def encoded(tokenizer: "Tokenizer", text: str, add_special_tokens: bool) -> list[int]:
    """The token ids of a text. InputError if it cannot be tokenized."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except Exception as error:  # for a lone surrogate, or where the vocabulary has no token for what it does not know
        raise InputError(f"the text {shown(text)} cannot be tokenized ({str(error)[:100]}).") from None
    return ids


def load_tokenizer(path: str) -> "Tokenizer":
    """The tokenizer of a tokenizer.json. InputError if it cannot be read."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("--tokenizer needs the package tokenizers. Run `pip install ifbbench[text]`.") from error
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the package raises no narrower class
        raise InputError(f"--tokenizer {path}: cannot be read ({str(error)[:200]}). Give a tokenizer.json.") from error


# Chats.


def chat_text(messages: Any, name: str) -> str:
    """A chat as one text: of each message its role, a line break, its content and a line break.

    messages: objects with `role` and `content`, a text or a list of parts of which those with `text` count.
    """
    if not isinstance(messages, list) or not messages:
        raise unexpected(name, messages, "a list of at least one message")
    joined = []
    for position, message in enumerate(messages):
        where = f"{name}[{position}]"
        if not isinstance(message, dict):
            raise unexpected(where, message, "an object with role and content")
        role = text(message.get("role"), f"{where}.role")
        joined.append(f"{role}\n{content_text(message.get('content'), f'{where}.content')}\n")
    return "".join(joined)


def content_text(content: Any, name: str) -> str:
    """The content of a message: a text, or the texts of a list of parts; empty for none (a call of a tool)."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str):
        raise unexpected(name, content, "a text or a list of parts")
    return content
