"""`ifbbench dataset`, as called from a shell."""

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import bundled_path, load_trace
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
        (f"{SHARED} --pools 0", "--pools is '0'; expected an integer of at least 1"),
        (f"{SHARED} --share 1.5", "--share is '1.5'; expected a finite number from 0 to 1"),
        (f"{TURNS} --turns-mean 0.5", "--turns-mean is '0.5'; expected a finite number of at least 1"),
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
        ("--output-min 0", "--output-min is '0'; expected an integer of at least 1"),
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
    assert "prompt tokens seen before: 50.0 %" in dataset("info", path).output
    assert json.loads(dataset("info --json", path).output)["seen_before_share"] == 0.5
    assert "seen before" not in dataset("info default").output
    assert json.loads(dataset("info default --json").output)["seen_before_share"] is None


def test_info_counts_bad_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_len": 1, "output_len": 1}\n{}\n')
    assert dataset("info", path).exit_code == 2
    assert "1 bad rows skipped" in dataset("info --skip-bad-rows", path).output


# Other kinds of synth.


def test_lognormal(tmp_path):
    lengths = "--input-median 60 --input-mean 90 --input-max 400 --output-median 10 --output-mean 12"
    assert dataset(f"synth lognormal --num-requests 900 {lengths} -o", tmp_path / "a.jsonl").exit_code == 0
    prompts = [request.prompt_len for request in read_trace(tmp_path / "a.jsonl")]
    assert sum(prompts) / 900 == pytest.approx(88, rel=0.1)
    assert max(prompts) <= 400


def test_fixed(tmp_path):
    command = "synth fixed --num-requests 5 --input-len 7 --output-len 3 -o"
    assert dataset(command, tmp_path / "a.jsonl").exit_code == 0
    assert {(request.prompt_len, request.output_len) for request in read_trace(tmp_path / "a.jsonl")} == {(7, 3)}


def test_histogram_of_a_file(tmp_path):
    (tmp_path / "h.csv").write_text("min,max,prompts,outputs\n100,100,1,0\n200,200,0,1\n")
    command = "synth token-from-histogram --num-requests 5 --histogram"
    assert dataset(command, tmp_path / "h.csv", "-o", tmp_path / "a.jsonl").exit_code == 0
    assert {(request.prompt_len, request.output_len) for request in read_trace(tmp_path / "a.jsonl")} == {(100, 200)}


def test_histogram_measured_from_a_trace_and_from_what_info_prints(tmp_path):
    (tmp_path / "info.json").write_text(dataset("info default --json").output)
    for source in (("--trace", "default"), ("--histogram", tmp_path / "info.json")):
        command = "synth token-from-histogram --num-requests 2000 --overwrite"
        assert dataset(command, *source, "-o", tmp_path / "a.jsonl").exit_code == 0
        drawn = json.loads(dataset("info --json", tmp_path / "a.jsonl").output)
        known = json.loads(dataset("info default --json").output)
        for name in ("prompt_tokens", "output_tokens"):
            assert drawn[name]["mean"] == pytest.approx(known[name]["mean"], rel=0.06)
        assert abs(drawn["length_correlation"]) < 0.1


@pytest.mark.parametrize("options", ["", "--trace default --histogram h.csv"])
def test_histogram_of_two_sources_or_none(tmp_path, options):
    result = dataset(f"synth token-from-histogram --num-requests 2 {options} -o", tmp_path / "a.jsonl")
    assert result.exit_code == 2
    assert "give one of --histogram FILE and --trace TRACE" in result.output


def test_specification(tmp_path):
    assert dataset("synth spec chat --num-requests 5 --random-seed 3 -o", tmp_path / "a.jsonl").exit_code == 0
    assert list(read_trace(tmp_path / "a.jsonl")) == list(load_trace("chat", RunConfig(seed=3, max_num_samples=5)))
    refused = dataset("synth spec default -o", tmp_path / "b.jsonl")
    assert refused.exit_code == 2
    assert "default is not a workload specification" in refused.output


def test_think_time_from_the_answer(tmp_path):
    assert dataset(f"{TURNS} --think-from answer -o", tmp_path / "a.jsonl").exit_code == 0
    assert any(request.after is not None for request in read_trace(tmp_path / "a.jsonl"))


def test_command_line_of_prepare_dataset(tmp_path):
    before = (
        "synth --tokenizer llama --trust-remote-code --random-seed 3 --rand-task-id 2 5 --request-rate 4 "
        "--time-delay-dist exponential_dist"
    )
    result = dataset(before, "--output", tmp_path / "a.jsonl", *NORMAL.split()[1:])
    assert result.exit_code == 0, result.output
    trace = list(read_trace(tmp_path / "a.jsonl"))
    assert {request.lora_task_id for request in trace} == {2, 3, 4, 5}
    assert 39 / trace[-1].arrival_s == pytest.approx(4, rel=0.5)
    plain = dataset(f"{NORMAL} --random-seed 3 --arrival poisson --request-rate 4 -o", tmp_path / "b.jsonl")
    assert plain.exit_code == 0
    assert [r.prompt_len for r in read_trace(tmp_path / "b.jsonl")] == [r.prompt_len for r in trace]


def test_offline_rate_and_standard_output_are_those_of_prepare_dataset():
    result = dataset("synth --stdout --request_rate -1 --task_id 3 token_norm_dist", *LENGTHS.split())
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(list(row), row["task_id"]) for row in rows] == [
        (["task_id", "input_ids", "output_tokens"], number) for number in range(40)
    ]
    assert "trtllm-bench cannot express lora_task_id: left out of 40 requests" in result.stderr


def test_the_suffix_of_the_file_is_the_format(tmp_path):
    assert dataset("synth --output", tmp_path / "a.json", "--task-id", 3, *NORMAL.split()[1:]).exit_code == 0
    samples = json.loads((tmp_path / "a.json").read_text())["samples"]
    assert [sample["task_id"] for sample in samples] == [3] * 40
    assert dataset(NORMAL, "--to", "mooncake", "-o", tmp_path / "a.jsonl").exit_code == 0
    assert "hash_ids" in (tmp_path / "a.jsonl").read_text()


# Convert and sample.


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    assert dataset(f"{NORMAL} --arrival constant --request-rate 4 --reserve fixed:50 -o", path).exit_code == 0
    return path


def test_convert_by_suffix_and_by_name(trace, tmp_path):
    for name, options in (("a.csv", ""), ("a.json", ""), ("a.jsonl.gz", ""), ("m.jsonl", "--to mooncake")):
        result = dataset(f"convert {trace} {options} -o", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert "40 requests written to" in result.output
    assert (tmp_path / "a.csv").read_text().startswith("num_prefill_tokens,num_decode_tokens,arrived_at\n")
    assert [r.prompt_len for r in read_trace(tmp_path / "a.json")] == [r.prompt_len for r in read_trace(trace)]
    assert list(read_trace(tmp_path / "a.jsonl.gz")) == list(read_trace(trace))
    assert (
        "lengths cannot express max_new_tokens: left out of 40 requests"
        in dataset(f"convert {trace} --to lengths -o", tmp_path / "b.csv").output
    )


def test_convert_to_standard_output(trace):
    result = CliRunner().invoke(main, ["dataset", "convert", str(trace), "--to", "trtllm-bench", "-o", "-"])
    assert [len(json.loads(line)["input_ids"]) for line in result.stdout.splitlines()] == [
        request.prompt_len for request in read_trace(trace)
    ]


def test_convert_refuses(trace, tmp_path):
    unknown = dataset(f"convert {trace} -o", tmp_path / "a.txt")
    assert (unknown.exit_code, "give --to ifbbench|gpt-manager" in unknown.output) == (2, True)
    itself = dataset(f"convert {trace} --overwrite -o", trace)
    assert (itself.exit_code, "which the command reads" in itself.output) == (2, True)
    assert len(read_trace(trace)) == 40


def test_sample(trace, tmp_path):
    assert dataset(f"sample {trace} --num-requests 10 --seed 3 -o", tmp_path / "a.jsonl").exit_code == 0
    assert dataset(f"sample {trace} --from 2 --to 4 -o", tmp_path / "b.jsonl").exit_code == 0
    assert len(read_trace(tmp_path / "a.jsonl")) == 10
    assert [request.request_id for request in read_trace(tmp_path / "b.jsonl")] == list(range(8, 16))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--stratified", "--stratified needs --num-requests"),
        ("--from 3 --to 2", "--to 2 is not after --from 3"),
        ("--from 300", "no request arrives from 300 s"),
        ("--every 0", "--every is '0'; expected an integer of at least 1"),
        ("--from nan", "--from is 'nan'; expected a finite number"),
        ("--to nan", "--to is 'nan'; expected a finite number"),
    ],
)
def test_sample_refuses(trace, tmp_path, options, complaint):
    result = dataset(f"sample {trace} {options} -o", tmp_path / "a.jsonl")
    assert (result.exit_code, complaint in result.output) == (2, True), result.output


def test_info_of_classes():
    result = dataset("info mixed --max-num-samples 200")
    for words in ("class", "share", "chat", "documents", "correlation"):
        assert words in result.output
    classes = json.loads(dataset("info mixed --json --max-num-samples 200").output)["classes"]
    assert classes["chat"]["requests"] + classes["documents"]["requests"] == 200


@pytest.mark.usefixtures("without_layout")
def test_charts(tmp_path):
    result = dataset("info mooncake-conversation --max-num-samples 60 --plot", tmp_path / "charts")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    assert names == {f"{chart}.{suffix}" for chart in ("lengths", "arrivals", "reuse") for suffix in ("png", "svg")}
    assert dataset("info batch-offline --max-num-samples 60 --plot", tmp_path / "few").exit_code == 0
    assert {path.stem for path in (tmp_path / "few").iterdir()} == {"lengths"}


# A million requests, and recorded traces.


@pytest.mark.slow
def test_a_million_requests_stream(tmp_path):
    """Drawn and converted in a fraction of the memory that the file would take."""
    script = (
        "import resource, sys\nfrom ifbbench.cli.main import main\n"
        "try: main(['dataset', *sys.argv[1:]])\nexcept SystemExit as done: assert not done.code\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )

    def peak_mib(command):
        result = subprocess.run([sys.executable, "-c", script, *command.split()], capture_output=True, check=True)
        return int(result.stdout.split()[-1]) / 1024

    idle = peak_mib("info documentation")
    size = "--input-mean 512 --input-stdev 128 --output-mean 128 --output-stdev 32"
    drawn = peak_mib(f"synth token-norm-dist --num-requests 1000000 {size} -o {tmp_path}/a.jsonl")
    assert drawn - idle < 220
    assert (tmp_path / "a.jsonl").stat().st_size > 80 * 2**20
    for name in ("b.jsonl.gz", "b.csv"):
        assert peak_mib(f"convert {tmp_path}/a.jsonl -o {tmp_path}/{name}") - idle < 120


RECORDED = {
    # requests, span (s), prompt mean, p50, p99, output mean, p50, p99, gap cv, requests/s
    "azure_conv_2023.csv": (19_366, 3_502, 1_155, 1_020, 4_142, 211, 129, 601, 1.09, 5.53),
    "mooncake_synthetic.jsonl": (3_993, 1_022, 15_326, 11_587, 66_456, 149, 69, 768, 1.01, 3.91),
}


@pytest.mark.parametrize("name", RECORDED)
def test_info_has_the_published_figures_of_recorded_traces(shared_dir, name):
    facts = json.loads(dataset("info --json", shared_dir / "traces" / name).output)
    prompt, output = facts["prompt_tokens"], facts["output_tokens"]
    lengths = [one[figure] for one in (prompt, output) for figure in ("mean", "p50", "p99")]
    found = [facts["requests"], facts["span_s"], *lengths]
    *expected, gap_cv, rate = RECORDED[name]
    assert found == pytest.approx(expected, abs=0.55)
    assert facts["gap_cv"] == pytest.approx(gap_cv, abs=0.005)
    assert facts["request_rate_per_s"] == pytest.approx(rate, abs=0.005)
    if name.startswith("azure"):
        marks = ("min", "p10", "p25", "p50", "p75", "p90", "p99", "max")
        assert [prompt[m] for m in marks] == pytest.approx([2, 207, 396, 1020, 1189, 2735, 4142, 14050], abs=0.55)
        assert [output[m] for m in marks] == pytest.approx([7, 54, 85, 129, 395, 424, 601, 1000], abs=0.55)
    else:
        assert facts["blocks_seen_before_share"] == pytest.approx(0.64, abs=0.005)
