"""Bad input of each kind gets one clear line and exit status 2, and nothing that was written is lost."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main

GOOD_ROW = {"arrival_s": 0.0, "prompt_len": 8, "output_len": 3}


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def trace_file(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "best"], ["--policy", "'best'", "max_utilization"]),
        (["--max_batch_size", "0"], ["--max_batch_size", "0", "at least 1"]),
        (["--max-num-tokens", "-5"], ["--max_num_tokens", "-5", "at least 1"]),
        (["--tokens_per_block", "0"], ["--tokens_per_block", "at least 1"]),
        (["--max_tokens_in_paged_kvcache", "0"], ["--max_tokens_in_paged_kvcache", "at least 1"]),
        (["--kv_cache_free_gpu_mem_fraction", "1.5"], ["--kv_cache_free_gpu_mem_fraction", "at most 0.99"]),
        (["--request_rate", "0"], ["--request_rate", "above 0"]),
        (["--time_scale", "-1"], ["--time_scale", "at least 0"]),
        (["--enable_chunked_context", "--max_num_tokens", "16"], ["--max_num_tokens", "16", "32", "chunk"]),
        (["--device", "cpu", "--max_seq_len", "1000000"], ["--max_seq_len", "1000000", "16384"]),
        (["--max_attention_window", "12,x"], ["--max_attention_window", "12,x", "tokens"]),
        (["--max_attention_window", "64", "--sink_token_len", "64"], ["--sink_token_len", "64"]),
        (["--kv_cache_type", "contiguous", "--policy", "max_utilization"], ["--kv_cache_type", "max_utilization"]),
        (["--kv_cache_type", "contiguous", "--enable_kv_cache_reuse"], ["--enable_kv_cache_reuse", "paged"]),
        (["--model", "no/such/model"], ["no/such/model"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--reserve", "half"], ["reserve", "half", "factor:F"]),
        (["--device", "null", "--responses_json", "r.json"], ["--responses_json", "null"]),
        (["--responses_json", "no/such/folder/r.json"], ["--responses_json", "directory that exists"]),
        (["--iteration_log", "no/such/folder/i.log"], ["--iteration_log", "directory that exists"]),
        (["--report_json", "a.json", "--result_json", "./a.json"], ["--result_json", "--report_json", "same file"]),
    ],
)
def test_bad_settings(options: list[str], words: list[str], tmp_path: Path) -> None:
    device = [] if "--device" in options else ["--device", "null"]
    if "--responses_json" in options:
        device = [] if "--device" in options else ["--device", "cpu"]
    trace = trace_file(tmp_path, GOOD_ROW)
    status, output = invoke("run", trace, *device, *options, "--output", tmp_path / "run")
    assert status == 2
    for word in words:
        assert word in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD_ROW, {**GOOD_ROW, "prompt_len": 0}], ["2", "prompt_len"]),
        ([GOOD_ROW, {**GOOD_ROW, "output_len": "many"}], ["2", "output_len"]),
        ([GOOD_ROW, {"arrival_s": -1, "prompt_len": 3, "output_len": 1}], ["2", "arrival_s"]),
        ([], ["at least one request"]),
    ],
)
def test_bad_rows(rows: list[object], words: list[str], tmp_path: Path) -> None:
    status, output = invoke("run", trace_file(tmp_path, *rows), "--device", "null", "--output", tmp_path / "run")
    assert status == 2
    assert "trace.jsonl" in output
    for word in words:
        assert word in output


@pytest.mark.usefixtures("small_model")
def test_token_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, {"arrival_s": 0.0, "prompt_tokens": [1, 2, 99_999], "output_len": 1})
    status, output = invoke("run", trace, "--device", "cpu", "--output", tmp_path / "run")
    assert status == 2
    assert "99999" in output
    assert "4096" in output
    assert not (tmp_path / "run").exists()


def test_a_cache_beyond_all_memory_is_as_large_as_memory_has_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = trace_file(tmp_path, GOOD_ROW)
    tokens = 100_000_000_000_000
    settings = ("--max_tokens_in_paged_kvcache", str(tokens))
    status, _ = invoke("run", trace, "--device", "cpu", *settings, "--output", tmp_path / "run")
    assert status == 0
    assert f"--max_tokens_in_paged_kvcache {tokens}: memory has room for" in caplog.text
    resolved = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["max_tokens_in_paged_kvcache"]
    assert 0 < resolved < tokens


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, GOOD_ROW, {**GOOD_ROW, "prompt_len": 0}, GOOD_ROW)
    status, _ = invoke("run", trace, "--device", "null", "--skip_bad_rows", "--output", tmp_path / "run")
    assert status == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["trace"]["skipped_rows"] == 1


def test_missing_trace(tmp_path: Path) -> None:
    status, output = invoke("run", tmp_path / "nothing.csv", "--device", "null")
    assert status == 2
    assert "nothing.csv does not exist" in output


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    trace = trace_file(tmp_path, GOOD_ROW)
    status, output = invoke("run", trace, "--device", "null", "--output", tmp_path / "file" / "run")
    assert status == 2
    assert "Not a directory; give a directory that you can write to" in output
    assert (tmp_path / "file").read_text() == "in the way"


def test_existing_output_is_kept_unless_overwritten(tmp_path: Path) -> None:
    trace, output_directory = trace_file(tmp_path, GOOD_ROW), tmp_path / "run"
    arguments = ("run", trace, "--device", "null", "--output", output_directory)
    assert invoke(*arguments)[0] == 0
    before = (output_directory / "summary.json").read_bytes()
    status, output = invoke(*arguments)
    assert status == 2
    assert "--overwrite" in output
    assert (output_directory / "summary.json").read_bytes() == before
    assert invoke(*arguments, "--overwrite")[0] == 0


def test_a_directory_that_is_no_run_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    trace = trace_file(tmp_path, GOOD_ROW)
    status, _ = invoke("run", trace, "--device", "null", "--output", tmp_path / "thesis", "--overwrite")
    assert status == 2
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


def test_refused_requests_make_status_1_and_the_others_run(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, GOOD_ROW, {**GOOD_ROW, "prompt_len": 600}, {**GOOD_ROW, "prompt_len": 100})
    status, output = invoke(
        "run",
        trace,
        "--device",
        "null",
        "--max_num_tokens",
        "500",
        "--max_tokens_in_paged_kvcache",
        "96",
        "--no_enable_chunked_context",
        "--output",
        tmp_path / "run",
    )
    assert status == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    errors = {row["index"]: row["error"] for row in rows}
    assert errors[0] is None
    assert "max_input_len 500" in errors[1]
    assert "KV cache blocks" in errors[2]
    assert "2 requests failed" in output
