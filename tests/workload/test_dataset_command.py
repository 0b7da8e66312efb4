"""`ifbbench dataset`, as called from a shell."""

import json
import re

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.workload.load import bundled_path
from ifbbench.workload.reading import read_trace

NORMAL = "synth token-norm-dist --num-requests 40 --input-mean 90 --input-stdev 5 --output-mean 20 --output-stdev 2"
LENGTHS = "--num-requests 40 --input-mean 90 --input-stdev 5 --output-mean 20 --output-stdev 2"
SHARED = f"synth shared-prefix --pools 2 --prefix-mean 70 {LENGTHS}"
TURNS = f"synth multi-turn --turns-mean 3 --think-time-mean 8 {LENGTHS}"
UNIFORM = "synth token-unif-dist --num-requests 40 --input-min 3 --input-max 9 --output-min 1 --output-max 4"


def dataset(command, *others):
    return CliRunner().invoke(main, ["dataset", *command.split(), *map(str, others)])


def test_normal(tmp_path):
    result = dataset(NORMAL, "--random-seed", 3, "-o", tmp_path / "a.jsonl")
    assert result.exit_code == 0
    trace = read_trace(tmp_path / "a.jsonl")
    assert len(trace) == 40
    assert sum(request.prompt_len for request in trace) / 40 == pytest.approx(90, abs=5)
    assert all(request.max_new_tokens == request.output_len and request.arrival_s == 0 for request in trace)


def test_uniform_with_arrivals_and_reservation(tmp_path):
    result = dataset(f"{UNIFORM} --arrival constant --request-rate 4 --reserve fixed:6 -o", tmp_path / "a.jsonl")
    assert result.exit_code == 0
    trace = read_trace(tmp_path / "a.jsonl")
    assert all(3 <= request.prompt_len <= 9 and 1 <= request.output_len <= 4 for request in trace)
    assert [request.arrival_s for request in trace] == [index / 4 for index in range(40)]
    assert {request.max_new_tokens for request in trace} == {6}


def test_shared_prefixes(tmp_path):
    result = dataset(SHARED, "--share", 0.8, "--skew", 1, "-o", tmp_path / "a.jsonl")
    assert result.exit_code == 0
    trace = read_trace(tmp_path / "a.jsonl")
    assert {request.prefix_ids for request in trace} == {None, (0,), (1,)}
    assert {request.prefix_lens for request in trace} == {None, (70,)}


def test_conversations(tmp_path):
    assert dataset(f"{TURNS} --arrival poisson --request-rate 2 -o", tmp_path / "a.jsonl").exit_code == 0
    trace = read_trace(tmp_path / "a.jsonl")
    assert len(trace) == 40
    first_ids = [request.prefix_ids[0] for request in trace if request.prefix_ids]
    assert 5 < len(set(first_ids)) < 30


def test_underscores_and_dashes_are_the_same(tmp_path):
    arrivals = " --arrival all_at_once -o"
    assert dataset(NORMAL + arrivals, tmp_path / "dashes.jsonl").exit_code == 0
    underscores = re.sub(r"(?<=\w)-(?=\w)", "_", NORMAL + arrivals)
    assert dataset(underscores, tmp_path / "underscores.jsonl").exit_code == 0
    assert (tmp_path / "dashes.jsonl").read_bytes() == (tmp_path / "underscores.jsonl").read_bytes()


def test_bundled_default_is_what_its_readme_says(tmp_path):
    path = bundled_path("default")
    assert path is not None
    readme = (path.parent / "README.md").read_text()
    command = readme.split("```sh\nifbbench dataset ")[1].split("-o datasets/default.jsonl")[0].replace("\\\n", " ")
    assert dataset(command, "-o", tmp_path / "default.jsonl").exit_code == 0
    assert (tmp_path / "default.jsonl").read_bytes() == path.read_bytes()


def test_existing_output(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("precious")
    refused = dataset(UNIFORM, "-o", path)
    assert refused.exit_code == 2
    assert "already exists" in refused.output
    assert path.read_text() == "precious"
    assert dataset(UNIFORM, "-o", path, "--overwrite").exit_code == 0
    assert len(read_trace(path)) == 40


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (f"{SHARED} --pools 0", "0 is not in the range x>=1"),
        (f"{SHARED} --share 1.5", "1.5 is not in the range 0<=x<=1"),
        (f"{TURNS} --turns-mean 0.5", "0.5 is not in the range x>=1"),
        (f"{TURNS} --request-rate 3", "--arrival all_at_once takes no --request-rate"),
    ],
)
def test_bad_options_of_prompts_that_share(tmp_path, command, complaint):
    result = dataset(command, "-o", tmp_path / "a.jsonl")
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--arrival poisson", "--arrival poisson needs a --request-rate"),
        ("--request-rate 3", "--arrival all_at_once takes no --request-rate"),
        ("--reserve much", "reserve 'much' is not valid"),
        ("--input-max 2", "prompt_len: max is 2; expected at least min (3)"),
        ("--output-min 0", "0 is not in the range x>=1"),
    ],
)
def test_bad_options(tmp_path, options, complaint):
    result = dataset(f"{UNIFORM} {options}", "-o", tmp_path / "a.jsonl")
    assert result.exit_code == 2
    assert complaint in result.output
    assert not (tmp_path / "a.jsonl").exists()


def test_info():
    result = dataset("info default")
    assert result.exit_code == 0
    for words in ("requests", "96", "span", "gap cv", "rate over time", "prompt", "reserved", "p99", "█"):
        assert words in result.output


def test_info_as_json():
    facts = json.loads(dataset("info chat --json --max_num_samples 50").output)
    assert (facts["name"], facts["requests"]) == ("chat", 50)
    assert facts["prompt_tokens"]["min"] >= 2
    assert facts["max_new_tokens"]["max"] == 1000


def test_info_tells_what_was_seen_before(tmp_path):
    path = tmp_path / "a.jsonl"
    row = '{"arrival_s": 0, "prompt_len": 512, "output_len": 1, "prefix_ids": [%d]}\n'
    path.write_text("".join(row % prefix_id for prefix_id in (1, 2, 1, 1)))
    assert "prompt tokens seen before: 50.0%" in dataset("info", path).output
    assert json.loads(dataset("info --json", path).output)["seen_before_share"] == 0.5
    assert "seen before" not in dataset("info default").output
    assert json.loads(dataset("info default --json").output)["seen_before_share"] is None


def test_info_counts_bad_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_len": 1, "output_len": 1}\n{}\n')
    assert dataset("info", path).exit_code == 2
    assert "1 bad rows skipped" in dataset("info --skip-bad-rows", path).output
