"""Replays against servers that are not ours: Triton Inference Server, and a server with the fields of trtllm-serve."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.endpoint.fake_endpoint import STREAM, Received, Writer, fake_endpoint
from tests.endpoint.test_endpoint import replay, rows, trace

missing = [name for name in ("pytriton", "tritonclient") if importlib.util.find_spec(name) is None]
# Of CompletionRequest in tensorrt_llm/serve/openai_protocol.py, where every other field is an error.
TRTLLM_FIELDS = {
    "model",
    "prompt",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
    "lora_request",
    "prompt_ignore_length",
    "use_beam_search",
    "top_k",
    "top_p_min",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "return_context_logits",
    "detokenize",
    "thinking_token_budget",
    "add_special_tokens",
    "response_format",
    "disaggregated_params",
    "priority",
    "conversation_params",
}


async def trtllm_serve(request: Received, writer: Writer) -> None:
    """Streams as trtllm-serve does: usage in each chunk if that is asked for, and ids in the place of text."""
    options, body = request.body.get("stream_options") or {}, request.body
    unknown = (set(body) - TRTLLM_FIELDS) | (set(options) - {"include_usage", "continuous_usage_stats"})
    if unknown:
        await writer.json(
            {
                "object": "error",
                "message": f"Extra inputs are not permitted: {sorted(unknown)}",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            },
            400,
        )
        return
    await writer.raw(STREAM)

    def usage(number: int) -> dict[str, Any]:
        prompt_len = len(body["prompt"])
        return {
            "prompt_tokens": prompt_len,
            "total_tokens": prompt_len + number,
            "completion_tokens": number,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    for number in range(1, body["max_tokens"] + 1):
        choice = {
            "index": 0,
            "text": " a" if body.get("detokenize", True) else "",
            "token_ids": None if body.get("detokenize", True) else [number],
            "logprobs": None,
            "context_logits": None,
            "finish_reason": "length" if number == body["max_tokens"] else None,
            "stop_reason": None,
            "disaggregated_params": None,
            "avg_decoded_tokens_per_iter": 1.0,
        }
        await writer.event(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "usage": usage(number),
            }
        )
    await writer.event(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": [],
            "usage": usage(body["max_tokens"]),
        }
    )
    await writer.event("[DONE]")
    await writer.end()


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1}])
def test_trtllm_serve_knows_every_field(has_ids: bool, sampling: dict[str, Any], tmp_path: Path) -> None:
    responses = tmp_path / "responses.json"
    given: dict[str, Any] = {"responses_json": str(responses)} if has_ids else {}
    with fake_endpoint(trtllm_serve) as server:
        summary = replay(server, tmp_path, endpoint_type="trtllm-serve", **sampling, **given)
    assert summary["requests"]["failed"] == 0, rows(tmp_path)[0]["error"]
    assert summary["endpoint"]["chunk_tokens"] == {"stream": 3}
    assert summary["output_tokens"] == 9
    assert [line["reused_tokens"] for line in rows(tmp_path)] == [2, 2, 2]
    if has_ids:
        assert json.loads(responses.read_text())[0]["response_tokens"] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=f"{missing} not installed: pip install 'ifbbench[triton]'")
def test_triton_streams_the_tokens_of_the_engine(tmp_path: Path) -> None:
    """Over generate_stream of a real Triton, with the tokens of a replay without it, and with its metrics."""
    from tests.serving.triton_clients import triton

    path = trace(tmp_path, 6, output_len=9)
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    common: dict[str, Any] = {"time_scale": 0.0, "seed": 3}
    given = RunConfig(device="cpu", cpu_threads=1, output=str(tmp_path / "a"), responses_json=str(ours), **common)
    run_trace(path, given)
    with triton("--device", "cpu", "--model", "tiny", "--cpu_threads", "1", "--seed", "3") as server:
        config = RunConfig(
            endpoint=f"http://127.0.0.1:{server.http}",
            endpoint_type="triton",
            endpoint_prompts="tokens",
            output=str(tmp_path / "run"),
            responses_json=str(theirs),
            endpoint_vocab_size=4096,
            poll_metrics=True,
            metrics_url=f"http://127.0.0.1:{server.metrics}/metrics",
            **common,
        )
        summary = run_trace(path, config).summary
        server.end()
    assert summary["requests"] == {"total": 6, "completed": 6, "failed": 0}, rows(tmp_path)[0]["error"]
    assert summary["endpoint"]["chunk_tokens"] == {"stream": 6}
    assert summary["itl_s"]["mean"] > 0
    assert json.loads(theirs.read_text()) == json.loads(ours.read_text())
    assert any(name.startswith("nv_inference") for name in rows(tmp_path, "metrics")[-1]["values"])
