"""Runs against servers that are not ours: what a client sees of good and of bad streams, and what is said of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.endpoint import server as endpoint_server
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.report.charts import ENDPOINT_CHARTS
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from tests.endpoint.fake_endpoint import STREAM, Answer, FakeEndpoint, Received, Writer, fake_endpoint, token, usage
from tests.report.test_schema import check
from tests.serving.clients import server_process

ROOT = Path(__file__).parents[2]
COMPARED = [
    "duration_s",
    "request_throughput_per_s",
    "output_throughput_tokens_per_s",
    "total_throughput_tokens_per_s",
    "ttft_s.mean",
    "ttft_s.p50",
    "ttft_s.p99",
    "itl_s.mean",
    "itl_s.p99",
    "tpot_s.mean",
    "tpot_s.p99",
    "e2e_s.mean",
    "e2e_s.p99",
    "requests.failed",
]


def trace(folder: Path, count: int = 3, **fields: Any) -> str:
    rows = [
        {"request_id": 10 + index, "arrival_s": 0.005 * index, "prompt_len": 4, "output_len": 3, **fields}
        for index in range(count)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def replay(server: FakeEndpoint, folder: Path, count: int = 3, output_len: int = 3, **settings: Any) -> dict[str, Any]:
    """The summary of a run of requests of 4 prompt tokens."""
    values: dict[str, Any] = {"warm_up": 0, "output": str(folder / "run"), **settings}
    return run_trace(trace(folder, count, output_len=output_len), RunConfig(endpoint=server.url, **values)).summary


def rows(folder: Path, name: str = "requests") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]


async def three_tokens(_: Received, writer: Writer) -> None:
    await writer.raw(STREAM)
    for text in " a", " b", " c":
        await writer.event(token(text))
    await writer.event(usage(3))
    await writer.event("[DONE]")
    await writer.end()


def stream_of(*events: Any, pause_s: float = 0.0) -> Answer:
    """Streams these events, each in a part of its own, and ends well."""

    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        for event in events:
            await writer.event(event)
            await asyncio.sleep(pause_s)
        await writer.event("[DONE]")
        await writer.end()

    return answer


def test_a_run_directory_as_of_every_run_but_without_iterations(tmp_path: Path) -> None:
    with fake_endpoint(three_tokens) as server:
        summary = replay(server, tmp_path, count=4, slo="e2e=10s")
    assert summary["requests"] == {"total": 4, "completed": 4, "failed": 0}
    assert summary["prompt_tokens"] == 28, "as the server counts them"
    assert summary["output_tokens"] == 12
    assert summary["iterations"] is None
    assert summary["kv_blocks"]["max"] is None
    assert summary["queue_time_s"]["mean"] is None
    assert summary["goodput_share"] == 1
    assert summary["endpoint"]["chunk_tokens"] == {"usage": 4}
    assert summary["arrivals"]["requested_rate_per_s"] == pytest.approx(200)
    assert check(tmp_path / "run") == {"run.json", "summary.json", "spans.jsonl", "requests.jsonl", "trace.jsonl"}
    for line in rows(tmp_path):
        assert line["arrival_s"] <= line["sent_s"] <= line["first_token_s"] <= line["end_s"]
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"])
    spans = [span["phase"] for span in rows(tmp_path, "spans") if span["request_id"] == 10]
    assert spans == ["waiting", "context", "generation"]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["endpoint"] == {"url": server.url, "type": "openai", "model": "mock"}
    assert not {"policy", "max_batch_size", "device", "endpoint_api_key"} & set(run["config"])


def test_the_figures_of_a_killed_run_are_those_of_the_summary(tmp_path: Path) -> None:
    with fake_endpoint(three_tokens) as server:
        summary = replay(server, tmp_path, count=25)
    known = figures(load_run(tmp_path / "run"))
    assert known == summary
    (tmp_path / "run" / "summary.json").unlink()
    found = figures(load_run(tmp_path / "run"))
    assert found.pop("partial")
    left_out = {"arrivals", "partial", "endpoint"}
    assert {name: found[name] for name in found if name not in left_out} == {
        name: summary[name] for name in summary if name not in left_out
    }


@pytest.mark.parametrize(
    ("events", "counts", "source"),
    [
        # Token ids, the usage of each chunk, and log-probabilities say how many tokens a chunk has.
        ([token(token_ids=[1]), token(token_ids=[2, 3, 4]), usage(4)], [1, 3], "stream"),
        (
            [token() | {"usage": {"completion_tokens": 2}}, token() | {"usage": {"completion_tokens": 5}}],
            [2, 3],
            "stream",
        ),
        ([token(logprobs={"tokens": ["a", "b"]}), token(logprobs={"tokens": ["c"]})], [2, 1], "stream"),
        # The usage at the end: a token a chunk, with text or without; else divided evenly.
        ([token(), token(), usage(2)], [1, 1], "usage"),
        ([token(), token(""), token(), usage(3)], [1, 1, 1], "usage"),
        ([token(), token(""), token(), usage(2)], [1, 1], "usage"),
        ([token(), token(), usage(5)], [3, 2], "evenly"),
        # The last chunk may be the end token, which has no text.
        ([token(), token(), token("", finish_reason="stop"), usage(3)], [1, 1, 1], "usage"),
        ([token(), token(""), token(), token("", finish_reason="stop"), usage(3)], [1, 1, 1], "usage"),
        ([token(), token(), token("", finish_reason="stop"), usage(2)], [1, 1], "usage"),
        ([token(token_ids=[1, 2]), token("", finish_reason="stop"), usage(3)], [2, 1], "stream"),
        # Nothing says it.
        ([token(), token()], [1, 1], "chunks"),
        # A chat begins with a chunk of the role.
        (
            [
                {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
                {"choices": [{"delta": {"content": "a"}}]},
                {"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": "length"}]},
                usage(2),
            ],
            [1, 1],
            "usage",
        ),
    ],
)
def test_tokens_of_chunks(events: list[Any], counts: list[int], source: str, tmp_path: Path) -> None:
    with fake_endpoint(stream_of(*events)) as server:
        summary = replay(server, tmp_path, count=1, output_len=5)
    (line,) = rows(tmp_path)
    assert "warnings" not in line
    assert (line["chunk_tokens"], line["chunks"], line["output_len"]) == (source, len(counts), sum(counts))
    (generation,) = (span for span in rows(tmp_path, "spans") if span["phase"] == "generation")
    assert generation["chunks"] == counts
    assert summary["endpoint"]["tokens_per_chunk"]["max"] == max(counts)


@pytest.mark.parametrize(
    ("events", "counts", "source", "warning"),
    [
        # More tokens than the 3 that were asked for.
        ([token(token_ids=[1, 2]), token(token_ids=[3, 4]), usage(4)], [2, 1], "stream", "more_tokens_than_asked"),
        ([token()] * 5, [1, 1, 1], "chunks", "more_tokens_than_asked"),
        ([token(), token(), usage(1_000_000)], [3], "evenly", "more_tokens_than_asked"),
        # A usage that the stream shows to be wrong.
        ([token(token_ids=[1]), token(token_ids=[2]), usage(3)], [1, 1], "stream", "usage_contradicts_stream"),
        ([token(), token(), token(), usage(1)], [1, 1, 1], "chunks", "usage_contradicts_stream"),
        ([token(), token(), usage(0)], [1, 1], "chunks", "usage_contradicts_stream"),
    ],
)
def test_tokens_that_cannot_be_are_not_counted(
    events: list[Any], counts: list[int], source: str, warning: str, tmp_path: Path
) -> None:
    with fake_endpoint(stream_of(*events)) as server:
        summary = replay(server, tmp_path, count=2)
    for line in rows(tmp_path):
        assert (line["chunk_tokens"], line["output_len"], line["warnings"]) == (source, sum(counts), [warning])
    assert summary["output_tokens"] == 2 * sum(counts)
    assert summary["endpoint"]["warnings"] == {warning: 2}
    printed = CliRunner().invoke(main, ["report", str(tmp_path / "run")]).output
    assert "2 of 2 answers" in " ".join(printed.split())
    assert check(tmp_path / "run")


def test_the_tokens_of_one_chunk_have_no_gap_between_them(tmp_path: Path) -> None:
    events = [token(token_ids=[1, 2]), token(token_ids=[3, 4, 5]), token(token_ids=[6])]
    with fake_endpoint(stream_of(*events, pause_s=0.02)) as server:
        summary = replay(server, tmp_path, count=1, output_len=6)
    (line,) = rows(tmp_path)
    times_s = next(span["chunk_s"] for span in rows(tmp_path, "spans") if span["phase"] == "generation")
    assert summary["itl_s"]["min"] == 0
    assert summary["itl_s"]["mean"] == pytest.approx(line["tpot_s"]) == pytest.approx((times_s[2] - times_s[0]) / 5)
    assert summary["itl_s"]["max"] == pytest.approx(max(times_s[1] - times_s[0], times_s[2] - times_s[1]))
    gaps_s = [times_s[1] - times_s[0], times_s[2] - times_s[1]]
    assert summary["endpoint"]["chunk_gap_s"]["min"] == pytest.approx(min(gaps_s), abs=1e-6)


def test_a_tokenizer_counts_the_tokens_of_chunks(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "endpoint_prompts": "text"}
    with fake_endpoint(stream_of(token("a b a"), token(" b a"))) as server:
        replay(server, tmp_path, count=1, **settings)
        assert rows(tmp_path)[0]["chunk_tokens"] == "tokenizer"
        assert set(server.received[0].body["prompt"].split()) <= {"a", "b", "[UNK]"}
    (generation,) = (span for span in rows(tmp_path, "spans") if span["phase"] == "generation")
    assert generation["chunks"] == [3, 2]


def test_events_may_be_split_anywhere(tmp_path: Path) -> None:
    """Within a line, within a character of several bytes, with comments and the line ends of Windows."""
    events = [token("é€😀", token_ids=[1]), token("ü", token_ids=[2, 3]), usage(3)]
    texts = [f"event: x\r\ndata:{json.dumps(one, ensure_ascii=False)}\r\n\r\n" for one in events]
    content = "".join([": ping\r\n\r\n", *texts, "data: [DONE]\n\n"]).encode()

    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        for place in range(0, len(content), 7):
            await writer.part(content[place : place + 7])
            await asyncio.sleep(0)
        await writer.end()

    with fake_endpoint(answer) as server:
        summary = replay(server, tmp_path, count=2)
    assert summary["output_tokens"] == 6
    assert summary["requests"]["failed"] == 0


def test_line_ends_of_both_kinds_in_one_event(tmp_path: Path) -> None:
    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        for content in (json.dumps(token()), "[DONE]"):
            await writer.part(f"data: {content}\r\n\n")
            await asyncio.sleep(0)
        await writer.end()

    with fake_endpoint(answer) as server:
        assert replay(server, tmp_path, count=2)["requests"]["completed"] == 2


async def closes_early(_: Received, writer: Writer) -> None:
    await writer.raw(STREAM)
    await writer.event(token())
    writer.close()


async def ends_without_done(_: Received, writer: Writer) -> None:
    await writer.raw(STREAM)
    await writer.event(token())
    await writer.end()


async def no_http(_: Received, writer: Writer) -> None:
    await writer.raw("what?\r\n\r\n")


async def not_streamed(_: Received, writer: Writer) -> None:
    await writer.json({"choices": [{"text": "abc", "finish_reason": "stop"}]})


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (closes_early, "closed_early", "closed the connection before"),
        (ends_without_done, "closed_early", "before the answer was complete"),
        (no_http, "malformed_http", "not valid HTTP"),
        (not_streamed, "malformed_stream", "expected server-sent events, but got application/json"),
        (stream_of(token(), "{not json"), "malformed_stream", "no chunk of the API"),
        (stream_of(token(), {"choices": 3}), "malformed_stream", "no chunk of the API"),
        (stream_of(token(), {"error": {"message": "out of memory", "code": 500}}), "server_error", "out of memory"),
        (stream_of({"object": "error", "message": "too long"}), "server_error", "too long"),
        (stream_of(), "no_output", "no token"),
        (lambda _, writer: writer.json({"error": {"message": "no such id"}}, 400), "http_400", "no such id"),
        (lambda _, writer: writer.json({"detail": "busy"}, 503), "http_503", "busy"),
        (lambda _, writer: writer.raw("HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops"), "http_500", "oops"),
    ],
)
def test_bad_answers_are_failures_of_a_kind(answer: Answer, kind: str, words: str, tmp_path: Path) -> None:
    with fake_endpoint(answer) as server:
        result = run_trace(trace(tmp_path), RunConfig(endpoint=server.url, warm_up=0, output=str(tmp_path / "run")))
    assert result.failed == 3
    assert result.summary["endpoint"]["errors"] == {kind: 3}
    assert all(words in line["error"] and line["outcome"] == "failed" for line in rows(tmp_path))
    assert check(tmp_path / "run")
    assert len(server.received) == 3, "no request was repeated"


def test_a_silent_server_is_a_timeout(tmp_path: Path) -> None:
    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        await writer.event(token())
        await asyncio.sleep(30)

    with fake_endpoint(answer) as server:
        summary = replay(server, tmp_path, count=1, endpoint_timeout=1.0)
    assert summary["endpoint"]["errors"] == {"timeout": 1}


def test_retries_are_off_by_default_and_recorded(tmp_path: Path) -> None:
    async def answer(request: Received, writer: Writer) -> None:
        if sum(one.body == request.body for one in server.received) < 3:
            await writer.json({"error": {"message": "full"}}, 429, "Retry-After: 0\r\n")
        else:
            await three_tokens(request, writer)

    with fake_endpoint(answer) as server:
        assert replay(server, tmp_path, count=2, endpoint_retries=1)["endpoint"]["errors"] == {"http_429": 2}
        server.received.clear()
        summary = replay(server, tmp_path, count=2, endpoint_retries=2, overwrite=True)
    assert summary["requests"]["completed"] == 2
    assert summary["endpoint"]["retries"] == {"http_429": 4}
    assert [line["retries"] for line in rows(tmp_path)] == [["http_429", "http_429"]] * 2
    assert "http_429 4" in CliRunner().invoke(main, ["report", str(tmp_path / "run")]).output


def test_connections_are_reused_and_stale_ones_replaced(tmp_path: Path) -> None:
    with fake_endpoint(three_tokens) as server:
        summary = replay(server, tmp_path, count=20, concurrency=2)
        assert summary["requests"]["completed"] == 20
        assert server.connections <= 2
        assert summary["endpoint"]["connections"] == server.connections

    async def once(request: Received, writer: Writer) -> None:
        await three_tokens(request, writer)
        await asyncio.sleep(0.002)
        writer.close()

    with fake_endpoint(once) as server:
        summary = replay(server, tmp_path, count=10, concurrency=1, overwrite=True)
    assert summary["requests"]["completed"] == 10


def test_arrivals_sessions_concurrency_and_duration_are_those_of_every_client(tmp_path: Path) -> None:
    lines = [
        {"request_id": 1, "arrival_s": 0.0, "prompt_len": 2, "output_len": 3},
        {"request_id": 2, "arrival_s": 0.001, "prompt_len": 2, "output_len": 3, "after": 1, "think_s": 0.03},
        {"request_id": 3, "arrival_s": 0.02, "prompt_len": 2, "output_len": 3},
        {"request_id": 4, "arrival_s": 9.0, "prompt_len": 2, "output_len": 3},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with fake_endpoint(three_tokens) as server:
        config = RunConfig(endpoint=server.url, warm_up=0, duration=8.0, output=str(tmp_path / "run"))
        summary = run_trace(str(path), config).summary
    found = {line["request_id"]: line for line in rows(tmp_path)}
    assert set(found) == {1, 2, 3}
    assert summary["requests"]["total"] == 3
    assert found[2]["arrival_s"] >= found[1]["end_s"] + 0.03


@pytest.mark.parametrize(
    ("settings", "path", "has", "has_not"),
    [
        (
            {},
            "/v1/completions",
            {
                "max_tokens": 3,
                "ignore_eos": True,
                "temperature": 0.0,
                "model": "mock",
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            ["seed"],
        ),
        ({"ignore_eos": False}, "/v1/completions", {"stream_options": {"include_usage": True}}, ["ignore_eos"]),
        (
            {"extra_body": '{"temperature": null, "user": "me", "stream_options": {"x": 1}}'},
            "/v1/completions",
            {"user": "me", "stream_options": {"include_usage": True, "continuous_usage_stats": True, "x": 1}},
            ["temperature"],
        ),
        ({"temperature": 0.5, "top_k": 4, "seed": 3}, "/v1/completions", {"top_k": 4, "top_p": 1.0, "seed": 13}, []),
        ({"endpoint_type": "openai-chat"}, "/v1/chat/completions", {"max_tokens": 3}, ["prompt"]),
        (
            {"endpoint_type": "trtllm-serve", "responses_json": "r.json"},
            "/v1/completions",
            {"detokenize": False},
            ["return_token_ids"],
        ),
        ({"responses_json": "r.json"}, "/v1/completions", {"return_token_ids": True}, []),
    ],
)
def test_bodies(
    settings: dict[str, Any], path: str, has: dict[str, Any], has_not: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_endpoint(three_tokens) as server:
        replay(server, tmp_path, count=1, **settings)
    (request,) = server.received
    assert request.path == path
    assert has.items() <= request.body.items()
    assert not set(has_not) & set(request.body)
    if path == "/v1/completions":
        assert len(request.body["prompt"]) == 4
        assert max(request.body["prompt"]) < 32_000
    else:
        assert len(request.body["messages"][0]["content"].split()) == 4


def test_triton_text_and_ids(tmp_path: Path) -> None:
    async def answer(request: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        for _ in range(3):
            ids = {"output_ids": [5]} if "input_ids" in request.body else {"text_output": " a"}
            await writer.event({"model_name": "x", "model_version": "1", **ids})
        await writer.end()

    ready: dict[str, Any] = {"v2__models__ensemble__ready": (200, ""), "v2__models__tensorrt_llm__ready": (200, "")}
    with fake_endpoint(answer, **ready) as server:
        summary = replay(server, tmp_path, count=1, endpoint_type="triton")
        assert summary["endpoint"]["chunk_tokens"] == {"chunks": 1}
        replay(
            server,
            tmp_path,
            count=1,
            endpoint_type="triton",
            endpoint_prompts="tokens",
            overwrite=True,
            responses_json=str(tmp_path / "responses.json"),
        )
        with pytest.raises(InputError, match="no model nothing that is ready"):
            replay(server, tmp_path, endpoint_type="triton", model="nothing", overwrite=True)
    text, ids = server.received
    assert text.path == "/v2/models/ensemble/generate_stream"
    assert text.body["max_tokens"] == text.body["min_tokens"] == 3
    assert len(text.body["text_input"].split()) == 4
    assert ids.path == "/v2/models/tensorrt_llm/generate_stream"
    assert ids.body["request_output_len"] == 3
    assert len(ids.body["input_ids"]) == ids.body["input_lengths"] == 4
    assert json.loads((tmp_path / "responses.json").read_text()) == [{"response_id": 10, "response_tokens": [5, 5, 5]}]


def test_the_key_is_sent_and_not_recorded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("IFBBENCH_API_KEY", "from-environment")
    with fake_endpoint(three_tokens) as server:
        replay(server, tmp_path, count=1)
        replay(server, tmp_path, count=1, endpoint_api_key="given-key", overwrite=True)
    assert [one.headers["authorization"] for one in server.received] == ["Bearer from-environment", "Bearer given-key"]
    assert "given-key" not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.json*"))


def test_metrics_are_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "POLL_INTERVAL_S", 0.02)

    async def answer(request: Received, writer: Writer) -> None:
        while max(server.asked[path] for path in ("/metrics", "/other", "/none")) < 2:  # the client has the first ones
            await asyncio.sleep(0.01)
        await three_tokens(request, writer)

    text = '# HELP x y\nvllm:num_requests_waiting{m="a b"} 2\nh_bucket{le="1"} 3\nh_sum 4.5\nnan_one NaN\n'
    with fake_endpoint(answer, metrics=(200, text), other=(200, [{"iter": 1, "numQueuedRequests": 5}])) as server:
        summary = replay(server, tmp_path, count=2, poll_metrics=True)
        assert summary["endpoint"]["metrics_samples"] >= 1
        assert rows(tmp_path, "metrics")[0]["values"] == {'vllm:num_requests_waiting{m="a b"}': 2.0, "h_sum": 4.5}
        assert "metrics.jsonl" in check(tmp_path / "run")
        assert "num_requests_waiting" in CliRunner().invoke(main, ["why", str(tmp_path / "run")]).output
        server.asked.clear()
        replay(server, tmp_path, poll_metrics=True, metrics_url=f"{server.url}/other", overwrite=True)
        assert rows(tmp_path, "metrics")[0]["iterations"] == [{"iter": 1, "numQueuedRequests": 5}]
        server.asked.clear()
        summary = replay(server, tmp_path, poll_metrics=True, metrics_url=f"{server.url}/none", overwrite=True)
        assert summary["endpoint"]["metrics_errors"] >= 1


def test_servers_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    def message(server: FakeEndpoint | None, **settings: Any) -> str:
        url = server.url if server else "http://127.0.0.1:9"
        config = RunConfig(**({"endpoint": url, "output": str(tmp_path / "run")} | settings))
        with pytest.raises(InputError) as raised:
            run_trace(trace(tmp_path), config)
        assert not (tmp_path / "run").exists()
        return str(raised.value)

    assert "Start the server" in message(None)
    assert "expected http" in message(None, endpoint="ftp://host")
    assert "queue_time" in message(None, slo="queue_time=1s")
    with fake_endpoint(three_tokens, models=("one", "two")) as server:
        assert "no such model, but one, two" in message(server, model="three")
        server.gets["/v1/models"] = (401, {"error": {"message": "The API key is missing."}})
        assert "--endpoint_api_key" in message(server)
        server.gets["/v1/models"] = (404, {})
        assert "give its name as --model" in message(server)
    with fake_endpoint(lambda _, writer: writer.json({"message": "id 31999 is too large"}, 400)) as server:
        refusal = message(server)
        assert "the warm-up request failed: status 400: id 31999 is too large." in refusal
        assert "--endpoint_vocab_size 32000; if the server's vocabulary is smaller, give its size" in refusal
        assert "--endpoint_vocab_size" not in message(server, endpoint_prompts="text")


def test_settings_of_an_engine_and_of_an_endpoint_exclude_each_other() -> None:
    with pytest.raises(InputError, match="--max_batch_size: the server at --endpoint has settings of its own"):
        RunConfig(endpoint="http://host", max_batch_size=3)
    with pytest.raises(InputError, match="--endpoint_retries: is for a server; add --endpoint"):
        RunConfig(endpoint_retries=1)
    with pytest.raises(InputError, match="--extra_body: not valid JSON"):
        RunConfig(endpoint="http://host", extra_body="{")
    with pytest.raises(InputError, match="expected keys and values"):
        RunConfig(endpoint="http://host", extra_body="[1]")


@pytest.mark.usefixtures("without_layout")
def test_commands_read_the_directory(tmp_path: Path) -> None:
    def output(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(main, list(words))
        assert result.exit_code == status, result.output
        return result.output

    run, simulated = str(tmp_path / "run"), str(tmp_path / "simulated")
    with fake_endpoint(three_tokens) as server:
        replay(server, tmp_path, count=25)
        config = RunConfig(endpoint=server.url, warm_up=0)
        assert summarise_run(trace(tmp_path, 25), config)["requests"]["completed"] == 25
        steady = replay(server, tmp_path, count=25, enable_steady_state=True, overwrite=True)
    assert "steady_state" in steady
    assert "Unknown, because the server is not ours" in output("report", run)
    output("report", run, "--result_json", str(tmp_path / "result.json"), "--result_format", "vllm")
    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 25
    output("report", run, "--report_json", str(tmp_path / "report.json"), "--output_csv", str(tmp_path / "a.csv"))
    assert "Where requests spent their time" in (shown := output("why", run))
    assert '--server "vllm serve' in shown, "what is needed to try other settings"
    assert '--server "vllm serve' in output("why", run, "--what_if", "max_batch_size=8", status=2)
    started = ("--server", "vllm serve llama-3.1-8b --max-num-seqs 1 --port 1", "--device", "l4")
    assert "is this the GPU" in output("why", run, *started, status=2)
    assert json.loads(output("why", run, "--json"))["bound_by"] is None
    assert len(json.loads(output("why", run, "--request", "10"))["life"]) >= 2
    assert "has no iterations" in output("why", run, "--iteration", "3", status=2)
    drawn = output("plot", run, "--format", "png")
    assert [name for name in ENDPOINT_CHARTS if f"{name}.png" not in drawn] == ["server"]
    assert "has no iterations" in output("plot", run, "--only", "kv_cache", status=2)
    assert "has no iterations" in output("watch", run, status=2)
    assert output("export", run, "--format", "perfetto").strip().endswith("trace.perfetto-trace")
    page = Path(output("plot", run, "--html").split()[-1]).read_text()
    assert page.count('"svg":') == len(ENDPOINT_CHARTS) - 1, "there are no metrics of the server"
    assert "Unknown, because the server is not ours" in page
    assert "--poll_metrics" in output("plot", run, "--only", "server", status=2)
    output("export", run)
    output("run", run, "--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--output", simulated, "--quiet")
    table = output("compare", simulated, run)
    assert "Decisions of a and b are not compared" in table
    assert "Settings: enable_steady_state False → True\n" in table, "nothing of the trace or the server"
    names = [line.split()[0] for line in table[table.index("Figure") :].splitlines()[1:] if line.strip()]
    assert names[: len(COMPARED)] == COMPARED
    output("plot", simulated, run, "--overlay", "--html", status=2)
    found = json.loads(output("compare", simulated, run, "--json"))
    assert found["same_trace"]
    assert found["first_divergence"] is None
    assert not found["same_schedule"]
    assert found["figures"]["ttft_s.p99"]["b"] > 0
    assert "longer" in found["lost"][0]["cause"] if found["lost"] else found["gained"]


def test_an_interrupted_run_leaves_readable_results(tmp_path: Path) -> None:
    async def slow(request: Received, writer: Writer) -> None:
        if request.body["max_tokens"] == 3:
            await three_tokens(request, writer)
        else:
            await asyncio.sleep(600)

    with fake_endpoint(slow) as server:
        # The last four are sent when the first four have ended.
        lines = [{"request_id": index, "arrival_s": 0.0, "prompt_len": 4, "output_len": 3} for index in range(4)]
        lines += [
            line | {"request_id": index, "output_len": 4, "after": index - 4}
            for index, line in enumerate(lines, start=4)
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [
            sys.executable,
            "-m",
            "ifbbench",
            "run",
            str(path),
            "--endpoint",
            server.url,
            "--warm_up",
            "0",
            "--output",
            str(tmp_path / "run"),
            "--quiet",
        ]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        while len(server.received) < 8 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "4 of 8 requests were done" in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["partial"]
    assert summary["requests"] == {"total": 8, "completed": 4, "failed": 0}
    assert CliRunner().invoke(main, ["report", str(tmp_path / "run")]).exit_code == 0


def test_failed_requests_are_the_exit_status(tmp_path: Path) -> None:
    with fake_endpoint(closes_early) as server:
        words = ["run", trace(tmp_path), "--endpoint", server.url, "--warm-up", "0", "--output", str(tmp_path / "run")]
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "Errors by kind: closed_early 3." in result.output


@pytest.mark.parametrize("is_idle", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_client_measures_agrees_with_what_our_server_recorded(is_idle: bool, tmp_path: Path) -> None:
    """Of a simulated device: a client sees nothing before the server made it; on an idle host, latencies within 5 % or
    2 ms."""
    recorded = tmp_path / "recorded"
    lines = [
        {"request_id": index, "arrival_s": 0.1 * index, "prompt_len": 60 + 20 * index, "output_len": 12 + index}
        for index in range(16)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with server_process("--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--record", str(recorded)) as server:
        config = RunConfig(endpoint=server.url, warm_up=2, output=str(tmp_path / "run"), poll_metrics=True)
        summary = run_trace(str(path), config).summary
        server.end()
    own = {line["prompt_len"]: line for line in map(json.loads, (recorded / "requests.jsonl").read_text().splitlines())}
    differences = []
    for line in rows(tmp_path):
        there = own[line["prompt_len"]]
        assert line["output_len"] == there["output_len"] == line["max_new_tokens"]
        # The server's request arrives when it has read it.
        offset_s = line["sent_s"] - line["arrival_s"]
        assert line["e2e_s"] - offset_s >= there["e2e_s"] - 0.002
        for name, found_s in (("ttft_s", line["ttft_s"] - offset_s), ("tpot_s", line["tpot_s"])):
            differences.append(abs(found_s - there[name]) / max(0.002, 0.05 * there[name]))
        assert line["ttft_s"] - offset_s >= there["ttft_s"] - 0.002
    differences.sort()
    assert not is_idle or differences[len(differences) // 2] < 1, "some are delayed"
    assert summary["endpoint"]["chunk_tokens"] == {"stream": 16}
    assert any("kv_cache_block_metrics" in name for name in rows(tmp_path, "metrics")[-1]["values"])


def test_tokens_of_a_replay_against_our_server_are_those_of_the_engine(tmp_path: Path) -> None:
    path = trace(tmp_path, 6, output_len=9)
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    common: dict[str, Any] = {"time_scale": 0.0, "seed": 3}
    room = 4096  # tokens: the pool of the default takes longer to make than all tokens
    config = RunConfig(
        device="cpu",
        cpu_threads=1,
        max_tokens_in_paged_kvcache=room,
        output=str(tmp_path / "a"),
        responses_json=str(ours),
        **common,
    )
    run_trace(path, config)
    pool = ("--max_tokens_in_paged_kvcache", str(room))
    with server_process("--device", "cpu", "--model", "tiny", "--cpu_threads", "1", "--seed", "3", *pool) as server:
        vocabulary = 4096  # of tiny, so that the same prompts are drawn
        config = RunConfig(
            endpoint=server.url,
            output=str(tmp_path / "b"),
            responses_json=str(theirs),
            endpoint_vocab_size=vocabulary,
            **common,
        )
        run_trace(path, config)
    assert json.loads(theirs.read_text()) == json.loads(ours.read_text())
