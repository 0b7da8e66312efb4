"""Access logs of gateways and proxies, and spans, by the names of fields that docs/traces.md lists."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ifbbench.workload.reading import read_trace

EPOCH = 1_764_270_000
CLOCK = "2025-11-27T19:00:0{}.250Z"
USAGE = {"prompt_tokens": 100, "completion_tokens": 12}


def litellm(number: int) -> dict[str, Any]:
    """The standard payload; every third one failed."""
    is_failure = number % 3 == 2
    return {
        "status": "failure" if is_failure else "success",
        "startTime": EPOCH + number + 0.25,
        "endTime": EPOCH + number + 2,
        "prompt_tokens": 100,
        "completion_tokens": 12,
        "error_str": "rate limit" if is_failure else None,
    }


# Row `number` of a log, and the field in which its requests arrive.
LOGS: Mapping[str, tuple[Any, str]] = {
    "litellm": (litellm, "startTime"),
    "envoy ai gateway": (
        lambda number: {
            "start_time": CLOCK.format(number),
            "response_code": "503" if number == 2 else "200",
            "genai_tokens_input": "-" if number == 2 else "100",
            "genai_tokens_output": "-" if number == 2 else "12",
        },
        "start_time",
    ),
    "aigw": (
        lambda number: {
            "start_time": CLOCK.format(number),
            "response_code": 503 if number == 2 else 200,
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 12,
        },
        "start_time",
    ),
    "higress": (
        lambda number: {
            "ai_log": json.dumps({"model": "qwen", "input_token": 100, "output_token": 12}),
            "start_time": CLOCK.format(number),
            "response_code": "502" if number == 2 else "200",
        },
        "start_time",
    ),
    "kong": (
        lambda number: {
            "started_at": 1000 * (EPOCH + number),
            "response": {"status": 500 if number == 2 else 200},
            "ai": {"proxy": {"usage": USAGE | {"time_per_token": 16}}},
        },
        "started_at",
    ),
    "cloudflare": (
        lambda number: {
            "created_at": CLOCK.format(number),
            "success": number != 2,
            "tokens_in": 100,
            "tokens_out": 12,
        },
        "created_at",
    ),
    "azure api management": (
        lambda number: {
            "TimeGenerated": CLOCK.format(number),
            "PromptTokens": 100,
            "CompletionTokens": 0 if number == 2 else 12,
        },
        "TimeGenerated",
    ),
    "bedrock": (
        lambda number: {
            "timestamp": CLOCK.format(number),
            "error": "throttled" if number == 2 else None,
            "input": {"inputTokenCount": 100},
            "output": {"outputTokenCount": 12},
        },
        "timestamp",
    ),
    # $request_time is how long the request took.
    "nginx": (
        lambda number: {
            "msec": f"{EPOCH + number}.250",
            "status": "499" if number == 2 else "200",
            "request_time": "1.234",
            "prompt_tokens": "100",
            "completion_tokens": "12",
        },
        "msec",
    ),
    # Docker's own lines, with the time at which the line came to it.
    "docker": (
        lambda number: {
            "log": json.dumps({"ts": EPOCH + number, "status": 500 if number == 2 else 200, "usage": USAGE}) + "\n",
            "stream": "stdout",
            "time": CLOCK.format(7),
        },
        "ts",
    ),
    # input_tokens of Anthropic's API does not count what was in the cache, or written to it.
    "anthropic": (
        lambda number: {
            "timestamp": CLOCK.format(number),
            "status": 529 if number == 2 else 200,
            "usage": {
                "input_tokens": 0 if number else 10,
                "cache_read_input_tokens": 90 + 10 * (number > 0),
                "cache_creation_input_tokens": 0,
                "output_tokens": 12,
            },
        },
        "timestamp",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_log_of_a_gateway(name: str, tmp_path: Path) -> None:
    """Its third row is a request that failed."""
    row, field = LOGS[name]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(5)))
    trace = read_trace(tmp_path / "a.jsonl")
    found = [(request.arrival_s, request.prompt_len, request.output_len) for request in trace]
    assert found == [(arrival_s, 100, 12) for arrival_s in (0.0, 1.0, 3.0, 4.0)]
    assert f"requests arrive at the field {field}" in trace.notes


def span(number: int, **attributes: int | str) -> dict[str, Any]:
    """A span of OTLP; attributes are of gen_ai."""
    kind = {int: "intValue", str: "stringValue"}
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": f"{number:016x}",
        "name": "request",
        "startTimeUnixNano": str((EPOCH + number) * 10**9),
        "endTimeUnixNano": str((EPOCH + number + 2) * 10**9),
        "attributes": [
            {"key": f"gen_ai.{key.replace('__', '.')}", "value": {kind[type(value)]: str(value)}}
            for key, value in attributes.items()
        ],
        "status": {},
    }


def test_spans_of_sglang_and_those_without_output(tmp_path: Path) -> None:
    """The request's own span has the usage, and those of its threads have none. An embedding has no output tokens, a
    request that its client stopped has 0."""
    usage = {"usage__prompt_tokens": 50, "usage__completion_tokens": 5, "usage__cached_tokens": 7}
    spans = [
        {**span(11, tp_rank=0), "parentSpanId": f"{1:016x}"},
        span(1, **usage, request__max_tokens=64, response__finish_reasons='["length"]'),
        span(2, usage__prompt_tokens=50),
        span(3, usage__prompt_tokens=50, usage__completion_tokens=0),
        span(4, **usage),
    ]
    lines = [{"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]} for one in spans]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [
        (one.arrival_s, one.prompt_len, one.output_len, one.max_new_tokens) for one in read_trace(tmp_path / "a.jsonl")
    ]
    assert found == [(0.0, 50, 5, 64), (3.0, 50, 5, 5)]
