"""What load generators from PyPI measure against the simulated device is what the server recorded, and schemathesis
finds no defect. Slow, and skipped where the tool is not on the PATH: `pip install guidellm locust schemathesis`."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.clients import server_process
from tests.serving.test_simulated import MODEL

pytestmark = pytest.mark.slow
SECONDS, RATE, OUTPUT_LEN = 15, 4, 100
MAX_SHARE, MAX_DIFFERENCE_S = 0.05, 0.002
LOCUST_FILE = f"""
from locust import FastHttpUser, constant_throughput, task

class Client(FastHttpUser):
    wait_time = constant_throughput(1)

    @task
    def complete(self):
        body = {{"prompt": list(range(200)), "max_tokens": {OUTPUT_LEN}, "ignore_eos": True}}
        self.client.post("/v1/completions", json=body)
"""


def tool(name: str, *arguments: str, cwd: Path) -> str:
    """Run a tool; returns what it printed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run([path, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def close(measured: float, recorded: float) -> bool:
    return abs(measured - recorded) <= max(MAX_SHARE * recorded, MAX_DIFFERENCE_S)


def summary_of(recorded: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recorded / "summary.json").read_text())
    return found


def test_locust(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    (tmp_path / "locustfile.py").write_text(LOCUST_FILE)
    with server_process(*MODEL, "--record", str(recorded)) as server:
        options = ["--headless", "--users", str(RATE), "--spawn-rate", str(RATE), "--run-time", f"{SECONDS}s",
                   "--stop-timeout", "10", "--host", server.url, "--json"]  # fmt: skip
        printed = tool("locust", *options, cwd=tmp_path)
        server.end()
    (measured,) = json.loads(printed)
    summary = summary_of(recorded)
    assert measured["num_failures"] == 0
    assert measured["num_requests"] == summary["requests"]["completed"]
    mean_s = measured["total_response_time"] / measured["num_requests"] / 1000
    print(f"locust: mean response time {mean_s:.4f} s, recorded {summary['e2e_s']['mean']:.4f} s")
    assert close(mean_s, summary["e2e_s"]["mean"])


def test_guidellm(tmp_path: Path) -> None:
    """Its time to the first token has what its HTTP client needs before it sends; see docs/serving.md."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    recorded, result = tmp_path / "recorded", tmp_path / "guidellm.json"
    with server_process(*MODEL, "--record", str(recorded)) as server:
        tool(
            "guidellm", "run", "--disable-progress", "--disable-console",
            "--backend", f"kind=openai_http,target={server.url},model=llama-3.1-8b",
            "--tokenizer", f"kind=hf_auto,model={tmp_path / 'tokenizer'}",
            "--data", f"kind=synthetic_text,prompt_tokens=200,output_tokens={OUTPUT_LEN}",
            "--profile", f"kind=constant,rate=[{RATE}]", "--constraint", f"kind=max_requests,count={RATE * SECONDS}",
            "--output", f"kind=json,path={result}", cwd=tmp_path,
        )  # fmt: skip
        server.end()
    metrics = json.loads(result.read_text())["benchmarks"][0]["metrics"]
    summary = summary_of(recorded)

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    figures = {
        "itl_s": (mean("inter_token_latency_ms") / 1000, summary["itl_s"]["mean"]),
        "e2e_s": (mean("request_latency"), summary["e2e_s"]["mean"]),
        "requests_per_s": (mean("requests_per_second"), summary["request_throughput_per_s"]),
    }
    print("guidellm:", figures, "ttft_s", mean("time_to_first_token_ms") / 1000, summary["ttft_s"]["mean"])
    assert metrics["request_totals"]["successful"] == summary["requests"]["completed"]
    for name, (measured, own) in figures.items():
        assert close(measured, own), name


def test_schemathesis(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--model", "tiny", "--cpu_threads", "1", "--max_seq_len", "512",
               "--default_max_tokens", "8"]  # fmt: skip
    with server_process(*options) as server:
        checks = "not_a_server_error,status_code_conformance,content_type_conformance"
        description = f"{server.url}/openapi.json"
        tool("schemathesis", "run", description, "--checks", checks, "--max-examples", "100", cwd=tmp_path)
        _, printed = server.end()
    assert "Traceback" not in printed
