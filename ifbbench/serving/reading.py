"""Reads bodies: what is valid, and the tokens of its prompts. Long bodies are read in another process, because the
interpreter of this one does nothing else while it decodes JSON, whatever its threads are to do."""

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from ifbbench.engine.arrays import IntArray
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.serving.answers import echoes_of, encode
from ifbbench.serving.protocol import (
    Body,
    DetokenizeRequest,
    Generating,
    ServerRequest,
    TokenizeRequest,
    check_supported,
    read_body,
)
from ifbbench.serving.texts import Texts

Result = TypeVar("Result")
START = "from ifbbench.serving.reading import work; work()"


class UnknownModel(InputError):
    """A body names a model that this server does not have."""


class ReadingFailed(IfbbenchError):
    """The process that reads long bodies has ended, perhaps for lack of memory. Another one reads the next."""


@dataclass(frozen=True)
class ReadingRules:
    """What decides whether a body is valid: plain data, which another process can be given.

    model: value of --model.
    vocab_size: vocabulary of the model.
    names: names by which clients may call the model, and its adapters.
    makes_tokens: whether a model runs.
    max_requests: maximum number of requests of one body.
    max_seq_len: maximum length of a sequence of the engine.
    """

    model: str
    vocab_size: int
    names: tuple[str, ...]
    makes_tokens: bool
    max_requests: int
    max_seq_len: int
    ignores_unknown_fields: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a body as token ids.

    echoes: the text of the prompt of each choice, if the answer has it.
    """

    token_ids: list[IntArray]
    echoes: list[str]


class BodyReader:
    """Reads bodies by `rules`."""

    def __init__(self, rules: ReadingRules) -> None:
        self.rules = rules
        self.texts = Texts(rules.model, rules.vocab_size)

    def body(self, content: bytes | bytearray, body_type: type[Body]) -> Body:
        """The body of a request, its prompts not read yet. InputError if it is not valid, or cannot be answered."""
        rules, body = self.rules, read_body(content, body_type, self.rules.ignores_unknown_fields)
        if body.model is not None and body.model not in rules.names:
            raise self.unknown(body.model)
        if isinstance(body, Generating):
            check_supported(body, rules.makes_tokens)
        if body.num_requests > rules.max_requests:
            raise InputError(
                f"prompt: prompts times n are {body.num_requests} requests, and this server takes {rules.max_requests} "
                "at a time (--max_queue_size); send fewer."
            )
        return body

    def unknown(self, name: str) -> UnknownModel:
        """The error for a model of this name."""
        return UnknownModel(f"model: there is no {name[:100]!r}; this server has {', '.join(self.rules.names)}.")

    def prompts(self, body: Generating) -> Prompts:
        """The prompts of `body`. InputError if one is empty."""
        token_ids = body.prompts(self.texts)
        echoes = echoes_of(body, token_ids, self.texts.tokenizer)
        return Prompts([np.array(one, np.int32) for one in token_ids], echoes)

    def answer(self, body: ServerRequest) -> bytes:
        """What /tokenize and /detokenize answer, in vLLM's form."""
        decode = self.texts.tokenizer.decode
        if isinstance(body, DetokenizeRequest):
            return encode({"prompt": decode(body.tokens)})
        assert isinstance(body, TokenizeRequest)
        ids = body.ids(self.texts)
        strings = [decode([one]) for one in ids] if body.return_token_strs else None
        longest = self.rules.max_seq_len
        return encode({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})

    def read(
        self, content: bytes | bytearray, body_type: type[Body], use: "Callable[[BodyReader, Body], Result]"
    ) -> tuple[Body, Result]:
        """A body, and what `use`, a method of this class, makes of it. The body no longer has its prompts, so that it
        is soon sent to another process."""
        body = self.body(content, body_type)
        result = use(self, body)
        body.forget_prompts()
        return body, result


class ReadingProcess:
    """A process with a `BodyReader`. It starts with the first call, and ends with `close()` or with this process."""

    def __init__(self, rules: ReadingRules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def read(
        self, content: bytes | bytearray, body_type: type[Body], use: Callable[[BodyReader, Body], Result]
    ) -> tuple[Body, Result]:
        """`BodyReader.read` in the process, of one body at a time. It waits, so that it is to be called in a thread.
        InputError as there; ReadingFailed if the process has ended."""
        with self._lock:
            if self._is_closed:
                raise ReadingFailed("the server has ended.")
            try:
                connection = self._connection or self._start()
                connection.send((content, body_type, use))
                error, result = connection.recv()
            except (EOFError, OSError):
                self._end()
                raise ReadingFailed(
                    "the process that reads long bodies has ended, perhaps for lack of memory; send a shorter body, or "
                    "this one again."
                ) from None
        if error is not None:
            raise error
        body, found = result
        return body, found

    def close(self) -> None:
        """End the process, whatever it does, and start no other."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        with self._lock:
            self._end()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = ours
        ours.send(self._rules)
        return ours

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None


def work() -> None:
    """Do what the other process asks for, until it closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the server, which ends this process
    connection = Connection(int(sys.argv[1]))
    # The collector would look at the objects of a body again and again while they are made.
    gc.disable()
    with suppress(EOFError, OSError):
        reader = BodyReader(connection.recv())
        while True:
            connection.send(_read(reader, *connection.recv()))
            gc.collect()


def _read(reader: BodyReader, *arguments: Any) -> tuple[InputError | None, Any]:
    """The error of a body, or what was read."""
    try:
        return None, reader.read(*arguments)
    except InputError as error:
        return error, None
