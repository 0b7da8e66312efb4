"""Bodies of requests: what is read, what is refused by name, and what is done outside the event loop."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import httpx
import pytest

from ifbbench.errors import InputError
from ifbbench.serving import app as app_module
from ifbbench.serving.config import ServerConfig
from ifbbench.serving.protocol import (
    NEUTRAL_VALUES,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    Generating,
    check_supported,
    read_body,
)
from ifbbench.serving.server import endpoints_of, running_service, serving_engine
from ifbbench.settings.config import RunConfig

pytestmark = pytest.mark.usefixtures("small_model")

SIMULATED = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", max_queue_size=100)


def read(body_type: type[Generating], fields: dict[str, Any], ignore_unknown_fields: bool = False) -> Generating:
    required = {"prompt": "a"} if body_type is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    return read_body(json.dumps(required | fields).encode(), body_type, ignore_unknown_fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_outputs", {"json": {}}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("response_format", {"type": "json_object"}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["a"]),
        ("truncate_prompt_tokens", 3),
        ("min_p", 0.1),
        ("functions", [{"name": "f"}]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("suffix", "b"),
        ("include_stop_str_in_output", True),
        ("a_field_of_tomorrow", 1),
        ("stream_options", {"a_field_of_tomorrow": 1}),
    ],
)
@pytest.mark.parametrize("body_type", [CompletionRequest, ChatRequest])
def test_a_field_that_is_not_supported_is_refused_by_name(body_type: type[Generating], name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}.*: is not supported; .*--ignore_unknown_fields"):
        read(body_type, {name: value})
    read(body_type, {name: value}, ignore_unknown_fields=True)
    if not isinstance(value, dict):
        read(body_type, {name: None})


@pytest.mark.parametrize("body_type", [CompletionRequest, ChatRequest])
def test_fields_that_change_no_answer_are_taken(body_type: type[Generating]) -> None:
    known = set(body_type.__struct_fields__)
    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            if name not in known:
                read(body_type, {name: value})
    read(body_type, dict.fromkeys(WITHOUT_EFFECT, "a"))


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, r"messages\[0\]\.content\[0\]\.type"),
        ({"content": "a", "tool_calls": [{"id": "1"}]}, r"messages\[0\]\.tool_calls"),
        ({"content": "a", "tool_call_id": "1"}, r"messages\[0\]\.tool_call_id"),
        ({"content": [{"type": "text", "text": "a", "b": 1}]}, r"messages\[0\]\.content\[0\]\.b"),
    ],
)
def test_what_a_message_cannot_have_is_refused_by_its_path(message: dict[str, Any], path: str) -> None:
    with pytest.raises(InputError, match=rf"^{path}: "):
        read(ChatRequest, {"messages": [{"role": "user", **message}]})


@pytest.mark.parametrize("body_type", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(
    ("fields", "name", "with_which_it_is_right"),
    [
        ({"stream_options": {}}, "stream_options", {"stream": True}),
        ({"length_penalty": 0.5}, "length_penalty", {"use_beam_search": True}),
        ({"length_penalty": 0.5}, "length_penalty", {"length_penalty": 1.0}),
        ({"early_stopping": "never"}, "early_stopping", {"use_beam_search": True}),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", {"max_tokens": 3}),
    ],
)
def test_a_field_without_effect_beside_the_others_is_refused(
    body_type: type[Generating], fields: dict[str, Any], name: str, with_which_it_is_right: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=f"^{name}: "):
        check_supported(read(body_type, fields), makes_tokens=True)
    check_supported(read(body_type, fields | with_which_it_is_right), makes_tokens=True)


def test_a_chat_has_no_ranked_choices() -> None:
    with pytest.raises(InputError, match="best_of"):
        read(ChatRequest, {"best_of": 2})


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("a", {}, 1),
        ([1, 2, 3], {"n": 4}, 4),
        (["a", "b"], {"n": 4}, 8),
        ([[1], [2, 3]], {}, 2),
        (["a", "b"], {"n": 4, "use_beam_search": True}, 2),
    ],
)
def test_requests_are_counted_before_prompts_are_read(prompt: Any, fields: dict[str, Any], expected: int) -> None:
    assert read(CompletionRequest, {"prompt": prompt, **fields}).num_requests == expected


def with_server(
    use: Callable[[httpx.AsyncClient], Awaitable[None]], config: RunConfig = SIMULATED, **server: Any
) -> None:
    """`use` a client of a server that runs in this process."""
    with serving_engine(config) as engine:

        async def main() -> None:
            settings = ServerConfig(**server)
            async with running_service(engine, config, settings) as service:
                endpoints = endpoints_of(service, config, settings)
                transport = httpx.ASGITransport(endpoints.app())
                with closing(endpoints):
                    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300) as client:
                        await use(client)

        asyncio.run(main())


def test_more_requests_than_the_queue_holds_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": ["a"] * 2000, "n": 128, "max_tokens": 1}
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "retry-after" not in refused.headers
        assert "256000 requests" in refused.json()["error"]["message"]
        assert "100 at a time" in refused.json()["error"]["message"]

    monkeypatch.setattr("ifbbench.serving.texts.Texts.encode", lambda *_arguments: pytest.fail("a prompt was read"))
    with_server(use)


def test_a_prompt_that_is_too_long_is_refused_before_requests_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        refused = await client.post("/v1/completions", json={"prompt": [1] * 200_000, "max_tokens": 1})
        assert refused.status_code == 400
        assert "prompt of 200000 tokens" in refused.json()["error"]["message"]

    monkeypatch.setattr(app_module, "engine_requests", lambda *_arguments: pytest.fail("requests were made"))
    with_server(use)


def test_a_chat_stream_begins_with_its_first_token() -> None:
    """Clients take the first chunk for the first token."""

    async def use(client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "n": 2, "stream": True}
        answer = await client.post("/v1/chat/completions", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        for index in (0, 1):
            first, second, *_ = [choice for choice in choices if choice["index"] == index]
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert "role" not in second["delta"]
            assert second["delta"]["content"]

    pieces: list[list[bytes]] = []
    original = app_module.EventStream._send

    async def noted(stream: Any, send: Any) -> None:
        pieces.append([])

        async def send_noted(message: Any) -> None:
            pieces[-1].append(message.get("body", b""))
            await send(message)

        await original(stream, send_noted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module.EventStream, "_send", noted)
        with_server(use)
    first = next(piece for piece in pieces[0] if piece)
    assert b'"role":"assistant"' in first
    assert b'"content":"T' in first, "the role and the first token are sent together"


def test_endpoints_of_vllm() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        version = (await client.get("/version")).json()["version"]
        assert version
        assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        tokens = (await client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True})).json()
        assert tokens == {"count": 3, "max_model_len": 131072, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
        text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
        assert text == {"prompt": "user\na\nassistant\n"}
        assert (await client.post("/tokenize", json={})).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [-1]})).status_code == 400
        unknown = await client.post("/v1/completions", json={"prompt": "a", "model": "gpt-4"})
        assert unknown.status_code == 404
        assert "llama-3.1-8b" in unknown.json()["error"]["message"]

    with_server(use)


def test_an_answer_has_the_id_of_its_request() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": "a", "max_tokens": 1}
        given = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert (given.json()["id"], given.headers["x-request-id"]) == ("cmpl-mine", "mine")
        named = await client.post("/v1/completions", json={**body, "request_id": "named", "stream": True})
        assert named.headers["x-request-id"] == "named"
        assert '"id":"cmpl-named"' in named.text
        odd = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "a b"})
        assert odd.headers["x-request-id"] != "a b"
        assert odd.json()["id"] == f"cmpl-{odd.headers['x-request-id']}"

    with_server(use)


def test_usage_has_the_cached_tokens() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        body = {"prompt": [[7] * 100, [8] * 10], "n": 2, "max_tokens": 2}
        usages = [(await client.post("/v1/completions", json=body)).json()["usage"] for _ in range(2)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert [usage["prompt_tokens"] for usage in usages] == [110, 110]
        assert cached[1] == 99 + 9, "the last token of a prompt is always computed"

    with_server(use, SIMULATED.with_values(enable_kv_cache_reuse=True))


def test_the_stop_reason_is_what_the_client_asked_to_stop_at() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        async def ended(**fields: Any) -> tuple[Any, Any]:
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9, **fields})
            (choice,) = answer.json()["choices"]
            return choice["finish_reason"], choice["stop_reason"]

        # The text of a simulated device begins with "This is".
        assert await ended() == ("length", None)
        assert await ended(stop=["x", "is"]) == ("stop", "is")
        assert await ended(stop_token_ids=[ord("i")]) == ("stop", ord("i"))

    with_server(use)


def test_pages_of_other_origins_are_allowed_only_if_asked_for() -> None:
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}

    async def refused(client: httpx.AsyncClient) -> None:
        answer = await client.options("/v1/completions", headers=headers)
        assert "access-control-allow-origin" not in answer.headers

    async def allowed(client: httpx.AsyncClient) -> None:
        answer = await client.options("/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://page"
        other = await client.options("/v1/completions", headers={**headers, "Origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers

    with_server(refused)
    with_server(allowed, allowed_origins="http://page")


def test_a_seed_is_random_unless_it_is_given() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        async def tokens(**fields: Any) -> list[int]:
            body = {"prompt": "a", "max_tokens": 12, "temperature": 5.0, "return_token_ids": True, **fields}
            answer = await client.post("/v1/completions", json=body)
            ids: list[int] = answer.json()["choices"][0]["token_ids"]
            return ids

        assert await tokens(seed=3) == await tokens(seed=3)
        assert await tokens() != await tokens()

    with_server(use, RunConfig(device="cpu", model="tiny", cpu_threads=1, warm_up=0))
