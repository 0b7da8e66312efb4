"""Random and hostile requests to `serve`: each is answered, none with 200 while a field is ignored, none ends the
server, and `/health` is answered meanwhile."""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import jsonschema
import msgspec
import pytest

import ifbbench.serving
from ifbbench.serving import protocol
from ifbbench.serving.app import VERY_LONG_BODY
from ifbbench.settings.config import RunConfig
from tests.attack import hostile
from tests.attack.servers import BODIES
from tests.serving.clients import SMALL_POOL, ServerProcess, server_process
from tests.serving.test_protocol import with_server

pytestmark = pytest.mark.usefixtures("small_model")

BODY_TYPES: dict[str, type[protocol.ServerRequest]] = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
SMALL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
VALUES: tuple[Any, ...] = (
    True,
    0,
    1,
    -1,
    3,
    10**30,
    0.5,
    -0.5,
    1e300,
    "",
    "a",
    "always",
    "x" * 2000,
    [],
    {},
    [1],
    ["a"],
    [[1]],
    [[]],
    [None],
    [{}],
    [""],
    {"a": 1},
    {"5": 1},
    {"5": "x"},
    {"include_usage": True},
    {"include_usage": 3},
    {"role": "user"},
    [{"role": "user"}],
    [{"role": "", "content": "a"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    ["a", 1],
    [2**31],
    [-1],
    ["a"] * 17,
    [1] * 1001,
)
TINY = RunConfig(device="cpu", model="tiny", cpu_threads=1, max_seq_len=256, warm_up=0)
ERRORS = {400, 404, 405, 413, 415, 429, 503}
SERVER = ["--device", "cpu", "--model", "tiny", "--cpu_threads", "1", "--max_seq_len", "256", *SMALL_POOL]
# The servers of these tests take bodies of this size, so that one at the limit takes little time, and is still read in
# a process of its own. The default is 16 MiB.
MAX_BODY_BYTES = VERY_LONG_BODY + 2**16


def test_a_field_of_a_wrong_type_or_range_is_refused() -> None:
    """What is valid is decided by another program: jsonschema, by the schema of each type."""
    _, schemas = msgspec.json.schema_components(BODY_TYPES.values(), ref_template="#/$defs/{name}")

    async def use(client: httpx.AsyncClient) -> None:
        statuses: Counter[int] = Counter()
        for path, body_type in BODY_TYPES.items():
            for name in body_type.__struct_fields__:
                schema = {"$defs": schemas, **schemas[body_type.__name__]["properties"][name]}
                check = jsonschema.Draft202012Validator(schema)
                for value in VALUES:
                    answer = await client.post(path, json=SMALL[path] | {name: value})
                    statuses[answer.status_code] += 1
                    if not check.is_valid(value):
                        assert answer.status_code == 400, f"{path} {name} {value!r}"[:300] + answer.text[:300]
                    assert answer.status_code in {200, *ERRORS}, f"{path} {name} {value!r}"[:300] + answer.text[:300]
        assert statuses[200] > 100
        assert statuses[400] > 1000

    with_server(use, TINY)


@pytest.mark.parametrize("ignores", [False, True])
def test_an_unknown_field_is_refused_wherever_it_is(ignores: bool) -> None:
    draw = random.Random(28)

    async def use(client: httpx.AsyncClient) -> None:
        for path, small in SMALL.items():
            for value in VALUES:
                name = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz_", k=draw.randint(1, 12))) + "_q"
                body = json.loads(json.dumps(small))
                objects = [body, *body.get("messages", ())]
                draw.choice(objects)[name] = value
                answer = await client.post(path, json=body)
                assert answer.status_code == (200 if ignores else 400), answer.text
                if not ignores:
                    assert name in answer.json()["error"]["message"]

    with_server(use, TINY, ignore_unknown_fields=ignores)


@pytest.mark.parametrize("body_type", [*BODY_TYPES.values(), protocol.StreamOptions])
def test_every_field_that_is_taken_is_used(body_type: type[msgspec.Struct]) -> None:
    sources = [path.read_text() for path in Path(ifbbench.serving.__path__[0]).glob("*.py")]
    for name in get_type_hints(body_type):
        if not name.startswith("_"):
            assert any(re.search(rf"\w\.{name}\b", one) for one in sources), name


# Hostile bodies. Each is (what, path, content, the statuses that are right).


def filled(head: bytes, unit: bytes, tail: bytes, size: int) -> bytes:
    """A body of at most `size` bytes with as many elements as possible."""
    return head + b",".join([unit] * ((size - len(head) - len(tail)) // (len(unit) + 1))) + tail


def bodies_at_the_limits(size: int) -> list[tuple[str, str, bytes, set[int]]]:
    """Bodies of up to `size` bytes, which is the largest that the server takes."""
    text, chat, refused = "/v1/completions", "/v1/chat/completions", {400}
    head, tail = b'{"max_tokens":1,"prompt":', b"}"
    unknown, asked = b'{"prompt":"a","max_tokens":1,"x":[', b'{"prompt":"a","max_tokens":1,'
    said = b'{"max_tokens":1,"messages":['
    return [
        ("all of the limit", text, head + b'"a"' + b" " * (size - len(head) - 4) + tail, {200}),
        ("more than the limit", text, b" " * (size + 1), {413}),
        ("much more than the limit", text, b" " * (4 * size), {413}),
        ("a long text", text, head + b'"' + b"a" * (size - len(head) - 3) + b'"}', refused),
        ("escapes", text, head + b'"' + b"\\u0061" * ((size - 40) // 6) + b'"}', refused),
        ("token ids", text, filled(head + b"[", b"1", b"]}", size), refused),
        ("prompts of ids", text, filled(head + b"[", b"[1]", b"]}", size), refused),
        ("prompts of text", text, filled(head + b"[", b'"a"', b"]}", size), refused),
        ("prompts times n", text, b'{"max_tokens":1,"n":128,"prompt":["a","b","c","d","e","f","g","h","i"]}', refused),
        ("lists in an unknown field", text, filled(unknown, b"[]", b"]}", size), refused),
        ("objects in an unknown field", text, filled(unknown, b'{"a":1}', b"]}", size), refused),
        ("stop texts", text, filled(asked + b'"stop":[', b'"a"', b"]}", size), refused),
        ("stop tokens", text, filled(asked + b'"stop_token_ids":[', b"1", b"]}", size), refused),
        ("keys", text, asked + b",".join(b'"k%d":1' % one for one in range(size // 13)) + tail, refused),
        (
            "keys without a value",
            text,
            asked + b",".join(b'"k%d":null' % one for one in range(size // 16)) + tail,
            {200},
        ),
        (
            "biases",
            text,
            asked + b'"logit_bias":{' + b",".join(b'"%d":1' % one for one in range(size // 12)) + b"}}",
            refused,
        ),
        ("the same bias", text, filled(asked + b'"logit_bias":{', b'"5":1', b"}}", size), {200}),
        ("depth", text, b"[" * (size // 2) + b"]" * (size // 2), refused),
        ("depth of a field", text, head + b"[" * 100_000 + b"]" * 100_000 + tail, refused),
        ("depth that can be read", text, b'{"prompt":"a","x":' + b"[" * 900 + b"]" * 900 + tail, refused),
        ("a long integer", text, b'{"prompt":"a","max_tokens":' + b"9" * (size - 50) + tail, refused),
        ("an integer of 400 digits", text, b'{"prompt":"a","max_tokens":1' + b"0" * 400 + tail, refused),
        ("a float above all", text, asked + b'"temperature":1e400}', refused),
        ("no number", text, asked + b'"temperature":NaN}', refused),
        ("infinity", text, asked + b'"temperature":-Infinity}', refused),
        ("half a surrogate pair", text, head + b'"\\ud800"}', refused),
        ("no UTF-8", text, head + b'"\xff"}', refused),
        ("a byte order mark", text, b"\xef\xbb\xbf" + head + b'"a"}', refused),
        ("UTF-16", text, (head + b'"a"}').decode().encode("utf-16"), refused),
        ("a null byte", text, head + b'"\\u0000"}', {200}),
        ("nothing", text, b"", refused),
        ("no object", text, b"3", refused),
        ("two objects", text, head + b'"a"}{}', refused),
        ("a long name", text, asked + b'"' + b"n" * (size - 50) + b'":1}', refused),
        ("a long model", text, asked + b'"model":"' + b"n" * (size - 50) + b'"}', {404}),
        ("messages", chat, filled(said, b'{"role":"user","content":"a"}', b"]}", size), refused),
        ("messages of nothing", chat, filled(said, b"{}", b"]}", size), refused),
        (
            "parts",
            chat,
            filled(said + b'{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}", size),
            refused,
        ),
        ("a text to tokenize", "/tokenize", b'{"prompt":"' + b"a" * (size - 20) + b'"}', {200}),
        ("strings of tokens", "/tokenize", b'{"return_token_strs":true,"prompt":"' + b"a" * (size - 50) + b'"}', {200}),
        ("tokens", "/detokenize", filled(b'{"tokens":[', b"240", b"]}", size), {200}),
    ]


def request(path: str, content: bytes, method: str = "POST", headers: str = "") -> bytes:
    framing = "" if "ransfer-" in headers or "ontent-L" in headers else f"Content-Length: {len(content)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}{framing}\r\n".encode() + content


async def answer_to(port: int, content: bytes) -> tuple[int, bytes]:
    """The status and body of the answer to these bytes. AssertionError if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**30)

    async def write() -> None:
        try:
            writer.write(content)
            await writer.drain()
        except ConnectionError:
            pass  # refused before all of it was read

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(300):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 "), (content[:200], answer[:200])
        return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]
    finally:
        writing.cancel()
        writer.close()


@asynccontextmanager
async def watched(port: int) -> AsyncIterator[list[float]]:
    """Asks for /health all the time; yields the seconds that each answer took."""
    took: list[float] = []
    is_over = False

    async def watch() -> None:
        while not is_over:
            start_s = time.perf_counter()
            status, _ = await answer_to(port, request("/health", b"", "GET"))
            assert status == 200
            took.append(time.perf_counter() - start_s)
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    try:
        yield took
    finally:
        # Not `watching.cancel()`: what it waits for may end at the same moment, and then a cancellation can be lost.
        is_over = True
        await watching  # raises what was wrong with an answer
    assert took


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ["--max_body_bytes", str(MAX_BODY_BYTES), "--max_queue_size", "1000"]
    with server_process(*SERVER, *options) as running:
        yield running
        status, printed = running.end()
    assert status == 0
    assert "Traceback" not in printed
    assert "ERROR" not in printed


def test_bodies_at_the_limits_are_answered(server: ServerProcess) -> None:
    async def main() -> None:
        async with watched(server.port):
            for what, path, content, statuses in bodies_at_the_limits(MAX_BODY_BYTES):
                status, answer = await answer_to(server.port, request(path, content))
                assert status in statuses, (what, status, answer[:300])
                if status != 200:
                    assert json.loads(answer)["error"]["code"] == status, what

    asyncio.run(main())


def test_bodies_at_the_limits_are_answered_at_the_same_time(server: ServerProcess) -> None:
    async def main() -> None:
        bodies = bodies_at_the_limits(MAX_BODY_BYTES)
        async with watched(server.port):
            answers = await asyncio.gather(*(answer_to(server.port, request(path, one)) for _, path, one, _ in bodies))
        for (what, _, _, statuses), (status, answer) in zip(bodies, answers, strict=True):
            assert status in statuses, (what, status, answer[:300])

    asyncio.run(main())


GOOD = b'{"prompt":"a","max_tokens":1}'
BYTE_BY_BYTE = b"".join(b"1\r\n%c\r\n" % one for one in GOOD) + b"0\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (request("/v1/completions", b"1d\r\n" + GOOD + b"\r\n0\r\n\r\n", headers=CHUNKED), 200),
        (request("/v1/completions", BYTE_BY_BYTE, headers=CHUNKED), 200),
        (request("/v1/completions", b"zz\r\n" + GOOD, headers=CHUNKED), 400),
        (request("/v1/completions", b"-1\r\n" + GOOD, headers=CHUNKED), 400),
        (request("/v1/completions", b"f" * 40 + b"\r\n" + GOOD, headers=CHUNKED), 400),
        (request("/v1/completions", GOOD, headers="Content-Length: 5\r\n"), 400),
        (request("/v1/completions", GOOD, headers="Content-Length: -1\r\n"), 400),
        (request("/v1/completions", GOOD, headers="Content-Length: 99999999999999999999999\r\n"), 400),
        (request("/v1/completions", GOOD, headers="Content-Length: 29\r\nContent-Length: 5\r\n"), 400),
        (request("/v1/completions", GOOD, headers="Content-Length: 29\r\nTransfer-Encoding: chunked\r\n"), 400),
        (request("/v1/completions", GOOD, headers="Content-Encoding: gzip\r\n"), 415),
        (request("/v1/completions", GOOD, headers="Content-Encoding: identity\r\n"), 200),
        (request("/v1/completions", GOOD, headers="Content-Type: \xff\r\n"), 200),
        (request("/v1/completions", GOOD, headers="Expect: 100-continue\r\n"), 100),
        (request("/v1/completions?prompt=b&%ff=%00", GOOD), 200),
        (request("/v1/completions/", GOOD), 307),
        (request("/v1/completions/../models", b"", "GET"), 404),
        (request("/%2e%2e/%00", b"", "GET"), 404),
        (request("/v1/completions", b"", "GET"), 405),
        (request("/v1/completions", GOOD, "PUT"), 405),
        (request("/v1/models", b"", "DELETE"), 405),
        (request("/health", b"{}", "POST"), 405),
        (request("/v1/models", GOOD, "GET"), 200),
        (request("/v1/models/%ff%00/x", b"", "GET"), 404),
        (request("/version", b"", "HEAD"), 200),
        (request("/load", b"", "GET"), 200),
        (request("/metrics", b"", "GET", "Accept: \x01\r\n"), 400),
        (request("/iterations", b"", "GET"), 200),
        (request("*", b"", "OPTIONS"), 404),
    ],
)
def test_odd_messages_are_answered(server: ServerProcess, content: bytes, status: int) -> None:
    found, answer = asyncio.run(answer_to(server.port, content))
    assert found == status, answer[:300]


@pytest.mark.parametrize("seed", range(4))
def test_random_bodies_are_answered(server: ServerProcess, seed: int) -> None:
    draw, statuses = random.Random(seed), Counter[int]()

    async def client(port: int, count: int) -> None:
        for _ in range(count):
            path, body = draw.choice(BODIES)
            content = json.dumps(hostile.changed(body, draw)).encode("utf-8", "surrogatepass")
            if draw.random() < 0.2:
                content = hostile.changed_bytes(content, draw)
            status, answer = await answer_to(port, request(f"/v1/{path}", content))
            assert status in {200, *ERRORS}, (content[:500], answer[:300])
            statuses[status] += 1

    async def main() -> None:
        async with watched(server.port):
            await asyncio.gather(*(client(server.port, 8) for _ in range(10)))
        status, answer = await answer_to(server.port, request("/v1/completions", GOOD))
        assert status == 200, answer

    asyncio.run(main())
    assert statuses[200] > 5
    assert statuses[400] > 5


def test_many_connections_at_once_are_answered(server: ServerProcess) -> None:
    async def main() -> None:
        async with watched(server.port):
            answers = await asyncio.gather(
                *(answer_to(server.port, request("/v1/completions", GOOD)) for _ in range(150))
            )
        assert {status for status, _ in answers} == {200}

    asyncio.run(main())


@pytest.mark.slow
def test_health_is_answered_soon(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how late `/health` is beside bodies of the default limit: one at a time, and all at the same time. It is
    asked for in a process of its own, since the one that sends the bodies is late itself."""
    with server_process(*SERVER) as server:

        def report(latest_s: float, what: str) -> None:
            with capsys.disabled():
                print(f"{latest_s * 1000:7.0f} ms, {what}")

        async def main() -> None:
            bodies = bodies_at_the_limits(2**24)
            with latest_health(server.port) as latest:
                report(latest(), "nothing")
                for what, path, content, statuses in bodies:
                    status, answer = await answer_to(server.port, request(path, content))
                    assert status in statuses, (what, status, answer[:300])
                    report(latest(), what)
                requests = (answer_to(server.port, request(path, one)) for _, path, one, _ in bodies)
                statuses_of_all = Counter(status for status, _ in await asyncio.gather(*requests))
                report(latest(), f"all at the same time: {dict(statuses_of_all)}")

        asyncio.run(main())
        status, printed = server.end()
    assert status == 0
    assert "Traceback" not in printed


WATCH = """
import http.client, sys, threading, time
latest_s, lock = 0.0, threading.Lock()
def watch():
    global latest_s
    while True:
        start_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        with lock:
            latest_s = max(latest_s, time.perf_counter() - start_s)
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
for _ in sys.stdin:
    time.sleep(0.1)
    with lock:
        print(latest_s, flush=True)
        latest_s = 0.0
"""


@contextmanager
def latest_health(port: int) -> Iterator[Callable[[], float]]:
    """What returns how many seconds the latest answer of `/health` took since it was called last."""
    command = [sys.executable, "-c", WATCH, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:

        def latest() -> float:
            assert watcher.stdin is not None
            assert watcher.stdout is not None
            print(file=watcher.stdin, flush=True)
            return float(watcher.stdout.readline())

        yield latest
        watcher.communicate()
