"""What foreign clients take for the first token of a stream has the first token. The rules are those of the clients'
own code (vllm 0.32, guidellm 0.8, aiperf 0.13, and scripts with the openai package)."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving.clients import ServerProcess, server_process
from tests.serving.test_fuzz import request
from tests.serving.test_simulated import MODEL

Chunk = dict[str, Any]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 2},
    {"ignore_eos": True, "temperature": 0, "seed": 1},
    {"stop": ["nothing like this"]},
)


def text_of(chunk: Chunk) -> str | None:
    """The text of the first choice, None if the chunk has none."""
    if not chunk["choices"]:
        return None
    choice = chunk["choices"][0]
    text: str | None = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text


def has_choices(chunk: Chunk) -> bool:
    """vllm bench serve, openai and openai-chat: `if choices := data.get("choices")`."""
    return bool(chunk.get("choices"))


def has_text(chunk: Chunk) -> bool:
    """guidellm and aiperf: `if choices and (text := choice.get("text"))`, `if content := delta.get("content")`."""
    return bool(text_of(chunk))


def has_content(chunk: Chunk) -> bool:
    """Scripts with the openai package, such as those of locust: `chunk.choices[0].delta.content is not None`."""
    return text_of(chunk) is not None


def is_any(_chunk: Chunk) -> bool:
    """Clients that know no OpenAI: the first bytes of the body (curl's starttransfer, k6, wrk)."""
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process(*MODEL) as running:
        yield running


async def pieces_of(port: int, path: str, body: dict[str, Any]) -> list[list[Chunk]]:
    """The events of a stream, by the piece of the response in which the server sent them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(path, json.dumps(body).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower(), head
        pieces = []
        while size := int(await reader.readline(), 16):
            piece = await reader.readexactly(size + 2)
            pieces.append([json.loads(line[6:]) for line in piece.decode().splitlines() if line.startswith("data: {")])
        return [events for events in pieces if events]
    finally:
        writer.close()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("takes", [has_choices, has_text, has_content, is_any])
def test_the_chunk_that_a_client_takes_for_the_first_token_has_it(
    server: ServerProcess, path: str, options: dict[str, Any], takes: Callable[[Chunk], bool]
) -> None:
    body = {"max_tokens": 5, "stream": True, "return_token_ids": True, **BODIES[path], **options}
    pieces = asyncio.run(pieces_of(server.port, path, body))
    first = next(index for index, piece in enumerate(pieces) if any(map(takes, piece)))
    with_token = [any(choice.get("token_ids") for chunk in piece for choice in chunk["choices"]) for piece in pieces]
    assert with_token.index(True) == first == 0


@pytest.mark.parametrize("path", BODIES)
def test_all_chunks_but_the_role_have_text(server: ServerProcess, path: str) -> None:
    """Clients take the time between chunks with text for the inter-token latency; a chunk without would be a gap too
    many. The role of a chat comes with the first token, in the same piece, as from vLLM."""
    pieces = asyncio.run(pieces_of(server.port, path, {"max_tokens": 6, "stream": True, **BODIES[path]}))
    chunks = [chunk for piece in pieces for chunk in piece]
    assert all(has_text(chunk) for chunk in chunks[path.endswith("chat/completions") :])
    assert "".join(text_of(chunk) or "" for chunk in chunks) == "This i"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
