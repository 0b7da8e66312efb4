"""Bodies are read outside the event loop, which answers meanwhile: in a thread, or in a process of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.serving import app as app_module
from ifbbench.serving import reading
from ifbbench.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ServerRequest, TokenizeRequest
from ifbbench.serving.reading import BodyReader, ReadingFailed, ReadingProcess, ReadingRules, UnknownModel
from ifbbench.settings.config import RunConfig
from tests.serving.test_protocol import with_server

RULES = ReadingRules("llama-3.1-8b", 128256, ("m", "lora-0"), False, 100, 131072, False)
LONG = RunConfig(
    device="null", max_queue_size=100, max_seq_len=131072, enable_chunked_context=True, max_input_len=131072
)
VERY_LONG = {"prompt": [123456] * 60_000, "max_tokens": 1}


def posted(client: httpx.AsyncClient, body: Any = VERY_LONG) -> "asyncio.Task[httpx.Response]":
    assert len(json.dumps(body)) > app_module.VERY_LONG_BODY
    return asyncio.create_task(client.post("/v1/completions", json=body))


class Held:
    """Holds the reads of long bodies until they are released. most: the maximum number held at the same time."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.lock, self.now, self.most, self.total = threading.Lock(), 0, 0, 0

    def read(self, content: bytes, *_arguments: Any) -> Any:
        with self.lock:
            self.now, self.total = self.now + 1, self.total + 1
            self.most = max(self.most, self.now)
        self.begun.release()
        assert self.may_end.acquire(timeout=300)
        with self.lock:
            self.now -= 1
        raise InputError("prompt: was read.")

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=300)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    found = Held()
    monkeypatch.setattr(ReadingProcess, "read", lambda _process, *arguments: found.read(*arguments))
    return found


def test_the_server_answers_while_a_long_body_is_read(held: Held) -> None:
    """Also short bodies, and long ones that a thread reads: only one thread waits for the other process."""

    async def use(client: httpx.AsyncClient) -> None:
        tasks = [posted(client) for _ in range(40)]
        for _ in tasks:
            await held.has_begun()
            assert (await client.get("/health")).status_code == 200
            for prompt in ("a", "a" * app_module.LONG_BODY):
                answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
                assert answer.status_code == 200, answer.text
            held.may_end.release()
        answers = await asyncio.gather(*tasks)
        assert {answer.status_code for answer in answers} == {400}
        assert answers[0].json()["error"]["param"] == "prompt"

    with_server(use, LONG)
    assert (held.most, held.total) == (1, 40)


def test_the_bytes_of_all_bodies_are_limited(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(json.dumps(VERY_LONG))
    monkeypatch.setattr(app_module, "MAX_HELD_BYTES", 3 * size)

    async def use(client: httpx.AsyncClient) -> None:
        tasks = [posted(client) for _ in range(3)]
        await held.has_begun()
        refused = await client.post("/v1/completions", json=VERY_LONG)
        while refused.status_code == 400:  # the others were not received yet
            refused = await client.post("/v1/completions", json=VERY_LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "try again later" in refused.json()["error"]["message"]
        for _ in tasks:
            held.may_end.release()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {400}
        # Their bytes do not count any more.
        again = posted(client)
        held.may_end.release()
        assert (await again).status_code == 400

    with_server(use, LONG, max_body_bytes=size)


def test_a_body_whose_client_has_left_is_not_read(held: Held) -> None:
    content = json.dumps(VERY_LONG).encode()

    async def left(app: Any) -> list[Any]:
        """What is sent to a client that leaves once its body is received."""
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        return sent

    async def use(client: httpx.AsyncClient) -> None:
        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        assert (await left(transport.app))[0]["status"] == app_module.CLIENT_LEFT

    with_server(use, LONG)
    assert held.total == 0


def test_where_bodies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones in the event loop, long ones and many prompts in a thread, very long ones not in this process."""
    is_main: dict[str, list[bool]] = {"body": [], "prompts": [], "engine_requests": []}
    for name, calls in is_main.items():
        owner: Any = app_module if name == "engine_requests" else BodyReader
        original = getattr(owner, name)

        def noted(*arguments: Any, work: Any = original, calls: list[bool] = calls) -> Any:
            calls.append(threading.current_thread() is threading.main_thread())
            return work(*arguments)

        noted.__qualname__, noted.__module__ = f"BodyReader.{name}", reading.__name__  # as what is pickled
        monkeypatch.setattr(owner, name, noted)

    async def use(client: httpx.AsyncClient) -> None:
        for prompt in ("a", "a" * app_module.LONG_BODY, ["a"] * 90, VERY_LONG["prompt"]):
            answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text

    with_server(use, LONG)
    assert is_main == {
        "body": [True, False, True],
        "prompts": [True, False, False],
        "engine_requests": [True, False, False, False],
    }


@pytest.fixture(scope="module")
def process() -> Iterator[ReadingProcess]:
    with closing(ReadingProcess(RULES)) as found:
        yield found


BODIES: list[tuple[type[ServerRequest], Callable[..., Any], Any]] = [
    (CompletionRequest, BodyReader.prompts, {"prompt": "ab", "echo": True, "n": 2}),
    (CompletionRequest, BodyReader.prompts, {"prompt": [[1, 2], [3]], "logprobs": 2, "model": "lora-0"}),
    (
        CompletionRequest,
        BodyReader.prompts,
        {"prompt": ["a", "bc"], "stop": ["x"], "stream_options": {}, "stream": True},
    ),
    (ChatRequest, BodyReader.prompts, {"messages": [{"role": "user", "content": "a"}], "seed": 3}),
    (TokenizeRequest, BodyReader.answer, {"prompt": "ab", "return_token_strs": True}),
    (DetokenizeRequest, BodyReader.answer, {"tokens": [97, 98]}),
]


@pytest.mark.parametrize(("body_type", "use", "fields"), BODIES)
def test_another_process_reads_the_same(
    process: ReadingProcess, body_type: type[ServerRequest], use: Callable[..., Any], fields: dict[str, Any]
) -> None:
    content, reader = json.dumps(fields).encode(), BodyReader(RULES)
    body, used = process.read(content, body_type, use)
    here = reader.body(content, body_type)
    expected = use(reader, here)
    assert body.num_requests == here.num_requests
    assert body.model == here.model
    if use is BodyReader.answer:
        assert used == expected
        return
    assert used.echoes == expected.echoes
    for ours, theirs in zip(used.token_ids, expected.token_ids, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert b"ab" not in str(body).encode(), "the texts of the prompts are not sent"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": "a", "model": "x"}, UnknownModel),
        ({"prompt": "a", "min_p": 1}, InputError),
        ({"prompt": ["a"] * 101}, InputError),
        ({"prompt": ""}, InputError),
    ],
)
def test_another_process_refuses_the_same(
    process: ReadingProcess, fields: dict[str, Any], error: type[InputError]
) -> None:
    content, reader, messages = json.dumps(fields).encode(), BodyReader(RULES), []
    for one in (process, reader):
        with pytest.raises(InputError) as found:
            one.read(content, CompletionRequest, BodyReader.prompts)
        assert type(found.value) is error
        messages.append(str(found.value))
    assert messages[0] == messages[1]


def test_a_process_that_is_killed_is_replaced() -> None:
    before = set(workers_of(os.getpid()))

    async def use(client: httpx.AsyncClient) -> None:
        assert (await posted(client)).status_code == 200
        (worker,) = set(workers_of(os.getpid())) - before
        os.kill(worker, signal.SIGSTOP)
        waiting = posted(client)
        assert (await client.get("/health")).status_code == 200
        os.kill(worker, signal.SIGKILL)
        answer = await waiting
        assert answer.status_code == 503
        assert "lack of memory" in answer.json()["error"]["message"]
        assert (await posted(client)).status_code == 200
        assert worker not in workers_of(os.getpid())

    with_server(use, LONG)
    assert set(workers_of(os.getpid())) == before, "the server has ended its process"


def workers_of(parent: int) -> list[int]:
    """The processes that read bodies for `parent`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if is_child and reading.START.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def test_the_process_ends_with_the_server() -> None:
    """Also with one that is killed, so that it ends nothing itself."""
    program = (
        "from tests.serving.test_reading import *\n"
        "process = ReadingProcess(RULES)\n"
        'process.read(b\'{"prompt": "a"}\', CompletionRequest, BodyReader.prompts)\n'
        "print(process._process.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert Path(f"/proc/{worker}").exists()
        parent.kill()
    while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
        time.sleep(0.01)


def test_a_process_that_has_ended_is_an_error() -> None:
    with closing(ReadingProcess(RULES)) as process, killed_at_once(process), pytest.raises(ReadingFailed):
        process.read(b"{}", CompletionRequest, BodyReader.prompts)


@contextmanager
def killed_at_once(process: ReadingProcess) -> Iterator[None]:
    """The process has been killed when it is asked for something."""
    process._start()
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    yield


def test_prompts_that_do_not_fit_are_refused_after_another_process_has_read_them() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        answer = await posted(client)
        assert answer.status_code == 400
        assert "prompt of 60000 tokens" in answer.json()["error"]["message"]

    with_server(use, RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", max_seq_len=1000))
