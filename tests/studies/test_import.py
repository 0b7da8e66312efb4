"""`ifbbench import`: logs of other engines become run directories, as far as they go.

The logs are those that `--iteration_stats_format` writes, whose runs are known; and TensorRT-LLM's statistics made of a
run, with the state of each request. `benchmarks.vllm_server` imports the log of a real vLLM server.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ifbbench.cli.main import main
from ifbbench.report.charts import LOG_CHARTS
from ifbbench.rundir.reader import load_run
from tests.live.recordings import lines
from tests.report.test_schema import check
from tests.studies.logged import CHUNKED, replayed, tensorrt_llm

BASE = "run chat --device sim:h100-sxm --model llama-3.1-8b --time_scale 0 --quiet"
VLLM = f"{BASE} --engine vllm --max_num_samples 25 --max_tokens_in_paged_kvcache 8192 --max_num_tokens 1024"
SGLANG = f"{BASE} --engine sglang --max_num_samples 25 --max-total-tokens 20000 --chunked-prefill-size 1024"
COUNTS = ("Context Requests", "Total Context Tokens", "Generation Requests")


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def run(words: str, directory: Path) -> Path:
    result = call(*words.split(), "--output", str(directory))
    assert result.exit_code == 0, result.output
    return directory


def imported(file: Path, directory: Path) -> Path:
    result = call("import", str(file), "--output", str(directory))
    assert result.exit_code == 0, result.output
    assert "Not in it:" in result.output
    assert check(directory) >= {"run.json", "summary.json", "iterations.jsonl"}
    return directory


@pytest.fixture(scope="module")
def of_vllm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and what was imported of its log."""
    folder = tmp_path_factory.mktemp("vllm")
    original = run(f"{VLLM} --iteration_stats_format vllm", folder / "run")
    return original, imported(original / "vllm.log", folder / "imported")


def test_each_iteration_of_vllm_has_its_counts(of_vllm: tuple[Path, Path]) -> None:
    original, found = (lines(path, "iterations") for path in of_vllm)
    for name in COUNTS:
        assert [row[name] for row in found] == [row[name] for row in original]
    blocks = load_run(of_vllm[0]).run["num_kv_blocks"]
    for one, other in zip(found, original, strict=True):
        assert one["Used KV cache blocks"] == pytest.approx(other["Used KV cache blocks"], abs=1 + blocks / 1000)
        assert one["ifbbench"]["budget_used"] == other["ifbbench"]["budget_used"]
    # Time stamps are whole seconds: in between, the durations that vLLM logs place the lines.
    begin_s = original[0]["ifbbench"]["start_s"]
    for one, other in zip(found, original, strict=True):
        assert one["ifbbench"]["start_s"] == pytest.approx(other["ifbbench"]["start_s"] - begin_s, abs=1.1)
    starts = [row["ifbbench"]["start_s"] for row in found]
    assert starts == sorted(starts)


@pytest.mark.usefixtures("without_layout")
@pytest.mark.parametrize(
    "command", ["report", "why", "plot", "plot --html", "export --format csv", "export --format perfetto"]
)
def test_other_commands_read_it(of_vllm: tuple[Path, Path], command: str) -> None:
    result = call(*command.split()[:1], str(of_vllm[1]), *command.split()[1:])
    assert result.exit_code == 0, result.output
    if command == "report":
        assert "Imported from vllm.log (vLLM log). Not in it:\n- Requests" in result.output
        assert "The log names no limit" in result.output
        assert "[BENCHMARK]" not in result.output
    if command == "plot":
        drawn = {path.stem for path in (of_vllm[1] / "charts").iterdir()}
        assert drawn == set(LOG_CHARTS)
        only = call("plot", str(of_vllm[1]), "--only", "ttft")
        assert only.exit_code == 2
        assert "without requests, which it shows; expected bound, budget" in only.output
    if command == "why":
        assert "vllm.log (vLLM log) has no requests" in result.output
        assert "--request" not in result.output


def test_it_is_compared_with_a_run(of_vllm: tuple[Path, Path]) -> None:
    result = call("compare", *map(str, of_vllm))
    assert result.exit_code == 0, result.output
    assert "Settings" not in result.output  # of those of the server the log has one, which is the same


def test_calibrate_asks_for_the_log_itself(of_vllm: tuple[Path, Path], tmp_path: Path) -> None:
    result = call("calibrate", "--from", str(of_vllm[1]), "--gpu", "h100-sxm", "--output", str(tmp_path / "a.toml"))
    assert result.exit_code == 2
    assert "was imported from vllm.log, which has no requests; give --from that log itself" in result.output


def test_it_has_no_requests_to_replay(of_vllm: tuple[Path, Path], tmp_path: Path) -> None:
    result = call("run", str(of_vllm[1]), "--device", "null", "--output", str(tmp_path / "again"))
    assert result.exit_code == 2
    assert "holds no request" in result.output


def test_batches_of_sglang(tmp_path: Path) -> None:
    original = run(f"{SGLANG} --iteration_stats_format sglang", tmp_path / "run")
    found = lines(imported(original / "sglang.log", tmp_path / "imported"), "iterations")
    rows = lines(original, "iterations")
    prefills = [[row[name] for name in COUNTS[:2]] for row in rows if row["Context Requests"]]
    assert [[row[name] for name in COUNTS[:2]] for row in found if row["Context Requests"]] == prefills
    decodes = [row["Generation Requests"] for row in rows if not row["Context Requests"]]
    logged = [row["Generation Requests"] for row in found if not row["Context Requests"]]
    assert len(logged) == len(decodes) // 40 * 40
    assert logged[::40] == decodes[39::40]
    queues = [row["ifbbench"]["queued"] for row in rows if row["Context Requests"]]
    assert [row["ifbbench"]["queued"] for row in found if row["Context Requests"]] == queues
    end_s = rows[-1]["ifbbench"]["start_s"] - rows[0]["ifbbench"]["start_s"]
    assert found[-1]["ifbbench"]["start_s"] == pytest.approx(end_s, abs=1.5)
    for command in ("report", "why"):
        assert call(command, str(tmp_path / "imported")).exit_code == 0


def request_stats(directory: Path) -> list[dict[str, Any]]:
    """TensorRT-LLM's statistics of a run, with the state of each request after each iteration."""
    rows, spans = tensorrt_llm(directory), lines(directory, "spans")
    state = {row["request_id"]: {"position": 0, "outputs": 0} for row in lines(directory, "requests")}
    lengths = {row["request_id"]: row["output_len"] for row in lines(directory, "requests")}
    for number, row in enumerate(rows):
        listed = list[dict[str, Any]]()
        for span in sorted(spans, key=lambda span: span["request_id"]):
            if not span["first_iteration"] <= number <= span["last_iteration"]:
                continue
            one, phase = state[span["request_id"]], span["phase"]
            if phase == "context":
                one["position"] += span["chunks"][number - span["first_iteration"]]
                one["outputs"] += number == span["last_iteration"] and bool(span["produced"])
            elif phase == "generation":
                one["outputs"] += 1
            stage = {"waiting": "QUEUED", "context": "CONTEXT_IN_PROGRESS"}.get(phase, "GENERATION_IN_PROGRESS")
            if one["outputs"] == lengths[span["request_id"]]:
                stage = "GENERATION_COMPLETE"
            listed.append(
                {
                    "id": 100 + span["request_id"],
                    "stage": stage,
                    "contextPrefillPosition": one["position"],
                    "numGeneratedTokens": one["outputs"],
                    "scheduled": phase in ("context", "generation"),
                    "paused": False,
                    "reusedBlocksPerRequest": 0,
                }
            )
        row |= {"requestStats": listed, "numQueuedRequests": sum(one["stage"] == "QUEUED" for one in listed)}
    return rows


@pytest.mark.usefixtures("without_layout")
def test_requests_of_tensorrt_llm(tmp_path: Path) -> None:
    replayed(tmp_path / "run", "sim:h100-sxm", max_num_samples=12, request_rate=60.0, **CHUNKED)
    rows = request_stats(tmp_path / "run")
    (tmp_path / "iterations.log").write_text("\n".join(map(json.dumps, rows)))
    directory = imported(tmp_path / "iterations.log", tmp_path / "imported")
    original, found = (
        {row["request_id"]: row for row in lines(path, "requests")} for path in (tmp_path / "run", directory)
    )
    assert len(found) == 12
    for request_id, row in found.items():
        expected = original[request_id]
        assert row["outcome"] == "completed"
        assert (row["prompt_len"], row["output_len"]) == (expected["prompt_len"], expected["output_len"])
        assert row["tpot_s"] == pytest.approx(expected["tpot_s"], abs=1e-4)
        # It arrives with the first iteration that lists it.
        assert expected["ttft_s"] - 0.1 < row["ttft_s"] <= expected["ttft_s"] + 1e-4
        assert sum(row["attribution_s"].values()) == pytest.approx(row["e2e_s"], abs=1e-4)
    assert _running(directory) == _running(tmp_path / "run")
    for command in ("report", "why --budget 0", "plot"):
        result = call(command.split()[0], str(directory), *command.split()[1:])
        assert result.exit_code == 0, result.output
    replay = call("run", str(directory), "--device", "null", "--quiet", "--output", str(tmp_path / "again"))
    assert replay.exit_code == 0, replay.output
    _other_settings_are_tried(directory)


def _other_settings_are_tried(directory: Path) -> None:
    """With the model and the GPU, which a log does not name."""
    alone = call("why", str(directory))
    assert alone.exit_code == 0, alone.output
    assert "does not name the server's model and device; add --model and --device" in alone.output
    tried = ("why", str(directory), "--what_if", "max_batch_size=4", "--model", "llama-3.1-8b", "--device")
    found = call(*tried, "h100-sxm")
    assert found.exit_code == 0, found.output
    assert "--max_batch_size 4" in found.output
    assert "Of the server's settings the log names" in found.output
    assert "h99" in call(*tried, "h99").output


def _running(directory: Path) -> list[Any]:
    """The spans in which requests run."""
    names = ("request_id", "first_iteration", "last_iteration", "phase", "tokens", "chunks", "produced")
    spans = [span for span in lines(directory, "spans") if span["phase"] in ("context", "generation")]
    return sorted([span.get(name) for name in names] for span in spans)


def test_the_output_of_trtllm_bench(tmp_path: Path) -> None:
    """Dictionaries of Python, without requests."""
    replayed(tmp_path / "run", "sim:h100-sxm", max_num_samples=10)
    (tmp_path / "iterations.log").write_text("\n".join(map(str, tensorrt_llm(tmp_path / "run"))))
    found = lines(imported(tmp_path / "iterations.log", tmp_path / "imported"), "iterations")
    for name in (*COUNTS, "Used KV cache blocks", "Active Request Count"):
        assert [row[name] for row in found] == [row[name] for row in lines(tmp_path / "run", "iterations")]
    summary = json.loads((tmp_path / "imported" / "summary.json").read_text())
    assert summary["request_throughput_per_s"] is None
    assert summary["output_throughput_tokens_per_s"] > 0


ITERATION = "Iteration(1): 1 context requests, 5 context tokens, 0 generation requests, 0 generation tokens, "
ITERATION += "iteration elapsed time: 5.00 ms"
DAYS = (7, 1), (8, 2), (7, 3), (8, 4)  # of November, and seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("hello\n", "no known log, it begins with 'hello'"),
        (ITERATION.replace("context tokens", "context units") + "\n\n", "line 1: an iteration of another version"),
        (f"Engine 000: {ITERATION}\nEngine 001: {ITERATION}\n", "has iterations of 2 engines (0, 1)"),
        (
            "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, "
            "Waiting: 0 reqs, GPU KV cache usage: 1.0%",
            "start the server with --enable-logging-iteration-details",
        ),
        (f"{ITERATION}\nDecode batch, #running-req: 1\n", "has lines of vLLM and of SGLang"),
        ("Decode batch, #running-req: x\n\n", "line 1: a batch of another version of SGLang"),
        ('{"iterLatencyMS": 1, "inflightBatchingStats": 3}', "no inflightBatchingStats"),
        (
            '{"iterLatencyMS": 1, "inflightBatchingStats": {"numContextRequests": 1, "numGenRequests": 0, '
            '"numCtxTokens": 4}, "requestStats": [{"id": 1, "scheduled": true, "contextPrefillPosition": -1}]}',
            "contextPrefillPosition",
        ),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.log").write_text(text)
    result = call("import", str(tmp_path / "a.log"), "--output", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_existing_run_is_kept(of_vllm: tuple[Path, Path], tmp_path: Path) -> None:
    original, _ = of_vllm
    log, directory = str(original / "vllm.log"), str(tmp_path / "run")
    assert call("import", log, "--output", directory).exit_code == 0
    assert "add --overwrite" in call("import", log, "--output", directory).output
    assert call("import", log, "--output", directory, "--overwrite").exit_code == 0
    assert call("import", str(tmp_path / "nothing.log")).exit_code == 2


def test_a_log_that_is_cut_and_one_of_two_servers(of_vllm: tuple[Path, Path], tmp_path: Path) -> None:
    """What is there is imported, and the rest is said."""
    text = (of_vllm[0] / "vllm.log").read_text()
    packed = gzip.compress(text.encode())
    (tmp_path / "cut.log.gz").write_bytes(packed[: len(packed) * 2 // 3])
    cut = call("import", str(tmp_path / "cut.log.gz"), "--output", str(tmp_path / "cut"))
    assert cut.exit_code == 0, cut.output
    assert "- The file is cut off" in cut.output
    whole = lines(of_vllm[1], "iterations")
    assert 0 < len(lines(tmp_path / "cut", "iterations")) < len(whole)
    (tmp_path / "again.log").write_text(text + text)
    again = call("import", str(tmp_path / "again.log"), "--output", str(tmp_path / "again"))
    assert again.exit_code == 0, again.output
    first = next(number for number, line in enumerate(text.split("\n"), start=1) if "Iteration(" in line)
    line = first + text.count("\n")
    assert f"- The server was started again in line {line:,}: what ran before has no end" in again.output
    assert len(lines(tmp_path / "again", "iterations")) == 2 * len(whole)
    assert "started again" not in call("import", str(of_vllm[0] / "vllm.log"), "-o", str(tmp_path / "one")).output


def test_a_clock_that_goes_back(tmp_path: Path) -> None:
    rows = [
        f"INFO 11-2{day} 10:00:0{second} Iteration({second}): {ITERATION.split(': ', 1)[1]}" for day, second in DAYS
    ]
    (tmp_path / "a.log").write_text("\n".join(rows))
    result = call("import", str(tmp_path / "a.log"), "--output", str(tmp_path / "a"))
    assert result.exit_code == 0, result.output
    assert "- Its clock goes back in line 3:" in result.output
    starts = [row["ifbbench"]["start_s"] for row in lines(tmp_path / "a", "iterations")]
    assert starts == sorted(starts)
    assert starts[-1] < 2 * 86_400


def test_sglang_that_was_started_again(tmp_path: Path) -> None:
    original = run(f"{SGLANG} --iteration_stats_format sglang", tmp_path / "run")
    text = (original / "sglang.log").read_text()
    start = "[2026-11-28 10:00:00] server_args=ServerArgs(chunked_prefill_size=1024)\n"
    (tmp_path / "again.log").write_text(text + start + text)
    result = call("import", str(tmp_path / "again.log"), "--output", str(tmp_path / "again"))
    assert result.exit_code == 0, result.output
    assert f"started again in line {text.count(chr(10)) + 1:,}:" in result.output


def test_the_config_of_a_log_is_what_it_says(of_vllm: tuple[Path, Path]) -> None:
    """Settings that a log does not say are those of its server, and no defaults of ours."""
    shown = call("config", "show", str(of_vllm[1]), "--device", "h100-sxm", "--model", "llama-3.1-8b", "--as", "vllm")
    assert (shown.exit_code, shown.stdout) == (0, "vllm serve llama-3.1-8b --async-scheduling\n")
