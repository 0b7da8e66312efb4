"""The log of a vLLM server: its definition of context requests, its summaries, and that calibration reads it back."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main as cli
from ifbbench.rundir.run_directory import SERVER_LOGS
from ifbbench.studies.engine_logs import read_vllm
from ifbbench.studies.log import Log

VLLM_LOG = SERVER_LOGS["vllm"]
RUN = (
    "run chat --engine vllm --device sim:h100-sxm --model llama-3.1-8b --max_tokens_in_paged_kvcache 8192"
    " --time_scale 0 --max_num_samples 60 --max_num_tokens 1024 --quiet --overwrite --iteration_stats_format"
)
ITERATION = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, (\d+) generation "
    r"tokens, iteration elapsed time: ([\d.]+) ms, GPU KV cache usage: ([\d.]+)%"
)


def ran(*words: str) -> None:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which requests are pre-empted while they generate."""
    path = tmp_path_factory.mktemp("vllm") / "run"
    ran(*RUN.split(), "vllm", "--output", str(path))
    return path


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_request_that_computes_its_prompt_again_counts_as_generation(run: Path) -> None:
    found = [tuple(map(float, match.groups())) for match in ITERATION.finditer((run / VLLM_LOG).read_text())]
    rows = lines_of(run / "iterations.jsonl")
    assert len(found) == len(rows)
    resumed: dict[int, int] = {}
    for span in lines_of(run / "spans.jsonl"):
        for index, tokens in enumerate(span.get("chunks") or ()):
            if span["phase"] == "recompute":
                resumed[span["first_iteration"] + index] = tokens + resumed.get(span["first_iteration"] + index, 0)
    assert len(resumed) > 3
    for (number, contexts, context_tokens, generating, generated, _, usage), row in zip(found, rows, strict=True):
        assert number == row["Iteration Counter"]
        assert context_tokens == row["Total Context Tokens"] - resumed.get(int(number), 0)
        assert contexts + generating == row["Scheduled Requests"]
        assert context_tokens + generated == row["ifbbench"]["budget_used"]
        assert usage == pytest.approx(100 * row["Used KV cache blocks"] / row["Max KV cache blocks"], abs=0.05)
    # With two batches in flight, each is waited for from the end of the one before.
    ends = [row["ifbbench"]["start_s"] + row["ifbbench"]["latency_ms"] / 1000 for row in rows]
    periods = [1000 * (end - before) for before, end in pairwise(ends)]
    assert all(one[5] <= period + 0.01 for one, period in zip(found[1:], periods, strict=True))


def test_each_ten_seconds_have_a_summary(run: Path) -> None:
    text = (run / VLLM_LOG).read_text()
    rows = lines_of(run / "iterations.jsonl")
    begin_s, summaries = rows[0]["ifbbench"]["start_s"], [line for line in text.splitlines() if "Avg prompt" in line]
    ends = [row["ifbbench"]["start_s"] + row["ifbbench"]["latency_ms"] / 1000 - begin_s for row in rows]
    assert len(summaries) == int(ends[-1] // 10) >= 1
    match = re.search(
        r"Engine 000: Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
        r"Running: (\d+) reqs, Waiting: (\d+) reqs, Preemptions: (\d+), GPU KV cache usage: ([\d.]+)%, Prefix cache "
        r"hit rate: ([\d.]+)%",
        summaries[0],
    )
    assert match is not None
    prompts, outputs, running, waiting, pauses, _, _ = map(float, match.groups())
    assert pauses == sum(len(row["ifbbench"]["paused"]) for row, end in zip(rows, ends, strict=True) if end <= 10)
    requests = lines_of(run / "requests.jsonl")
    computed = sum(one["prompt_len"] - one["reused_tokens"] for one in requests if one["first_token_s"] - begin_s <= 10)
    assert 10 * prompts == pytest.approx(computed, abs=1)
    assert 0 < 10 * outputs < sum(one["output_len"] for one in requests)
    ended = sum(one["end_s"] - begin_s <= 10 for one in requests)
    assert running + waiting == pytest.approx(len(requests) - ended, abs=1)


def test_calibration_reads_resumed_requests_as_prompts(run: Path) -> None:
    log = Log(run / VLLM_LOG)
    read_vllm(log, log.path.read_text(), None)
    rows = lines_of(run / "iterations.jsonl")
    works = [sample.work for sample, _ in log.samples]
    # A request that has ended unnoticed is in one more batch, where all counts agree.
    assert [work.context_tokens for work in works] == [row["Total Context Tokens"] for row in rows]
    assert [work.context_requests for work in works] == [row["Context Requests"] for row in rows]
    assert log.overlaps is True


def test_the_log_changes_no_other_file_and_goes_with_the_run(run: Path, tmp_path: Path) -> None:
    ran(*RUN.split(), "vllm", "--output", str(tmp_path / "run"))
    assert (tmp_path / "run" / VLLM_LOG).read_bytes() == (run / VLLM_LOG).read_bytes()
    ran(*RUN.split(), "batch_manager", "--output", str(tmp_path / "run"))
    assert not (tmp_path / "run" / VLLM_LOG).exists()
    for name in ("iterations.jsonl", "spans.jsonl", "requests.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize(
    "words", ["--engine trtllm", "--engine vllm --recording summary", "--engine vllm --iteration_stats_every 5"]
)
def test_what_has_no_such_log_is_refused(words: str) -> None:
    given = ["run", "chat", "--device", "null", *words.split(), "--iteration_stats_format", "vllm", "--quiet"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 2
    assert "--iteration_stats_format vllm" in done.stderr
