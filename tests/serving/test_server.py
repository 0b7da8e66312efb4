"""A server on the CPU, as the `openai` package sees it: its answers, and the run directory that it records."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.serving.clients import SMALL_POOL, ServerProcess, server_process

if TYPE_CHECKING:  # it takes most of a second, of each process that collects the tests
    import openai

KEY = "secret"
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving") / "recorded"


@pytest.fixture(scope="module")
def server(recorded: Path) -> Iterator[ServerProcess]:
    options = [
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--max_beam_width",
        "3",
        "--max_seq_len",
        "512",
        "--api_key",
        KEY,
        "--max_body_bytes",
        "100000",
        "--record",
        str(recorded),
        "--cpu_threads",
        "1",
        *SMALL_POOL,
    ]
    with server_process(*options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """With token ids, which the text of random weights does not show."""
    own = {"ignore_eos": True, "return_token_ids": True, **fields.pop("extra_body", {})}
    fields = {"max_tokens": 12, "temperature": 0, **fields}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=own, **fields)


def ids_of(choice: Any) -> list[int]:
    return list(choice.token_ids)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    import openai

    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")
    assert complete(client, max_tokens=1).model == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="huge", prompt="a")


def test_a_completion_has_its_tokens_text_and_usage(client: openai.OpenAI) -> None:
    answer = complete(client)
    (choice,) = answer.choices
    assert len(ids_of(choice)) == 12
    assert choice.text
    assert choice.finish_reason == "length"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
    }


def test_a_stream_has_the_same_tokens_one_by_one(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=20).choices[0]
    chunks = list(complete(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert [token for part in parts for token in ids_of(part.choices[0])] == ids_of(whole)
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 20


def test_a_list_of_prompts_with_several_choices(client: openai.OpenAI) -> None:
    alone = [ids_of(complete(client, prompt).choices[0]) for prompt in ([1, 2, 3], [4, 5])]
    answer = complete(client, [[1, 2, 3], [4, 5]], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [ids_of(choice) for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage.prompt_tokens == 5
    texts = complete(client, ["abc", "d"])
    assert len(texts.choices) == 2
    assert ids_of(complete(client, list(b"abc")).choices[0]) == ids_of(texts.choices[0])


def test_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    first, second = (complete(client, n=3, seed=4, temperature=1.5) for _ in range(2))
    drawn = [tuple(ids_of(choice)) for choice in first.choices]
    assert len(set(drawn)) == 3
    assert drawn == [tuple(ids_of(choice)) for choice in second.choices]
    assert ids_of(complete(client, seed=5, temperature=1.5).choices[0]) == list(drawn[1])


def test_the_prompt_is_echoed(client: openai.OpenAI) -> None:
    text = complete(client, "hello").choices[0].text
    assert complete(client, "hello", echo=True).choices[0].text == "hello" + text
    chunks = complete(client, "hello", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello" + text


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=4, logprobs=3).choices[0].logprobs
    assert len(answer.tokens) == len(answer.token_logprobs) == len(answer.top_logprobs) == 4
    assert answer.text_offset[0] == 0
    for number, top in zip(answer.token_logprobs, answer.top_logprobs, strict=True):
        assert number < 0
        assert max(top.values()) == pytest.approx(number, abs=1e-4), "greedy takes the most likely token"
        assert math.fsum(map(math.exp, top.values())) <= 1.0001
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    chat: Any = client.chat.completions.create(model="tiny", max_completion_tokens=3, temperature=0, **asked)
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    assert [len(one.top_logprobs) for one in content] == [2, 2, 2]
    assert content[0].top_logprobs[0].logprob == pytest.approx(content[0].logprob, abs=1e-4)


def test_log_probabilities_of_the_prompt(client: openai.OpenAI) -> None:
    """Those of an echo are those of the same tokens as outputs."""
    generated = complete(client, max_tokens=6, logprobs=2).choices[0]
    prompt = [*PROMPT, *ids_of(generated)]
    echoed = complete(client, prompt, max_tokens=3, logprobs=2, echo=True).choices[0]
    found = echoed.logprobs
    assert len(found.tokens) == len(prompt) + 3
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[len(PROMPT) : len(prompt)] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-4)
    assert found.top_logprobs[len(PROMPT)] == pytest.approx(generated.logprobs.top_logprobs[0], abs=1e-4)
    assert "".join(found.tokens) == echoed.text
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
    alone = complete(client, prompt, max_tokens=0, logprobs=2, echo=True)
    assert alone.choices[0].logprobs.token_logprobs == pytest.approx(found.token_logprobs[: len(prompt)], abs=1e-4)
    assert alone.usage.completion_tokens == len(ids_of(alone.choices[0])) == 0

    asked = {"prompt_logprobs": 2}
    answer = complete(client, prompt, n=2, stop=["\x00"], extra_body=asked)
    for choice in answer.choices:
        first, *places = choice.prompt_logprobs
        assert first is None
        assert [place[str(token)]["logprob"] for place, token in zip(places, prompt[1:], strict=True)] == pytest.approx(
            found.token_logprobs[1 : len(prompt)], abs=1e-4
        )
        assert all(sorted(one["rank"] for one in place.values())[:2] == [1, 2] for place in places)
        assert places[-1][str(prompt[-1])]["rank"] == 1, "greedy took it"
    messages: Any = [{"role": "user", "content": "hi"}]
    chat: Any = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=asked)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_a_chat_streams(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stop_text_ends_a_choice_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    place = next(index for index in range(8, 38) if whole.find(whole[index : index + 2]) == index)
    stop = whole[place : place + 2]
    for stops in (stop, ["\x00\x01", stop]):
        answer = complete(client, max_tokens=40, stop=stops)
        assert answer.choices[0].text == whole[:place]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 40
    chunks = complete(client, max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:place]


def test_a_stop_token_ends_a_choice(client: openai.OpenAI) -> None:
    whole = ids_of(complete(client).choices[0])
    place = next(index for index in range(3, 12) if whole.index(whole[index]) == index)
    answer = complete(client, extra_body={"stop_token_ids": [whole[place]]})
    assert ids_of(answer.choices[0]) == whole[: place + 1]
    assert answer.choices[0].finish_reason == "stop"


def test_beams(client: openai.OpenAI) -> None:
    import openai

    answer = complete(client, n=3, max_tokens=5, extra_body={"use_beam_search": True})
    outputs = [tuple(ids_of(choice)) for choice in answer.choices]
    assert len(set(outputs)) == 3
    with pytest.raises(openai.BadRequestError, match="stream"):
        complete(client, n=3, stream=True, extra_body={"use_beam_search": True})
    with pytest.raises(openai.BadRequestError, match="max_beam_width"):
        complete(client, n=4, extra_body={"use_beam_search": True})


def test_processors_of_logits(client: openai.OpenAI) -> None:
    assert ids_of(complete(client, logit_bias={"77": 100}).choices[0]) == [77] * 12
    plain = ids_of(complete(client, max_tokens=40).choices[0])
    penalised = ids_of(complete(client, max_tokens=40, frequency_penalty=2, presence_penalty=2).choices[0])
    assert len(set(penalised)) >= len(set(plain))
    assert complete(client, extra_body={"ignore_eos": False, "min_tokens": 6}).usage.completion_tokens >= 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "a"]}, "mixed types"),
        ({"prompt": [1, 4096]}, "not in the vocabulary"),
        ({"prompt": list(range(600))}, "max_seq_len"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [[]]}, "at least one"),
        ({"n": 0}, "n:"),
        ({"stop": [""]}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs: .* leave out stream"),
        ({"echo": True, "logprobs": 1, "stream": True}, "leave out stream"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"priority": "high"}}, "priority"),
    ],
)
def test_bad_fields_are_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], message: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=message) as caught:
        complete(client, **fields)
    assert caught.value.type == "invalid_request_error"
    assert "Traceback" not in str(caught.value)


def status_of(url: str, content: bytes | None = None, key: str = KEY) -> int:
    request = urllib.request.Request(url, content, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        json.load(error)
        return error.code


def test_bodies_that_are_no_requests(server: ServerProcess) -> None:
    url = f"{server.url}/v1/completions"
    assert status_of(url, b"{") == 400
    assert status_of(url, b"[]") == 400
    assert status_of(url, b'{"prompt": "\\ud800"}') == 400
    assert status_of(url, b"[" * 50_000) == 400
    assert status_of(url, b'{"prompt": "' + b"a" * 100_001 + b'"}') == 413
    assert status_of(url) == 405
    assert status_of(f"{server.url}/v2") == 404


def test_the_api_key_is_needed(server: ServerProcess) -> None:
    assert status_of(f"{server.url}/v1/models", key="wrong") == 401
    assert status_of(f"{server.url}/v1/completions", b'{"prompt": "a"}', key="") == 401
    assert status_of(f"{server.url}/health", key="") == 200


def test_the_description_names_all_fields(server: ServerProcess) -> None:
    with urllib.request.urlopen(f"{server.url}/openapi.json") as response:
        described = json.load(response)
    fields = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "stream", "n", "ignore_eos", "prompt_logprobs", "priority"} <= set(fields)


def test_iterations_are_in_the_form_of_the_executor(server: ServerProcess, client: openai.OpenAI) -> None:
    complete(client, max_tokens=3)
    with urllib.request.urlopen(f"{server.url}/iterations") as response:
        latest = json.load(response)[-1]
    assert latest["numActiveRequests"] == 1
    assert latest["kvCacheStats"]["usedNumBlocks"] >= 1


def test_the_recording_replays_to_the_same_tokens(
    server: ServerProcess, client: openai.OpenAI, recorded: Path, tmp_path: Path
) -> None:
    """The last test: it ends the server."""
    prompts = [[length + place for place in range(length)] for length in range(3, 40, 4)]
    served = [ids_of(complete(client, prompt, max_tokens=17).choices[0]) for prompt in prompts]
    status, printed = server.end()
    assert status == 0, printed
    assert "Traceback" not in printed
    summary = json.loads((recorded / "summary.json").read_text())
    assert not summary["partial"]
    assert summary["requests"]["failed"] == 0

    responses = tmp_path / "responses.json"
    run_trace(
        str(recorded),
        RunConfig(
            device="cpu",
            model="tiny",
            max_seq_len=512,
            max_beam_width=3,
            responses_json=str(responses),
            output=str(tmp_path / "replayed"),
            time_scale=0.0,
            quiet=True,
            cpu_threads=1,
        ),
    )
    replayed = [row["response_tokens"] for row in json.loads(responses.read_text())]
    assert replayed[-len(served) :] == served
