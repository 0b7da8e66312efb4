"""No output replaces a file that the command reads, also with --overwrite, and by whatever name it is given."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ifbbench.cli.main import main
from ifbbench.settings.devices import ENGINE_OVERHEADS, HARDWARE_PROFILES

ROWS = "".join(f'{{"request_id":{row},"prompt_len":{20 + row},"output_len":3}}\n' for row in range(8))
LENGTHS = "{distribution: uniform, min: 1, max: 9}"
SPEC = f"num_requests: 5\nprompt_len: {LENGTHS}\noutput_len: {LENGTHS}\n"
HISTOGRAM = json.dumps({name: {"edges": [1, 9], "counts": [4]} for name in ("prompt_len", "output_len")})
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
}
SHAPE, NULL = "--model llama-3.1-8b", "--device null --time_scale 0 --quiet"
SIMULATED = f"--device h100-sxm {SHAPE} --quiet"
# The command, which gets --overwrite, and the file that it must leave as it is.
REFUSED = [
    (f"run t.jsonl {NULL} --result_json t.jsonl --result_format vllm", "t.jsonl"),
    (f"run t.jsonl {NULL} --result_json link.jsonl --result_format vllm", "t.jsonl"),
    (f"run t.jsonl {NULL} --output_csv hard.jsonl", "t.jsonl"),
    (f"run link.jsonl {NULL} --output_csv ./t.jsonl", "t.jsonl"),
    ("run t.jsonl --device cpu --quiet --responses_json t.jsonl", "t.jsonl"),
    ("run t.jsonl --device cpu --tp_size 2 --quiet --output_csv t.jsonl", "t.jsonl"),
    (f"run --dataset t.jsonl {NULL} --report_json t.jsonl", "t.jsonl"),
    (f"run t.jsonl {NULL} --config c.yaml --output_csv c.yaml", "c.yaml"),
    (f"run {NULL} --config named.yaml --output_csv t.jsonl", "t.jsonl"),
    (f"run {NULL} --config named.yaml --output_csv r.csv", "r.csv"),
    (f"run t.jsonl --device p.toml {SHAPE} --quiet --report_json p.toml", "p.toml"),
    (f"run t.jsonl --device sim:p.toml {SHAPE} --quiet --report_json p.toml", "p.toml"),
    (f"run t.jsonl {SIMULATED} --engine_overhead e.toml --request_json e.toml", "e.toml"),
    (f"run t.jsonl {NULL} --rate_schedule r.csv --request_json r.csv", "r.csv"),
    (f"run t.jsonl {NULL} --tokenizer tokenizer.json --request_json tokenizer.json", "tokenizer.json"),
    ("run t.jsonl --device h100-sxm --model m --quiet --iteration_log m/config.json", "m/config.json"),
    (f"run done {NULL} --output_csv done/trace.jsonl", "done/trace.jsonl"),
    (f"run done {NULL} --output done", "done/trace.jsonl"),
    (f"run done/trace.jsonl {NULL} --output done", "done/trace.jsonl"),
    (f"run done/export/mine.jsonl {NULL} --output done", "done/export/mine.jsonl"),
    (f"run t.jsonl --config done {NULL} --output done", "done/run.json"),
    (f"run repeats/repeat-1/trace.jsonl {NULL} --repeat 2 --output repeats", "repeats/repeat-1/trace.jsonl"),
    (f"sweep swept/seed=1/trace.jsonl {NULL} --over seed=1,2 --output swept", "swept/seed=1/trace.jsonl"),
    (f"sweep {NULL} --over trace=t.jsonl,swept/seed=1/trace.jsonl --output swept", "swept/seed=1/trace.jsonl"),
    (f"sweep --config swept {NULL} --over seed=1,2,3 --output swept", "swept/sweep.yaml"),
    (f"tune t.jsonl {SIMULATED} --config tuned/run.yaml --output tuned", "tuned/run.yaml"),
    (f"bench throughput t.jsonl {SIMULATED} --output_csv t.jsonl", "t.jsonl"),
    (f"bench throughput t.jsonl {SIMULATED} --sampler_options c.yaml --output_csv c.yaml", "c.yaml"),
    ("report done --output_csv done/summary.json", "done/summary.json"),
    ("why done --pauses-csv done/spans.jsonl", "done/spans.jsonl"),
    ("dataset convert t.jsonl -o t.jsonl", "t.jsonl"),
    ("dataset convert done -o done/trace.jsonl", "done/trace.jsonl"),
    ("dataset sample t.jsonl -o link.jsonl", "t.jsonl"),
    ("dataset synth spec s.yaml --to lengths -o s.yaml", "s.yaml"),
    ("dataset synth token-from-histogram --num-requests 4 --histogram h.json --to ifbbench -o h.json", "h.json"),
    ("dataset synth token-from-histogram --num-requests 4 --trace t.jsonl -o t.jsonl", "t.jsonl"),
    (f"calibrate --from done --device sim:p.toml {SHAPE} -o p.toml", "p.toml"),
    ("serve --device h100-sxm --model llama-3.1-8b --config done --record done", "done/run.json"),
]


def invoke(command: str) -> Result:
    return CliRunner().invoke(main, command.split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file of each kind, a run, repeats and a sweep."""
    directory = tmp_path_factory.mktemp("inputs")
    texts = {
        "t.jsonl": ROWS,
        "c.yaml": "max_batch_size: 4\n",
        "r.csv": "start_s,rate\n0,50\n",
        "s.yaml": SPEC,
        "named.yaml": "trace: t.jsonl\nrate_schedule: r.csv\n",
        "h.json": HISTOGRAM,
        "tokenizer.json": "{}",
        "m/config.json": json.dumps(MODEL),
        "tuned/run.yaml": "max_batch_size: 4\n",
    }
    before = Path.cwd()
    os.chdir(directory)
    try:
        for name, text in texts.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        shutil.copy(HARDWARE_PROFILES / "h100-sxm.toml", "p.toml")
        shutil.copy(ENGINE_OVERHEADS / "tensorrt-llm.toml", "e.toml")
        assert invoke(f"run t.jsonl {NULL} --output done").exit_code == 0
        assert invoke(f"run t.jsonl {NULL} --repeat 2 --output repeats").exit_code == 0
        assert invoke(f"sweep t.jsonl {NULL} --over seed=1,2 --output swept").exit_code == 0
        Path("done/export").mkdir()
        shutil.copy("t.jsonl", "done/export/mine.jsonl")
    finally:
        os.chdir(before)
    return directory


@pytest.fixture(autouse=True)
def in_a_copy(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("link.jsonl").symlink_to("t.jsonl")
    Path("hard.jsonl").hardlink_to("t.jsonl")


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "kept"), REFUSED)
def test_an_output_that_is_an_input_is_refused_before_anything_is_written(command: str, kept: str) -> None:
    before = contents()
    assert Path(kept) in before
    done = invoke(f"{command} --overwrite")
    assert (done.exit_code, "which the command reads; give another output" in done.output) == (2, True), done.output
    assert contents() == before


def test_standard_input_from_a_file_is_that_file() -> None:
    command = [sys.executable, "-m", "ifbbench", "run", "-", *NULL.split(), "--output_csv", "t.jsonl", "--overwrite"]
    with Path("t.jsonl").open() as trace:
        done = subprocess.run(command, stdin=trace, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "which the command reads" in done.stderr) == (2, True), done.stderr
    assert Path("t.jsonl").read_text() == ROWS


@pytest.mark.parametrize(
    "command",
    [
        f"run t.jsonl {NULL} --config done --output repeated",
        f"run mine.jsonl {NULL} --output done",  # its files that are not of a run are kept
        f"run t.jsonl {NULL} --output_csv done/figures.csv",
        f"run t.jsonl {NULL} --output done --output_csv t.csv",
        f"sweep --config swept {NULL} --output swept",
        "report done --output_csv done/figures.csv",
        "dataset convert t.jsonl -o t.csv",
    ],
)
def test_other_files_are_replaced(command: str) -> None:
    shutil.copy("t.jsonl", "done/mine.jsonl")
    for name in ("mine.jsonl", "t.csv", "done/figures.csv"):
        shutil.copy("t.jsonl", name)
    for _ in range(2):
        done = invoke(f"{command} --overwrite".replace(" mine.jsonl", " done/mine.jsonl"))
        assert done.exit_code == 0, done.output
    assert Path("done/mine.jsonl").read_text() == ROWS
