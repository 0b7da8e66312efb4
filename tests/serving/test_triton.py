"""NVIDIA Triton Inference Server, with the official client over gRPC and HTTP; skipped where it is not installed."""

import importlib.util
import json
import math
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifbbench.build.engine import build_engine, generate
from ifbbench.replay.run import run_trace
from ifbbench.serving.library.request_tensors import TENSORS
from ifbbench.serving.triton_repository import OTHER_TYPES
from ifbbench.settings.config import RunConfig
from tests.processes import check_ended
from tests.replay.test_ranks import check_readable
from tests.serving.triton_clients import MODEL, Stream, Triton, inputs, scrape, start, triton, wait_for

missing = [name for name in ("pytriton", "tritonclient") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{missing} not installed: pip install 'ifbbench[triton]'")

TINY = ["--device", "cpu", "--model", "tiny", "--max_beam_width", "4"]
SIMULATED = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b"]


@pytest.fixture(autouse=True)
def _no_stream_stays_open() -> Iterator[None]:
    yield
    for stream in list(Stream.all_open):
        stream.cancel()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Triton]:
    with triton(*TINY) as server:
        yield server
        assert server.end()[0] == 0


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What the model answers to 1, 2, 3, 4, 5."""
    return generate(build_engine(RunConfig(device="cpu")), [[1, 2, 3, 4, 5]], 6)[0].tolist()


def test_the_tokens_are_those_of_the_engine(tiny: Triton, expected: list[int]) -> None:
    stream = Stream(tiny)
    whole = stream.one([1, 2, 3, 4, 5], 6)
    assert whole.ids == [1, 2, 3, 4, 5, *expected]
    (response,) = whole.responses
    assert set(response) == {"output_ids", "sequence_length"}
    assert response["sequence_length"].tolist() == [[11]]
    assert stream.one([1, 2, 3, 4, 5], 6, exclude_input_in_output=True).ids == expected
    streamed = stream.one([1, 2, 3, 4, 5], 6, streaming=True)
    assert len(streamed.responses) == 6
    assert streamed.ids == expected
    padded = stream.one([1, 2, 3, 4, 5, 9, 9], 6, input_lengths=np.int32(5), streaming=True)
    assert padded.ids == expected


def test_inputs_choose_the_tokens_and_where_they_end(tiny: Triton, expected: list[int]) -> None:
    stream, prompt = Stream(tiny), [1, 2, 3, 4, 5]
    ended = stream.one(prompt, 6, end_id=np.int32(expected[2]), streaming=True)
    assert ended.ids == expected[:3]
    words = np.array([[[expected[1], expected[2]], [2, -1]]], np.int32)
    assert stream.one(prompt, 6, stop_words_list=words, streaming=True).ids == expected[:3]
    bad = stream.one(prompt, 6, bad_words_list=np.array([[[expected[0]], [1]]], np.int32), streaming=True)
    assert bad.ids[0] != expected[0]
    bias = np.zeros((1, 4096), np.float32)
    bias[0, 77] = 1e6
    assert stream.one(prompt, 3, embedding_bias=bias, streaming=True).ids == [77] * 3
    sampled = [
        stream.one(prompt, 6, runtime_top_k=np.int32(50), temperature=np.float32(2), random_seed=np.uint64(seed)).ids
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_log_probs_logits_and_beams(tiny: Triton, expected: list[int]) -> None:
    stream = Stream(tiny)
    flags = dict.fromkeys(("return_log_probs", "return_context_logits", "return_generation_logits"), True)
    (response,) = stream.one([1, 2, 3, 4, 5], 6, **flags).responses
    logits = response["generation_logits"]
    assert response["context_logits"].shape == (1, 5, 4096)
    assert logits.shape == (1, 1, 6, 4096)
    assert logits[0, 0].argmax(axis=1).tolist() == expected
    exact = logits[0, 0].max(axis=1) - np.log(np.exp(logits[0, 0].astype(np.float64)).sum(axis=1))
    assert response["output_log_probs"][0, 0] == pytest.approx(exact, abs=1e-4)
    assert response["cum_log_probs"][0, 0] == pytest.approx(exact.sum(), abs=1e-3)
    (response,) = stream.one([1, 2, 3, 4, 5], 6, beam_width=np.int32(3), return_log_probs=True).responses
    assert response["output_ids"].shape == (1, 3, 11)
    assert response["output_log_probs"].shape == (1, 3, 6)
    assert response["cum_log_probs"].shape == (1, 3)


def test_several_prompts_in_a_request(tiny: Triton, expected: list[int]) -> None:
    answer = Stream(tiny).one([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], 6)
    found = {one["batch_index"].item(): one["output_ids"][0, 0].tolist() for one in answer.responses}
    assert found[0] == [1, 2, 3, 4, 5, *expected]
    assert found[1][:5] == [5, 4, 3, 2, 1]
    assert len(found) == 2


def test_errors_are_those_of_triton(tiny: Triton) -> None:
    stream = Stream(tiny)
    for tensors, message in (
        ({"runtime_top_p": np.float32(3)}, "top_p 3.0"),
        ({"input_lengths": np.int32(9)}, "input_lengths: 9"),
        ({"stop_words_list": np.array([[[1], [5]]], np.int32)}, "stop_words_list"),
        ({"beam_width": np.int32(5)}, "max_beam_width"),
    ):
        answer = stream.one([1, 2, 3, 4, 5], 6, **tensors)
        assert message in str(answer.error), tensors
        assert not answer.responses
    assert "both must be at least 1" in str(stream.one([1], 0).error)
    assert "unexpected inference input" in str(stream.one([1], 1, unknown=np.int32(1)).error)
    assert len(stream.one([1], 2, streaming=True).ids) == 2, "the stream goes on after errors"


def test_stop_ends_the_request_of_its_id(tiny: Triton) -> None:
    stream = Stream(tiny)
    stream.send([1, 2, 3], 1000, "long", streaming=True)
    wait_for(tiny, "nv_trt_llm_request_metrics active", 1)
    stream.send([1], 1, "other", stop=True)
    answers = stream.receive()
    assert not answers["other"].responses, "it stops nothing, and long goes on"
    stream.send([1], 1, "long", stop=True)
    count = len(stream.receive(2)["long"].ids) + len(answers["long"].ids if "long" in answers else [])
    assert 0 < count < 1000
    wait_for(tiny, "nv_trt_llm_kv_cache_block_metrics used", 0)
    without_id = Stream(tiny)
    without_id.send([1], 1, stop=True)
    assert "no id" in str(without_id.receive()[""].error)


def test_http_generates(tiny: Triton, expected: list[int]) -> None:
    def post(path: str, **values: Any) -> bytes:
        body = {"input_ids": [1, 2, 3, 4, 5], "input_lengths": 5, "request_output_len": 6, **values}
        url = f"http://127.0.0.1:{tiny.http}/v2/models/{MODEL}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=300) as response:
            content: bytes = response.read()
            return content

    assert json.loads(post("generate"))["output_ids"] == [1, 2, 3, 4, 5, *expected]
    events = [json.loads(line[6:]) for line in post("generate_stream", streaming=True).splitlines() if line]
    assert [one["output_ids"] for one in events] == expected
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post("generate", runtime_top_p=3)


def test_without_decoupled_mode_http_infers() -> None:
    import tritonclient.http
    from tritonclient.utils import InferenceServerException

    expected = list(b"This i")
    options = ["--no_decoupled_mode", "--exclude_input_in_output", "--triton_model_name", "llama"]
    with triton(*SIMULATED, *options) as server:
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", concurrency=4)

        def made(prompt: Any, **tensors: Any) -> list[Any]:
            return inputs(tritonclient.http, prompt, 6, tensors)

        result = client.infer("llama", made([1, 2, 3, 4, 5]), request_id="7")
        assert result.as_numpy("output_ids")[0, 0].tolist() == expected
        assert result.get_response()["id"] == "7"
        pending = [client.async_infer("llama", made([1, 2, 3, 4, 5])) for _ in range(4)]
        assert [one.get_result().as_numpy("output_ids")[0, 0].tolist() for one in pending] == [expected] * 4
        with pytest.raises(InferenceServerException, match="--decoupled_mode"):
            client.infer("llama", made([1, 2, 3], streaming=True))
        with pytest.raises(InferenceServerException, match="one by one"):
            client.infer("llama", made([[1, 2, 3], [1, 2, 3]]))
        found = scrape(server)
        assert found["nv_llm_output_token_len_count total_output_tokens"] == 5
        assert found["nv_llm_output_token_len_sum total_output_tokens"] == 30
        client.close()
        assert server.end()[0] == 0


def test_recorded_traffic_of_a_simulated_device(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    with triton(
        *SIMULATED, "--max_batch_size", "8", "--max_queue_size", "8", "--record", str(recorded), "--drain_timeout", "4"
    ) as server:
        stream = Stream(server)
        for index in range(6):
            stream.send([1] * (40 + index), 5 + index, str(index), streaming=True)
        answers = stream.receive(6)
        assert [len(answers[str(index)].ids) for index in range(6)] == list(range(5, 11))
        # A client that cancels, while others wait for the queue.
        leaving = Stream(server)
        for index in range(8):
            leaving.send([1] * 10, 20_000, f"long {index}", streaming=True)
        wait_for(server, "nv_trt_llm_request_metrics active", 8)
        for index in range(8):
            leaving.send([1] * 10, 20_000, f"waiting {index}")
        wait_for(server, "nv_trt_llm_request_metrics waiting", 8)
        assert "--max_queue_size is 8" in str(stream.one([1], 1).error)
        leaving.cancel()
        wait_for(server, "nv_trt_llm_request_metrics waiting", 0)
        found = wait_for(server, "nv_trt_llm_kv_cache_block_metrics used", 0)
        assert found["nv_trt_llm_request_metrics active"] == 0
        assert found["nv_trt_llm_kv_cache_block_metrics free"] == found["nv_trt_llm_kv_cache_block_metrics max"]
        assert found["nv_llm_input_token_len_count total_input_tokens"] == 22
        # What was accepted is answered after SIGTERM. A stream that stays open does not keep the server.
        stream.send([1] * 10, 150, "last", streaming=True)
        wait_for(server, "nv_trt_llm_request_metrics active", 1)
        server.process.send_signal(signal.SIGTERM)
        assert len(stream.receive()["last"].ids) == 150
        printed, _ = server.process.communicate(timeout=300)
        assert server.process.returncode == 0, printed
    assert "7 of 23 requests completed" in printed
    summary = json.loads((recorded / "summary.json").read_text())
    assert summary["output_tokens"] == sum(range(5, 11)) + 150
    outcomes = [json.loads(line)["outcome"] for line in (recorded / "requests.jsonl").read_text().splitlines()]
    assert sorted(outcomes) == ["completed"] * 7 + ["stopped"] * 16
    config = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", output=str(tmp_path / "replayed"))
    assert run_trace(str(recorded), config).failed == 0


def test_several_sequences_of_a_prompt(tiny: Triton) -> None:
    stream = Stream(tiny)
    sampled: dict[str, Any] = {"temperature": np.float32(3.0), "exclude_input_in_output": True}

    def seeded(seed: int, **tensors: Any) -> list[list[int]]:
        """The sequences, by index."""
        answer = stream.one([1, 2, 3], 8, seed=np.uint64(seed), **sampled, **tensors)
        if "num_return_sequences" not in tensors:
            return [answer.ids]
        found = {one["sequence_index"].item(): one["output_ids"][0, 0].tolist() for one in answer.responses}
        return [found[index] for index in sorted(found)]

    several = seeded(5, num_return_sequences=np.int32(3))
    assert several == [*seeded(5), *seeded(6), *seeded(7)]
    assert several[0] == stream.one([1, 2, 3], 8, random_seed=np.uint64(5), **sampled).ids
    beams = stream.one([1, 2, 3], 8, beam_width=np.int32(4), num_return_sequences=np.int32(2))
    (response,) = beams.responses
    assert response["output_ids"].shape[1] == 2
    assert response["sequence_length"].shape[1] == 2
    refused = stream.one([1, 2, 3], 8, beam_width=np.int32(2), num_return_sequences=np.int32(3))
    assert "num_return_sequences: 3; expected 1 to 2" in str(refused.error)


def test_draft_tokens_do_not_end_a_simulated_server() -> None:
    with triton(*SIMULATED) as server:
        stream = Stream(server)
        drafts = np.array([[1, 2, 3]], np.int32)
        assert len(stream.one([1] * 8, 12, draft_input_ids=drafts, exclude_input_in_output=True).ids) == 12
        assert len(stream.one([1] * 8, 12, exclude_input_in_output=True).ids) == 12
        stream.send([1] * 8, 50_000, "running", streaming=True)
        wait_for(server, "nv_trt_llm_request_metrics active", 1)
        stream.cancel()
        status, printed = server.end()
    assert status == 0, printed
    assert "Task was destroyed" not in printed
    assert "Traceback" not in printed


BOOLEANS = ("stop", *OTHER_TYPES)


@pytest.mark.parametrize("seed", range(3))
def test_random_tensors_are_answered_and_end_no_server(tiny: Triton, expected: list[int], seed: int) -> None:
    """Of the types that Triton checks, with any sizes and values."""
    draw = random.Random(seed)
    numbers = {
        "i": (0, 1, -1, 2, 3, 9, 200, 2**31 - 1, -(2**31)),
        "u": (0, 1, 2, 7, 2**31, 2**63, 2**64 - 1),
        "f": (0.0, 1.0, -1.0, 0.5, 1e-30, 60000.0, float("nan"), float("inf")),
        "b": (True, False),
    }
    stream, num_refused = Stream(tiny), 0
    for count in range(120):
        tensors: dict[str, Any] = {}
        for name in draw.sample([*TENSORS, "num_return_sequences", "stop"], draw.choice((1, 1, 2, 3))):
            sizes: tuple[str, ...] = ("1",)
            dtype = np.dtype(bool if name in BOOLEANS else np.int32)
            if name in TENSORS and name not in OTHER_TYPES:
                dtype, sizes = np.dtype(TENSORS[name].dtype), TENSORS[name].shape
            shape = [1, *(int(one) if one.isdigit() else draw.choice((0, 1, 2, 3, 50)) for one in sizes)]
            values = [draw.choice(numbers[dtype.kind]) for _ in range(math.prod(shape))]
            tensors[name] = np.array(values, dtype).reshape(shape)
        stream.send([1, 2, 3], 3, f"{seed}.{count}", **tensors)
        (answer,) = stream.receive().values()
        assert "failed" not in str(answer.error), (tensors, answer.error)
        assert answer.error is not None or "stop" in tensors or answer.responses, tensors
        num_refused += answer.error is not None
    assert 10 < num_refused < 110
    assert stream.one([1, 2, 3, 4, 5], 6, exclude_input_in_output=True).ids == expected


def pids_of(directory: Path) -> list[int]:
    return [row["pid"] for row in json.loads((directory / "run.json").read_text())["ranks"]]


def test_two_ranks(tmp_path: Path, expected: list[int]) -> None:
    """Rank 0 is the model's process in Triton, which starts the other one."""
    recorded = tmp_path / "recorded"
    with triton(*TINY, "--tp_size", "2", "--record", str(recorded)) as server:
        stream = Stream(server)
        assert stream.one([1, 2, 3, 4, 5], 6, streaming=True).ids == expected
        stream.send([1, 2, 3], 1000, "long", streaming=True)
        wait_for(server, "nv_trt_llm_request_metrics active", 1)
        stream.cancel()
        wait_for(server, "nv_trt_llm_request_metrics active", 0)
        pids = pids_of(recorded)
        status, printed = server.end()
        assert status == 0, printed
    assert "1 of 2 requests completed, 0 failed" in printed
    assert len(set(pids)) == 2
    check_ended(pids)
    responses = tmp_path / "responses.json"
    run_trace(
        str(recorded),
        RunConfig(
            device="cpu",
            max_beam_width=4,
            output=str(tmp_path / "replayed"),
            time_scale=0.0,
            responses_json=str(responses),
        ),
    )
    assert json.loads(responses.read_text())[0]["response_tokens"] == expected


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "the model's process in Triton has died"),
        (1, "rank 1 was killed by SIGKILL, perhaps for lack of memory"),
    ],
)
def test_a_rank_that_is_killed_ends_triton(tmp_path: Path, rank: int, message: str) -> None:
    recorded = tmp_path / "recorded"
    with triton(*TINY, "--tp_size", "2", "--record", str(recorded)) as server:
        Stream(server).send([1, 2, 3], 1000, "long", streaming=True)
        wait_for(server, "nv_trt_llm_request_metrics active", 1)
        pids = pids_of(recorded)
        os.kill(pids[rank], signal.SIGKILL)
        printed, _ = server.process.communicate(timeout=300)
    assert server.process.returncode == 1, printed
    assert f"Error: the server ended early: {message} (what was recorded is kept in {recorded})" in printed
    assert "Traceback" not in printed
    check_ended(pids)
    check_readable(recorded)


def test_ranks_that_cannot_share_the_model(tmp_path: Path) -> None:
    process = start(*TINY, "--tp_size", "3", "--http_port", "0", "--grpc_port", "0", "--metrics_port", "0")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "Error: --tp_size: 3 devices cannot share 8 attention heads" in printed


def test_an_engine_that_cannot_be_made_is_explained() -> None:
    process = start(
        "--device", "sim:l4", "--model", "llama-3.3-70b", "--http_port", "0", "--grpc_port", "0", "--metrics_port", "0"
    )
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "Error: the model does not fit" in printed
    assert "Traceback" not in printed


def test_a_killed_command_leaves_no_server() -> None:
    with triton(*SIMULATED) as server:
        server.end(signal.SIGKILL)
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/health/live", timeout=1).close()
            except (urllib.error.URLError, OSError):
                return
            time.sleep(0.1)
    raise AssertionError("Triton goes on")
