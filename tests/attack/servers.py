"""Tries of servers and their clients: start-up, bodies of requests, recorded traffic, endpoints that answer badly."""

import asyncio
import json
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import httpx

from ifbbench.cli.serve import NAMES
from ifbbench.progress import Progress
from ifbbench.serving import server
from ifbbench.serving.config import ServerConfig, server_settings
from ifbbench.settings.config import RunConfig, settings
from tests.attack import hostile
from tests.attack.commands import Outcomes, fresh
from tests.attack.inputs import json_lines, setting_value
from tests.attack.results import QUICK, damage
from tests.endpoint.fake_endpoint import STREAM, Received, Writer, fake_endpoint, token, usage

ENGINE = RunConfig(device="null", max_batch_size=2, max_tokens_in_paged_kvcache=4096, max_seq_len=512)
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": "a b", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"]}),
    ("completions", {"prompt": [1, 2, 3], "max_tokens": 2, "n": 2, "logprobs": 2, "echo": True,
                     "logit_bias": {"5": 1.0}, "presence_penalty": 0.5, "user": "me"}),
    ("completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "ignore_eos": True,
                     "stream_options": {"include_usage": True}, "min_tokens": 1, "stop_token_ids": [7]}),
    ("chat/completions", {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}],
                          "max_tokens": 3, "n": 1, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                          "max_completion_tokens": 2, "stream": True, "frequency_penalty": 0.1}),
)  # fmt: skip


def start_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """`serve` with hostile settings; a server that starts is ended at once."""
    left_out = ("device", "host", "model", "cpu_threads", "record", "quiet", "draft_model")
    known = [
        one
        for one in (*server_settings(), *(one for one in settings() if one.name in NAMES))
        if one.name not in left_out
    ]
    options = [
        f"--{one.name}" if one.type is bool else f"--{one.name}={setting_value(one, draw)}"
        for one in draw.sample(known, draw.choice((1, 1, 2)))
    ]
    if draw.random() < 0.3:
        options.append(f"--record={draw.choice((*hostile.TEXTS, 'traffic'))}")
    with _ending_at_once():
        outcomes.attack(["serve", "--device", "null", "--max_tokens_in_paged_kvcache", "4096", "--port", "0", *options])


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Servers that are started in the block end when they have started."""
    serve = server.serve

    def ended(config: RunConfig, settings: ServerConfig, progress: Progress, report: Callable[[str], None]) -> Any:
        def started(url: str) -> None:
            report(url)
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)

        return serve(config, settings, progress, started)

    with patch.object(server, "serve", ended):
        yield


def body_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """Bodies that a server gets at the same time, changed ones and then a good one, which is answered."""
    bodies = []
    for _ in range(4):
        path, body = draw.choice(BODIES)
        changed: Any = hostile.changed(body, draw)
        content = json.dumps(changed).encode("utf-8", "surrogatepass")
        bodies.append((path, hostile.changed_bytes(content, draw) if draw.random() < 0.2 else content))
    outcomes.call(lambda: asyncio.run(_answered(bodies)), f"server {[(path, one[:500]) for path, one in bodies]}")


async def _answered(bodies: list[tuple[str, bytes]]) -> int:
    """0 if each body is answered, and a good one after them well."""
    return await answers(ENGINE, ServerConfig(max_body_bytes=200_000), bodies)


@asynccontextmanager
async def _client(config: RunConfig, settings: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process."""
    with server.serving_engine(config) as engine:
        async with server.running_service(engine, config, settings) as service:
            endpoints = server.endpoints_of(service, config, settings)
            transport = httpx.ASGITransport(endpoints.app())
            with closing(endpoints):
                async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=300) as client:
                    yield client


async def answers(config: RunConfig, settings: ServerConfig, bodies: list[tuple[str, bytes]]) -> int:
    """0 if a server answers each body at one of these paths, and a good one after them well."""
    async with _client(config, settings) as client:
        found = await asyncio.gather(*(client.post(f"/v1/{path}", content=body) for path, body in bodies))
        for answer, (path, body) in zip(found, bodies, strict=True):
            if answer.status_code not in (200, 400, 413, 429):
                raise AssertionError(f"{path} {body[:500]!r}: status {answer.status_code}: {answer.text[:300]}")
        good = await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
        if good.status_code != 200:
            raise AssertionError(f"then {good.status_code}: {good.text[:300]}")
        assert (await client.get("/metrics")).status_code == (await client.get("/iterations")).status_code == 200
    return 0


@cache
def recorded_traffic() -> Path:
    """The directory of a server's traffic, with requests of all kinds."""
    directory = Path(mkdtemp(prefix="attack-")) / "traffic"

    async def record() -> None:
        async with _client(ENGINE, ServerConfig(record=str(directory))) as client:
            for path, body in BODIES:
                answer = await client.post(f"/v1/{path}", json=body)
                assert answer.status_code in (200, 400), answer.text  # no logit_bias without tokens

    asyncio.run(record())
    return directory


def traffic_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A damaged directory of recorded traffic, which commands read and `run` replays."""
    copy = folder / "traffic"
    shutil.copytree(recorded_traffic(), copy)
    note = damage(copy, draw)
    command, *options = draw.choice((*QUICK, "run", "run")).split()
    if command == "run":
        arguments = [
            "run",
            *(["--config"] if options else []),
            str(copy),
            "--device",
            "sim:h100-sxm",
            "--model",
            "tiny",
            "--quiet",
            "--output",
            str(fresh(folder, "run")),
        ]
    elif command == "compare":
        arguments = [command, str(recorded_traffic()), str(copy)]
    else:
        arguments = [command, *options, str(copy)] if command == "dataset" else [command, str(copy), *options]
    outcomes.attack(arguments, note)


CHUNKS: tuple[Any, ...] = (
    token(" a"),
    token(" b", logprobs={"tokens": [" b"], "token_logprobs": [-0.5]}),
    token(" c", finish_reason="stop"),
    usage(3, prompt_tokens_details={"cached_tokens": 1}),
)
URLS = (
    "http://127.0.0.1:1",
    "http://",
    "http://[::1",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:-1",
    "ftp://a",
    "http://a b",
    "http://\u202e",
    "https://127.0.0.1:1/v1",
    "http://127.0.0.1:1/%00",
    "http://user:p@127.0.0.1:1",
    "http://127.0.0.1:1?x=y#z",
    "http://x" + "y" * 300,
    "http://" + "a." * 200,
    "127.0.0.1:1",
)


def endpoint_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A run against a bad address, or a server whose answers are changed, with settings of the endpoint."""
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines([{"arrival_s": 0.0, "prompt_len": 4, "output_len": 3}] * 2))
    known = [one for one in settings() if one.group == "endpoint" and one.name not in ("endpoint", "metrics_url")]
    options = [
        f"--{one.name}" if one.type is bool else f"--{one.name}={setting_value(one, draw)}"
        for one in draw.sample(known, draw.choice((0, 0, 1)))
    ]
    if not any("timeout" in option for option in options):
        options.append("--endpoint_timeout=2")
    if any("retries" in option for option in options):
        options.append("--duration=0.1")
    command = ["run", str(trace), "--quiet", "--output", str(fresh(folder, "run")), *options, "--endpoint"]
    if draw.random() < 0.3:
        outcomes.attack([*command, draw.choice((*URLS, *hostile.TEXTS))])
        return
    content, models, shown = _answers(draw)

    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(content)
        writer.close()

    with fake_endpoint(answer) as endpoint:
        endpoint.gets["/v1/models"] = models
        outcomes.attack([*command, endpoint.url], shown)


def _answers(draw: random.Random) -> tuple[bytes, tuple[int, Any], str]:
    """What a server answers to a request, and to the question for its models, as bytes and as a document."""
    listed: Any = {"data": [{"id": "mock", "max_model_len": 100}]}
    models: tuple[int, Any] = (200, listed)
    if draw.random() < 0.3:
        models = (draw.choice((200, 200, 404, 500)), hostile.changed(listed, draw))
    chunks: Any = list(CHUNKS)
    for _ in range(draw.choice((0, 1, 1, 2))):
        chunks = hostile.changed(chunks, draw)
    events = [f"data: {json.dumps(one)}\n\n" for one in (chunks if isinstance(chunks, list) else [chunks])]
    parts = "".join(f"{len(one):x}\r\n{one}\r\n" for one in (*events, "data: [DONE]\n\n")) + "0\r\n\r\n"
    content = (STREAM + parts).encode("utf-8", "surrogatepass")
    if draw.random() < 0.4:
        content = hostile.changed_bytes(content, draw)
    elif draw.random() < 0.2:
        body = json.dumps(hostile.changed({"error": {"message": "no", "code": 400}}, draw))
        status = draw.choice((200, 204, 301, 400, 404, 500, 503, 999))
        content = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    return content, models, f"{models} {content[:600]!r}"
