"""A sample of each trace format: it is recognised from its content, and its requests are these."""

import gzip
import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from ifbbench.settings.groups.replay import TRACE_FORMAT_ALIASES, TRACE_FORMATS
from ifbbench.workload.formats import ReadOptions, write_trace
from ifbbench.workload.reading import FORMATS, read_trace
from ifbbench.workload.trace import TraceRequest

SAMPLES = Path(__file__).parent / "samples"


def request(request_id: int, arrival_s: float, prompt_len: int, output_len: int, **fields: Any) -> TraceRequest:
    reserved = fields.pop("max_new_tokens", output_len)
    return TraceRequest(request_id, arrival_s, prompt_len, reserved, output_len, **fields)


# The format of each file, and its requests in order of arrival.
EXPECTED: dict[str, tuple[str, list[TraceRequest]]] = {
    "ifbbench.jsonl": (
        "ifbbench",
        [
            request(3, 0.0, 600, 4, max_new_tokens=9, prefix_ids=(7,), request_class="chat"),
            request(4, 0.25, 3, 2, prompt_tokens=(5, 6, 7), priority=0.75, lora_task_id=1),
        ],
    ),
    "ifbbench_lengths.jsonl": ("ifbbench", [request(0, 0.0, 12, 3), request(1, 0.0, 7, 5)]),
    "table.csv": (
        "table",
        [request(10, 0.5, 100, 20, max_new_tokens=64, request_class="chat"), request(11, 0.75, 30, 5)],
    ),
    "azure_2023.csv": ("azure", [request(0, 0.0, 374, 44), request(1, 4.314579, 396, 109)]),
    "azure_2024.csv": ("azure", [request(0, 0.0, 2162, 5), request(1, 0.007405, 2399, 6)]),
    "burstgpt.csv": ("burstgpt", [request(0, 0.0, 472, 18), request(2, 113.0, 417, 276)]),
    "vidur.csv": ("lengths", [request(0, 0.0, 512, 64), request(1, 1.5, 128, 32)]),
    "mooncake.jsonl": (
        "mooncake",
        [request(0, 0.0, 1100, 52, prefix_ids=(46, 47, 2353)), request(1, 3.053, 512, 26, prefix_ids=(46,))],
    ),
    "mooncake_lengths.jsonl": ("mooncake", [request(0, 0.0, 6758, 500), request(1, 0.0, 7322, 490)]),
    "bailian.jsonl": (
        "bailian",
        [
            request(0, 0.0, 37, 132, prefix_ids=(1089, 1090, 1091), prefix_lens=(16, 16, 5)),
            request(1, 0.5, 32, 7, prefix_ids=(1089, 1090), prefix_lens=(16, 16)),
        ],
    ),
    "gptmanager.json": (
        "gptmanager",
        [request(0, 0.0, 3, 3, prompt_tokens=(5, 6, 7)), request(1, 0.5, 1, 1, prompt_tokens=(8,), lora_task_id=4)],
    ),
    "trtllm_bench.jsonl": (
        "trtllm-bench",
        [
            request(0, 0.0, 4, 8, prompt_tokens=(11, 12, 13, 14)),
            request(1, 0.0, 6, 5),
            request(2, 0.0, 2, 6, prompt_tokens=(1, 2), lora_task_id=3),
        ],
    ),
    "lmsys_chat.jsonl": ("sharegpt", [request(0, 0.0, 4, 3), request(2, 0.0, 1, 8)]),
    "wildchat.jsonl": ("sharegpt", [request(0, 0.0, 4, 3), request(1, 1.25, 1, 8)]),
    "sharegpt.json": ("sharegpt", [request(0, 0.0, 4, 3), request(2, 0.0, 1, 8)]),
    "openai_batch.jsonl": (
        "openai-batch",
        [request(0, 0.0, 7, 100), request(1, 0.0, 3, 20, prompt_tokens=(101, 102, 103)), request(2, 0.0, 2, 30)],
    ),
    "openai_batch_output.jsonl": ("openai-batch-output", [request(0, 0.0, 22, 2), request(3, 0.0, 30, 7)]),
    "vllm_result.json": ("vllm-result", [request(0, 0.0, 512, 128), request(2, 1.0, 64, 16)]),
    "guidellm.json": ("guidellm", [request(0, 0.0, 256, 128), request(1, 1.25, 250, 64)]),
    "aiperf.jsonl": (
        "aiperf",
        [request(0, 0.0, 4, 10), request(2, 0.25, 1, 6), request(1, 0.5, 2, 4), request(3, 1.0, 3, 7)],
    ),
    "aiperf_sessions.jsonl": ("aiperf", [request(0, 0.0, 2, 5), request(2, 0.1, 1, 7), request(1, 2.0, 3, 6)]),
    "aiperf_inputs.json": ("aiperf", [request(0, 0.0, 2, 8), request(1, 0.0, 8, 9)]),
    "chat_log.jsonl": ("aiperf", [request(0, 0.0, 7, 5), request(1, 0.0, 8, 2)]),
    "genai_perf_inputs.json": ("aiperf", [request(0, 0.0, 2, 8), request(1, 0.25, 4, 9)]),
    "genai_perf.jsonl": (
        "aiperf",
        [request(0, 0.0, 2, 12), request(2, 0.1, 1000, 5, prefix_ids=(1, 2)), request(1, 0.25, 1, 3)],
    ),
    "opentelemetry.jsonl": (
        "opentelemetry",
        [
            request(0, 0.0, 374, 44, max_new_tokens=64),
            request(2, 0.25, 396, 109),
            request(3, 0.5, 50, 1, max_new_tokens=8),
        ],
    ),
    "opentelemetry.json": ("opentelemetry", [request(0, 0.0, 7, 5, max_new_tokens=20), request(1, 0.5, 12, 3)]),
    "jaeger.json": ("opentelemetry", [request(0, 0.0, 30, 6), request(1, 1.5, 40, 9)]),
    "access_log.jsonl": ("usage-log", [request(0, 0.0, 30, 12), request(2, 2.5, 8, 3, max_new_tokens=16)]),
    "access_log_nested.jsonl": ("usage-log", [request(0, 0.0, 100, 20, max_new_tokens=64), request(1, 0.25, 200, 64)]),
    "vllm_dataset.jsonl": ("vllm-dataset", [request(0, 0.0, 7, 10), request(1, 0.0, 2, 12)]),
}


def test_every_format_has_a_sample() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in SAMPLES.iterdir())
    assert {name for name, _ in EXPECTED.values()} == set(FORMATS)


def test_the_settings_name_the_formats_that_exist() -> None:
    assert tuple(FORMATS) == TRACE_FORMATS
    assert set(TRACE_FORMAT_ALIASES.values()) <= set(FORMATS)


@pytest.mark.parametrize("name", EXPECTED)
def test_requests_of_a_sample(name: str) -> None:
    trace = read_trace(SAMPLES / name)
    assert list(trace) == EXPECTED[name][1]
    assert trace.skipped_rows == 0


@pytest.mark.parametrize("name", EXPECTED)
def test_the_suffix_does_not_matter(name: str, tmp_path: Path) -> None:
    for other in ("trace", "trace.txt", "trace.json", "trace.csv", "trace.jsonl"):
        shutil.copy(SAMPLES / name, tmp_path / other)
        assert list(read_trace(tmp_path / other)) == EXPECTED[name][1]
    (tmp_path / "packed").write_bytes(gzip.compress((SAMPLES / name).read_bytes()))
    assert list(read_trace(tmp_path / "packed")) == EXPECTED[name][1]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_format_can_be_named(name: str) -> None:
    trace_format, requests = EXPECTED[name]
    assert list(read_trace(SAMPLES / name, options=ReadOptions(trace_format=trace_format))) == requests


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_written_of_a_sample_is_the_same_trace(name: str, tmp_path: Path) -> None:
    write_trace(read_trace(SAMPLES / name), tmp_path / "again.jsonl")
    assert list(read_trace(tmp_path / "again.jsonl")) == EXPECTED[name][1]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_requests_of_a_sample(name: str) -> None:
    trace = read_trace(SAMPLES / name, max_num_samples=1)
    assert list(trace) == [min(EXPECTED[name][1], key=lambda one: one.request_id)]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input(name: str, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.TextIOWrapper(io.BufferedReader(io.BytesIO(pack((SAMPLES / name).read_bytes()))))
    monkeypatch.setattr("sys.stdin", piped)
    trace = read_trace(Path("-"))
    assert (list(trace), trace.name, trace.source) == (EXPECTED[name][1], "stdin", "-")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("burstgpt.csv", "rows of failed requests are left out: 1"),
        ("vllm_result.json", "rows of failed requests are left out: 1"),
        ("guidellm.json", "rows of failed requests are left out: 1"),
        ("openai_batch_output.jsonl", "rows of failed requests are left out: 2"),
        ("lmsys_chat.jsonl", "conversations without an answer are left out: 1"),
        ("sharegpt.json", "conversations without an answer are left out: 1"),
        ("sharegpt.json", "one token for each 4 characters"),
        ("mooncake.jsonl", None),
        ("azure_2023.csv", None),
    ],
)
def test_what_a_user_must_know_is_noted(name: str, note: str | None, caplog: pytest.LogCaptureFixture) -> None:
    trace = read_trace(SAMPLES / name)
    assert any(note in one for one in trace.notes) if note else not trace.notes
    assert (note or "") in caplog.text
