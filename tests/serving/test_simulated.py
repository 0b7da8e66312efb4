"""A server in front of a simulated device: pace, limits, clients that go away, drain, kill, metrics, recordings."""

import asyncio
import json
import random
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.serving.config import ServerConfig, metrics_names_of
from ifbbench.serving.server import serve
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import MAX_LAG_S
from tests.report.test_schema import check
from tests.serving.clients import ServerProcess, Stream, server_process, stream_completion

MODEL = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b"]
SIMULATED = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", enable_chunked_context=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scrape(server: ServerProcess) -> dict[str, float]:
    """Each sample by its name and the values of its labels other than the model's."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found = {}
    for sample in [one for family in families for one in family.samples]:
        own = sorted(set(sample.labels) - {"model", "version", "model_name", "engine"})
        found[" ".join([sample.name, *(sample.labels[label] for label in own)])] = sample.value
    return found


def post(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


# Gauges of requests that have not ended, by the names of either server.
ACTIVE = (
    "nv_trt_llm_request_metrics active",
    "nv_trt_llm_request_metrics waiting",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


def wait_until_idle(server: ServerProcess) -> dict[str, float]:
    for _ in range(6000):
        found = scrape(server)
        if not any(found.get(name) for name in ACTIVE):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


async def until(server: ServerProcess, request_type: str, count: int) -> None:
    """Wait until so many requests are `active` or `waiting`."""
    for _ in range(6000):
        if (await asyncio.to_thread(scrape, server))[f"nv_trt_llm_request_metrics {request_type}"] == count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(scrape(server))


async def several(server: ServerProcess, bodies: list[dict[str, Any]], **options: Any) -> list[Stream]:
    return await asyncio.gather(*(stream_completion(server.port, body, **options) for body in bodies))


def test_the_recording_replays_to_the_same_requests_and_metrics_agree_with_it(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    bodies = [
        {"prompt": [1] * (40 + 30 * index), "max_tokens": 5 + index, "stream_options": {"include_usage": True}}
        for index in range(24)
    ]
    with server_process(*MODEL, "--max_batch_size", "8", "--record", str(recorded)) as server:
        streams = asyncio.run(several(server, bodies))
        assert [stream.tokens for stream in streams] == [5 + index for index in range(24)]
        assert all(stream.text == "This is synthetic text from a simulated"[: stream.tokens] for stream in streams)
        left = asyncio.run(several(server, [{"prompt": "abc", "max_tokens": 5000}], leave_after=3))
        assert len(left[0].chunk_s) == 3
        found = wait_until_idle(server)
        status, printed = server.end()
    assert status == 0, printed
    assert "24 of 25 requests completed" in printed
    assert "summary.json" in check(recorded), "its files are valid by their schemas"

    summary = json.loads((recorded / "summary.json").read_text())
    assert found["nv_inference_request_success_total"] == summary["requests"]["completed"] == 24
    assert found["nv_inference_request_failure_total CANCELED"] == 1
    assert found["nv_llm_output_token_len_sum"] == summary["output_tokens"] == sum(range(5, 29))
    assert found["nv_llm_input_token_len_sum"] == summary["prompt_tokens"] + 3
    assert found["nv_inference_first_response_histogram_ms_count"] == 25
    assert found["nv_trt_llm_kv_cache_block_metrics used"] == 0
    assert found["nv_trt_llm_kv_cache_block_metrics free"] == found["nv_trt_llm_kv_cache_block_metrics max"]

    requests = {row["request_id"]: row for row in lines(recorded / "requests.jsonl")}
    trace = lines(recorded / "trace.jsonl")
    assert [row["request_id"] for row in trace] == list(range(25))
    assert [requests[index]["outcome"] for index in range(25)] == ["completed"] * 24 + ["stopped"]
    assert 3 <= trace[24]["output_len"] < 5000
    config = SIMULATED.with_values(max_batch_size=8, output=str(tmp_path / "replayed"))
    replayed = run_trace(str(recorded), config).summary
    assert replayed["requests"] == {"total": 25, "completed": 25, "failed": 0}, "the stopped request is complete there"
    assert replayed["output_tokens"] == summary["output_tokens"] + trace[24]["output_len"]
    again = {row["request_id"]: row for row in lines(tmp_path / "replayed" / "requests.jsonl")}
    assert all(again[index]["output_len"] == requests[index]["output_len"] for index in range(25))
    assert summary["replay_differs"]["stopped_before_output"] == 0
    if not summary["replay_differs"]["host_delays"]:
        assert replayed["schedule_digest"] == summary["schedule_digest"], "a stopped request ends in its iteration"


def test_a_replay_of_the_recording_has_the_times_of_the_server(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    bodies = [{"prompt": [1] * (40 + 30 * index), "max_tokens": 20 + index} for index in range(24)]

    async def one(port: int, index: int) -> Stream:
        await asyncio.sleep(0.01 * index)
        return await stream_completion(port, bodies[index])

    async def spread(port: int) -> None:
        await asyncio.gather(*(one(port, index) for index in range(len(bodies))))

    with server_process(*MODEL, "--max_batch_size", "8", "--record", str(recorded)) as server:
        asyncio.run(spread(server.port))
        status, printed = server.end()
    assert status == 0, printed
    served = json.loads((recorded / "summary.json").read_text())
    if served["replay_differs"]["host_delays"]:
        pytest.skip("this host was too busy to keep the pace of the simulated device")
    config = SIMULATED.with_values(max_batch_size=8, output=str(tmp_path / "replayed"))
    replayed = run_trace(str(recorded), config).summary
    assert replayed["iterations"] == served["iterations"]
    assert replayed["request_throughput_per_s"] == pytest.approx(served["request_throughput_per_s"], rel=1e-6)
    for name in ("ttft_s", "itl_s", "e2e_s", "queue_time_s"):
        for key in ("mean", "p50", "p90", "max"):
            assert replayed[name][key] == pytest.approx(served[name][key], abs=1e-6), (name, key)


@pytest.mark.slow
def test_a_run_against_the_server_has_the_figures_of_a_run_without_one(tmp_path: Path) -> None:
    draw = random.Random(4)
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "request_id": index,
            "arrival_s": index / 20,
            "prompt_len": draw.randint(20, 2000),
            "output_len": draw.randint(20, 200),
        }
        for index in range(200)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = run_trace(str(trace), SIMULATED.with_values(output=str(tmp_path / "alone"))).summary
    recorded, client = tmp_path / "recorded", tmp_path / "client"
    with server_process(*MODEL, "--record", str(recorded)) as server:
        result = CliRunner().invoke(main, ["run", str(trace), "--endpoint", server.url, "--output", str(client)])
        assert result.exit_code == 0, result.output
        server.end()
    served, seen = (json.loads((directory / "summary.json").read_text()) for directory in (recorded, client))
    if served["delivery_lag_s"]["max"] > MAX_LAG_S:
        pytest.skip("this host was too busy to keep the pace of the simulated device")
    lag_s = served["delivery_lag_s"]["mean"]
    print(f"\ndelivery lag {lag_s * 1e3:.2f} ms")
    for name in ("ttft_s", "itl_s", "e2e_s"):
        for key in ("p50", "p90"):
            print(name, key, *(f"{one[name][key] * 1e3:.2f}" for one in (alone, served, seen)), "ms")
            assert served[name][key] == pytest.approx(alone[name][key], rel=0.05, abs=0.002), (name, key)
            own = served[name][key] + (0 if name == "itl_s" else lag_s)
            assert seen[name][key] == pytest.approx(own, rel=0.05, abs=0.002), (name, key)
    for one in (served, seen):
        assert one["request_throughput_per_s"] == pytest.approx(alone["request_throughput_per_s"], rel=0.03)


def test_a_recording_says_what_a_replay_cannot_repeat(tmp_path: Path) -> None:
    recorded, long = tmp_path / "recorded", {"prompt": "a", "max_tokens": 100_000}
    with server_process(*MODEL, "--max_batch_size", "1", "--record", str(recorded)) as server:

        async def leave() -> None:
            """One client while its request runs, and then one whose request waits."""
            running = asyncio.create_task(stream_completion(server.port, long))
            await until(server, "active", 1)
            waiting = asyncio.create_task(stream_completion(server.port, long))
            await until(server, "waiting", 1)
            waiting.cancel()
            await until(server, "waiting", 0)
            running.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)

        asyncio.run(leave())
        wait_until_idle(server)
        assert server.end()[0] == 0
    assert json.loads((recorded / "summary.json").read_text())["replay_differs"]["stopped_before_output"] == 1
    printed = CliRunner().invoke(main, ["report", str(recorded)]).output
    assert "A replay of this recording may decide otherwise: requests stopped before their first token" in printed


def test_metrics_have_the_names_of_the_engine_unless_others_are_asked_for() -> None:
    assert [metrics_names_of(ServerConfig(), engine) for engine in ("trtllm", "vllm", "sglang")] == [
        "trtllm",
        "vllm",
        "trtllm",
    ]
    assert metrics_names_of(ServerConfig(metrics_names="trtllm"), "vllm") == "trtllm"


def test_an_engine_has_its_names_in_its_metrics() -> None:
    with server_process(*MODEL, "--engine", "vllm") as server:
        assert scrape(server)["vllm:num_requests_running"] == 0


def test_vllm_names() -> None:
    with server_process(*MODEL, "--metrics_names", "vllm", "--served_model_name", "mock") as server:
        assert post(server, {"prompt": "hello", "max_tokens": 7})["model"] == "mock"
        found = scrape(server)
    assert found["vllm:num_requests_running"] == 0
    assert found["vllm:generation_tokens_total"] == 7
    assert found["vllm:prompt_tokens_total"] == 5
    assert found["vllm:request_success_total length"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 6
    for name in ("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds", "params_max_tokens"):
        assert found[f"vllm:request_{name}_count"] == 1
    assert found["vllm:request_params_max_tokens_sum"] == 7
    assert found["vllm:iteration_tokens_total_count"] == 7
    assert found["vllm:iteration_tokens_total_sum"] == 5 + 6
    assert any(name.startswith("vllm:cache_config_info ") for name in found)


# The metrics of vLLM 0.32.0 that a server without an own feature for each does not have: of transfers of the KV cache,
# images, sleep, and estimates of the work of a GPU.
NOT_HERE = ("external_prefix_cache_", "mm_cache_", "engine_sleep_state", "estimated_", "prompt_tokens_cached_by_source")
VLLM_LABELS = {
    "admission_rejections": {"reason"},
    "e2e_request_latency_seconds": set(),
    "estimated_flops_per_gpu": set(),
    "estimated_read_bytes_per_gpu": set(),
    "estimated_write_bytes_per_gpu": set(),
    "engine_sleep_state": {"sleep_state"},
    "external_prefix_cache_hits": set(),
    "external_prefix_cache_queries": set(),
    "generation_tokens": set(),
    "inter_token_latency_seconds": set(),
    "iteration_tokens_total": set(),
    "kv_cache_usage_perc": set(),
    "mm_cache_hits": set(),
    "mm_cache_queries": set(),
    "num_preemptions": set(),
    "num_requests_running": set(),
    "num_requests_waiting": set(),
    "num_requests_waiting_by_reason": {"reason"},
    "prefix_cache_hits": set(),
    "prefix_cache_queries": set(),
    "prompt_tokens": set(),
    "prompt_tokens_by_source": {"source"},
    "prompt_tokens_cached": set(),
    "prompt_tokens_cached_by_source": {"source"},
    "request_decode_time_seconds": set(),
    "request_generation_tokens": set(),
    "request_inference_time_seconds": set(),
    "request_max_num_generation_tokens": set(),
    "request_num_preemptions": set(),
    "request_params_max_tokens": set(),
    "request_params_n": set(),
    "request_prefill_kv_computed_tokens": set(),
    "request_prefill_time_seconds": set(),
    "request_prompt_tokens": set(),
    "request_queue_time_seconds": set(),
    "request_success": {"finished_reason"},
    "request_time_per_output_token_seconds": set(),
    "time_to_first_token_seconds": set(),
}


def test_vllm_names_are_those_of_vllm() -> None:
    """The families and labels were read from the /metrics of a vLLM 0.32.0 server on CPUs."""
    with server_process(*MODEL, "--metrics_names", "vllm") as server:
        post(server, {"prompt": "hello", "max_tokens": 7})
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    found = {one.name.removeprefix("vllm:"): set(one.samples[0].labels) - {"le"} for one in families}
    for name, labels in VLLM_LABELS.items():
        if not name.startswith(NOT_HERE):
            engine = set() if name == "admission_rejections" else {"engine"}
            assert found[name] == {"model_name", *engine} | labels, name


def test_vllm_names_of_prompts_and_pauses(tmp_path: Path) -> None:
    options = [
        "--metrics_names",
        "vllm",
        "--max_queue_size",
        "3",
        "--enable_block_reuse",
        "--record",
        str(tmp_path / "r"),
    ]
    with server_process(*MODEL, *options) as server:
        prompt = list(range(100, 200))
        post(server, {"prompt": prompt, "max_tokens": 7, "ignore_eos": True})
        post(server, {"prompt": prompt, "max_tokens": 7, "n": 3, "ignore_eos": True})
        found = wait_until_idle(server)
        assert server.end()[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "r" / "requests.jsonl").read_text().splitlines()]
    reused = sum(row["reused_tokens"] for row in rows)
    assert reused > 0
    assert found["vllm:prompt_tokens_cached_total"] == reused
    assert found["vllm:prompt_tokens_by_source_total local_cache_hit"] == reused
    assert found["vllm:prompt_tokens_by_source_total local_compute"] == 400 - reused
    assert found["vllm:prompt_tokens_by_source_total external_kv_transfer"] == 0
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 400 - reused
    assert found["vllm:request_prefill_kv_computed_tokens_count"] == 4
    assert (found["vllm:request_params_n_sum"], found["vllm:request_params_n_count"]) == (1 + 3, 2)
    assert found["vllm:request_params_n_bucket 2.0"] == 1
    assert found["vllm:request_max_num_generation_tokens_sum"] == 14
    assert found["vllm:request_max_num_generation_tokens_count"] == 2
    assert (found["vllm:request_num_preemptions_sum"], found["vllm:request_num_preemptions_count"]) == (0, 4)
    assert found["vllm:num_requests_waiting_by_reason capacity"] == found["vllm:num_requests_waiting"]


def test_vllm_names_of_pauses_and_refusals() -> None:
    """Requests that do not fit together are paused in turns; one more than the queue holds is refused."""
    options = ["--policy", "max_utilization", "--max_tokens_in_paged_kvcache", "640", "--max_queue_size", "1"]
    with server_process(*MODEL, "--metrics_names", "vllm", "--max_batch_size", "2", *options) as server:

        async def several() -> list[Stream]:
            body = {"prompt": [1] * 64, "max_tokens": 400, "ignore_eos": True}
            tasks = []
            for _ in range(6):
                tasks.append(asyncio.create_task(stream_completion(server.port, body)))
                await asyncio.sleep(0.05)
            return await asyncio.gather(*tasks)

        streams = asyncio.run(several())
        found = wait_until_idle(server)
    done = sum(stream.status == 200 for stream in streams)
    assert found["vllm:request_num_preemptions_count"] == done >= 2
    assert found["vllm:request_num_preemptions_sum"] == found["vllm:num_preemptions_total"] > 0
    assert found["vllm:admission_rejections_total max_num_queued_reqs"] == 6 - done > 0
    assert found["vllm:admission_rejections_total max_num_queued_tokens"] == 0


def test_a_full_queue_refuses_until_a_client_goes_away() -> None:
    with server_process(*MODEL, "--max_batch_size", "1", "--max_queue_size", "2", "--max_clients", "6") as server:
        long = {"prompt": "a", "max_tokens": 100_000}

        async def overload() -> list[int]:
            running = [asyncio.create_task(stream_completion(server.port, long))]
            await until(server, "active", 1)
            running += [asyncio.create_task(stream_completion(server.port, long)) for _ in range(2)]
            await until(server, "waiting", 2)
            statuses = []
            async with httpx.AsyncClient(base_url=server.url) as client:
                refused = await client.post("/v1/completions", json={"prompt": "a", "n": 1})
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
                statuses.append(refused.status_code)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return statuses

        assert asyncio.run(overload()) == [429]
        found = wait_until_idle(server)
        assert found["nv_inference_request_failure_total REJECTED"] == 1
        assert found["nv_inference_request_failure_total CANCELED"] == 3
        assert found["nv_trt_llm_kv_cache_block_metrics used"] == 0
        assert post(server, {"prompt": "a", "max_tokens": 3})["usage"]["completion_tokens"] == 3


def test_sigterm_answers_what_was_accepted(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    with server_process(*MODEL, "--record", str(recorded), "--record_lengths_only") as server:

        async def drain() -> tuple[Stream, int]:
            body = {"prompt": "abc", "max_tokens": 150, "stream_options": {"include_usage": True}}
            begun = asyncio.Event()
            task = asyncio.create_task(stream_completion(server.port, body, begun=begun))
            await begun.wait()
            server.process.send_signal(signal.SIGTERM)
            stream = await task
            return stream, await asyncio.to_thread(server.process.wait, 300)

        stream, status = asyncio.run(drain())
    assert status == 0
    assert stream.tokens == len(stream.text) == 150
    assert not json.loads((recorded / "summary.json").read_text())["partial"]
    (row,) = lines(recorded / "trace.jsonl")
    assert row == {
        "request_id": 0,
        "arrival_s": row["arrival_s"],
        "prompt_len": 3,
        "max_new_tokens": 150,
        "output_len": 150,
    }


@pytest.mark.usefixtures("without_layout")
def test_a_killed_server_leaves_a_readable_run(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    with server_process(*MODEL, "--record", str(recorded)) as server:
        for _ in range(3):
            post(server, {"prompt": "abc", "max_tokens": 5})
        asyncio.run(several(server, [{"prompt": "abc", "max_tokens": 20_000}], leave_after=200))
        for _ in range(6000):
            if (recorded / "trace.jsonl").read_text().count("\n") == 4:
                break
            time.sleep(0.01)
        server.end(signal.SIGKILL)
    assert not (recorded / "summary.json").exists()
    replayed, charts = tmp_path / "replayed", tmp_path / "charts"
    for command in (
        ["report", str(recorded)],
        ["plot", str(recorded), "--only", "timeline,latency", "--output", str(charts)],
        ["run", str(recorded), *MODEL, "--output", str(replayed)],
        ["compare", str(recorded), str(replayed)],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        assert "Traceback" not in result.output
    assert [*charts.iterdir()]
    requests = json.loads((replayed / "summary.json").read_text())["requests"]
    assert (requests["completed"], requests["failed"]) == (4, 0), "three that completed, and one that was stopped"


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    def message(*options: str) -> str:
        result = CliRunner().invoke(main, ["serve", *options])
        assert result.exit_code == 2
        return result.output

    (tmp_path / "file").write_text("")
    assert "--port" in message("--port", "70000")
    assert "--record_lengths_only" in message("--record_lengths_only")
    assert "is a file" in message("--port", "0", "--record", str(tmp_path / "file"))
    assert "No such option" in message("--time_scale", "0")
    with server_process(*MODEL) as server:
        assert "cannot be listened on" in message(*MODEL, "--port", str(server.port))


@pytest.mark.parametrize("key", ["a\nb", "abc\n", "schlüssel", " ", "abc "])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    result = CliRunner().invoke(main, ["serve", *MODEL, "--port", "0"], env={"IFBBENCH_API_KEY": key})
    assert result.exit_code == 2
    assert "IFBBENCH_API_KEY: the key has a line break" in result.output
    with pytest.raises(InputError, match="--api_key"):
        serve(RunConfig(device="sim:h100-sxm", model="llama-3.1-8b"), ServerConfig(port=0, api_key="abc "))


def test_a_server_listens_to_its_machine_alone_unless_told_otherwise() -> None:
    assert ServerConfig().host == "127.0.0.1"
