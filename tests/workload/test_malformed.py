"""Malformed input of every reader: one clear error with the file and the place, or skipped and counted."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.workload.reading import read_trace
from tests.workload.sample_files import NAMES, SAMPLES, read_or_refused, rows_of

# The lengths of a row of each sample, and its time if there is one.
LENGTHS = {
    "ifbbench.jsonl": ("prompt_len", "output_len"),
    "ifbbench_lengths.jsonl": ("prompt_len", "output_len"),
    "table.csv": ("prompt_len", "output_len"),
    "azure_2023.csv": ("ContextTokens", "GeneratedTokens"),
    "azure_2024.csv": ("ContextTokens", "GeneratedTokens"),
    "burstgpt.csv": ("Request tokens",),
    "vidur.csv": ("num_prefill_tokens", "num_decode_tokens"),
    "mooncake.jsonl": ("input_length", "output_length"),
    "mooncake_lengths.jsonl": ("input_length", "output_length"),
    "bailian.jsonl": ("input_length", "output_length"),
    "gptmanager.json": ("output_len",),
    "trtllm_bench.jsonl": ("output_tokens",),
    "vllm_result.json": ("input_lens",),
    "guidellm.json": ("prompt_tokens", "output_tokens"),
    "aiperf.jsonl": ("output_length",),
    "genai_perf.jsonl": ("output_length",),
    "vllm_dataset.jsonl": ("output_tokens",),
}
TIMES = {
    "ifbbench.jsonl": "arrival_s",
    "table.csv": "arrival_s",
    "azure_2023.csv": "TIMESTAMP",
    "azure_2024.csv": "TIMESTAMP",
    "burstgpt.csv": "Timestamp",
    "vidur.csv": "arrived_at",
    "mooncake.jsonl": "timestamp",
    "bailian.jsonl": "timestamp",
    "gptmanager.json": "delay",
    "vllm_result.json": "start_times",
    "guidellm.json": "request_start_time",
    "aiperf.jsonl": "timestamp",
    "genai_perf.jsonl": "timestamp",
}
BAD_LENGTHS = [0, -1, -(2**40), 2**31, 1.5, "many", True, float("nan"), [3], {"a": 1}, 10**400]
LONG_LINES = (b"x" * 10_000_000, b'{"a": "' + b"x" * 10_000_000 + b'"}', b"1," * 5_000_000)
BAD_TIMES = [-1, "soon", True, float("nan"), float("inf"), [3], {"a": 1}]


def error_of(path: Path, **options: Any) -> str:
    """The message of the error that reading raises: one line, with the file, not long."""
    with pytest.raises(InputError) as raised:
        read_trace(path, **options)
    message = str(raised.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 1_000
    return message


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(name, field, value) for name, fields in LENGTHS.items() for field in fields for value in BAD_LENGTHS]
    + [(name, field, value) for name, field in TIMES.items() for value in BAD_TIMES],
    ids=lambda value: str(value)[:20],
)
def test_bad_value(name: str, field: str, value: object, tmp_path: Path) -> None:
    """A good row, a bad one, a good one."""
    rows, write = rows_of(name)
    good = {key: given for key, given in rows[0].items() if key != "request_id"}
    path = tmp_path / "bad"
    path.write_text(write([good, good | {field: value}, good]))
    message = error_of(path)
    assert field in message
    assert "line 2" in message or "line 3" in message or "[1]" in message or "request 1" in message
    trace = read_trace(path, skip_bad_rows=True)
    assert (len(trace), trace.skipped_rows) == (2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_file_that_is_cut_anywhere(name: str, tmp_path: Path) -> None:
    content = (SAMPLES / name).read_bytes()
    path = tmp_path / "cut"
    for length in range(0, len(content), max(1, len(content) // 40)):
        path.write_bytes(content[:length])
        for skip in (False, True):
            read_or_refused(path, skip_bad_rows=skip)


@pytest.mark.parametrize("name", NAMES)
def test_cut_gzip(name: str, tmp_path: Path) -> None:
    packed = gzip.compress((SAMPLES / name).read_bytes())
    for file in ("cut.gz", "cut"):
        path = tmp_path / file
        path.write_bytes(packed[:-9])
        assert "the gzip file was cut off. Give the whole file." in error_of(path)


@pytest.mark.parametrize("name", NAMES)
def test_not_really_gzip(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gz"
    path.write_bytes((SAMPLES / name).read_bytes())
    assert "not a gzip file" in error_of(path)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(".json")])
def test_ten_megabytes_on_one_line(name: str, tmp_path: Path) -> None:
    """As the last line but one."""
    *lines, last = (SAMPLES / name).read_bytes().splitlines()
    path = tmp_path / "long"
    for long in LONG_LINES if name in ("azure_2024.csv", "ifbbench.jsonl") else LONG_LINES[:1]:
        path.write_bytes(b"\n".join((*lines, long, last)))
        assert f"line {len(lines) + 1}: longer than 8 MiB; expected one request a line." in error_of(path)
        trace = read_trace(path, skip_bad_rows=True)
        assert (trace.skipped_rows, len(trace)) == (1, len(read_trace(SAMPLES / name)))


@pytest.mark.parametrize("start", [b"", b"{", b"[", b'{"samples": [', b'{"data": "', b"a,b,", b'"'])
def test_a_file_of_one_endless_line(start: bytes, tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(start + b"x" * 10_000_000)
    error_of(path)


@pytest.mark.parametrize("name", NAMES)
def test_deeply_nested_and_huge_values(name: str, tmp_path: Path) -> None:
    """JSON nested 100,000 deep, and an integer of 5,000 digits, in the place of a row and of each value."""
    rows, write = rows_of(name)
    path = tmp_path / "deep"
    for evil in ("[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "1" * 5_000):
        for bad in ["HERE", *(rows[0] | {key: "HERE"} for key in rows[0])]:
            path.write_text(write([rows[0], bad]).replace('"HERE"', evil).replace("HERE", evil))
            read_or_refused(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\x80\x04\xff\x00\xfe", "not a text file in UTF-8"),
        (b"PAR1\x15\x04", "not a valid Parquet file"),
        (b"PK\x03\x04\x14\x00", "not a zip file that can be read"),
        (b"\x28\xb5\x2f\xfd\x00", "the zstd file was cut off"),
        ('{"arrival_s": 0}'.encode("utf-16"), "not a text file in UTF-8"),
        (b"a,b\xff\n", "not a text file in UTF-8"),
        (b"hello world\n", "unknown trace format (rows with hello world)"),
        (b"3", "unknown trace format (rows with 3)"),
        (b"[3", "not valid JSON"),
        (b'"words"', "unknown trace format (rows with words)"),
        (b"\xef\xbb\xbf", "it has no rows"),
        (b" \n\n ", "it has no rows"),
        (b"[]", "it has no rows"),
        (b"[[]]", "samples[0]: [] is not valid; expected a JSON object"),
        (b'{"benchmarks": 3}', "benchmarks without requests"),
        (b'{"benchmarks": [3]}', "benchmarks without requests"),
        (b'{"input_lens": [1], "output_lens": [1, 2]}', "2 output_lens for 1 input_lens"),
        (b'{"input_lens": [1], "output_lens": 4}', "no list of output_lens"),
        (b'{"data": {"a": 1}}', "no list of data"),
    ],
)
def test_file_that_is_no_trace(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert complaint in error_of(path)


def test_bytes_that_are_not_utf8_behind_the_beginning(tmp_path: Path) -> None:
    row = b'{"prompt_len": 1, "output_len": 1}\n'
    path = tmp_path / "file"
    path.write_bytes(row * 5_000 + b'{"prompt_len": 1, "output_len": 1, "class": "\xff"}\n')
    assert "line 5001: not valid JSON" in error_of(path)
    assert read_trace(path, skip_bad_rows=True).skipped_rows == 1


def test_nearest_format(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for keys, nearest in (
        ({"TIMESTAMP", "ContextTokens"}, "azure; missing: GeneratedTokens."),
        ({"task_id", "prompts", "output_tokens"}, "trtllm-bench; missing: prompt or input_ids or logits."),
        ({"input_ids"}, "gptmanager; missing: output_len."),
        ({"prompt_len"}, "ifbbench; missing: output_len or max_new_tokens."),
        ({"custom_id", "url"}, "openai-batch; missing: body."),
    ):
        path.write_text(json.dumps(dict.fromkeys(keys, 1)))
        assert f"The nearest format is {nearest}" in error_of(path)


def test_directory(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in error_of(tmp_path)


def test_a_named_format_that_the_file_does_not_have(tmp_path: Path) -> None:
    arguments = ["run", str(SAMPLES / "vidur.csv"), "--trace_format", "azure", "--device", "null"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "vidur.csv, line 2: TIMESTAMP is missing" in result.output


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    for name in ("azure_2024.csv", "burstgpt.csv", "vidur.csv", "mooncake.jsonl", "vllm_result.json", "guidellm.json"):
        rows, write = rows_of(name)
        path = tmp_path / name
        path.write_text(write(rows[::-1]))
        assert [one.arrival_s for one in read_trace(path)] == [one.arrival_s for one in read_trace(SAMPLES / name)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("prompt_len,output_len, prompt_len\n5,6,7\n", r"file, line 1: the column 'prompt_len' is there twice"),
        ('{"prompt_len": 5, "output_len": 6, "prompt_len": 7}\n', r"file, line 1: the key 'prompt_len' is there twice"),
        ('{"prompt_len" :5,"output_len":6,"prompt_len" :7}\n', r"file, line 1: the key 'prompt_len' is there twice"),
        ('[{"input_ids": [1], "output_len": 6, "output_len": 7}]', r"file, samples\[0\]: the key .output_len. is"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}], "output_length": 3}',
            r"file, line 1: the key 'content' is there twice",
        ),
    ],
)
def test_names_that_are_there_twice(content: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(InputError, match=complaint):
        read_trace(tmp_path / "file")


def test_columns_without_a_name_and_equal_keys_of_several_objects(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("prompt_len,output_len,,\n5,6,,\n")
    assert len(read_trace(tmp_path / "file")) == 1
    (tmp_path / "file").write_text('{"prompt_len": 5, "output_len": 6, "class": "a\\": b", "x": {"x": 1}}')
    assert len(read_trace(tmp_path / "file")) == 1
