"""`why` and `compare` answer about every kind of run directory: with facts, or with what is wrong."""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main
from ifbbench.engine.batch import Batch
from ifbbench.errors import IfbbenchError
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.executor import SimulatedExecutor
from tests.analysis.runs import simulate, write_requests
from tests.attack.readers import copied, read_by_every_command

pytestmark = pytest.mark.usefixtures("one_process", "without_layout")

KINDS: dict[str, dict[str, Any]] = {
    "compressed": {"recording_format": "jsonl.gz"},
    "thinned": {"iteration_stats_every": 5, "policy": "max_utilization"},
    "thinned and compressed": {"iteration_stats_every": 5, "recording_format": "jsonl.gz"},
    "static batches": {"type": "v1", "max_batch_size": 8},
    "contiguous cache": {
        "kv_cache_type": "contiguous",
        "max_batch_size": 4,
        "max_tokens_in_paged_kvcache": None,
        "enable_chunked_context": False,
    },
    "beams": {"beam_width": 2, "max_beam_width": 2, "max_tokens_in_paged_kvcache": 8_000},
    "reuse": {"enable_kv_cache_reuse": True},
    "windows": {"max_attention_window": "64,512", "max_tokens_in_paged_kvcache": 20_000},
    "null device": {"device": "null"},
    "overlap": {"enable_trt_overlap": True},
    "a policy with its own reason": {"policy": "tests.engine.odd_policies:LeavesOutForFairness"},
    "a policy that pauses for its own reason": {"policy": "tests.engine.odd_policies:PausesForFairness"},
    "some refused": {"max_seq_len": 700},
    "no limit of tokens": {"max_num_tokens": None},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_requests(tmp_path_factory.mktemp("traces") / "trace.jsonl", seed=3, count=40)


@pytest.fixture(scope="module")
def normal(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("normal"), "run", trace, policy="max_utilization").data.path


def run(*words: str | Path) -> str:
    words = (*words, "--budget", "0") if words[0] == "why" else words
    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def error_of(*words: str | Path) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


def ask_everything(directory: Path, other: Path, request_id: int = 1010) -> dict[str, Any]:
    """Every form of both commands answers; returns the JSON of `why`."""
    answer: dict[str, Any] = json.loads(run("why", directory, "--json"))
    assert run("why", directory)
    life = json.loads(run("why", directory, "--request", str(request_id), "--json"))
    assert run("why", directory, "--request", str(request_id))
    assert sum(life["attribution_s"].values()) == pytest.approx(life["e2e_s"] or 0.0, abs=1e-9)
    assert json.loads(run("why", directory, "--iteration", "0", "--json"))["number"] == 0
    for pair in ((directory, other), (other, directory)):
        assert run("compare", *pair)
        assert json.loads(run("compare", *pair, "--json"))["same_trace"]
    assert json.loads(run("compare", directory, directory, "--json"))["identical"]
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_explained(kind: str, trace: Path, normal: Path, tmp_path: Path) -> None:
    directory = simulate(tmp_path, "run", trace, **KINDS[kind]).data.path
    answer = ask_everything(directory, normal)
    assert answer["advice"]["text"]
    parts = answer["lower_bound"].get("parts_s")
    if kind == "null device":
        assert "computes nothing" in answer["lower_bound"]["unknown"]
    else:
        assert sum(parts.values()) == pytest.approx(answer["lower_bound"]["duration_s"], abs=1e-9)
    if kind.startswith("a policy"):
        assert "fairness" in answer["waiting_by_limit"]


def killed(directory: Path) -> None:
    """As the recorder leaves it after a kill: no summary, the last lines cut off."""
    (directory / "summary.json").unlink()
    description = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(description | {"partial": True, "schedule_digest": None}))
    for name in ("iterations", "spans", "requests"):
        path = directory / f"{name}.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])


def killed_early(directory: Path) -> None:
    killed(directory)
    (directory / "requests.jsonl").unlink()
    (directory / "spans.jsonl").unlink()
    first = (directory / "iterations.jsonl").read_bytes().splitlines(keepends=True)[:2]
    (directory / "iterations.jsonl").write_bytes(b"".join(first) + b'{"Timestamp":"11-')


@pytest.mark.parametrize("kill", [killed, killed_early])
def test_a_killed_run_is_explained_as_far_as_it_is_there(
    kill: Callable[[Path], None], normal: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "killed"
    shutil.copytree(normal, directory)
    kill(directory)
    answer = json.loads(run("why", directory, "--json"))
    assert answer["partial"]
    assert "Partial" in run("why", directory)
    assert "partial" in run("compare", normal, directory)
    assert not json.loads(run("compare", normal, directory, "--json"))["identical"]
    if "parts_s" in answer["lower_bound"]:
        parts = answer["lower_bound"]["parts_s"]
        assert sum(parts.values()) == pytest.approx(answer["lower_bound"]["duration_s"], abs=1e-9)
    for request_id in (1000, 1039):
        assert run("why", directory, "--request", str(request_id))


def killed_between_files(directory: Path) -> None:
    """Iterations were written, and no span or request."""
    killed(directory)
    for name in ("requests", "spans"):
        (directory / f"{name}.jsonl").write_bytes(b"")


def killed_server(directory: Path) -> None:
    """A server writes the row of a request when it ends, and not at the same time as other files."""
    killed(directory)
    rows = (directory / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "trace.jsonl").write_bytes(b"".join(rows[20:2:-2]))


@pytest.mark.parametrize("kill", [killed_early, killed_between_files, killed_server])
def test_what_a_kill_leaves_is_read_by_every_command(
    kill: Callable[[Path], None], normal: Path, tmp_path: Path
) -> None:
    kill(copied(normal, tmp_path / "killed"))
    read_by_every_command(tmp_path / "killed", normal, random.Random(0), charts=1, tries=kill is killed_server)


def test_a_chart_of_waiting_for_a_reason_that_no_completed_request_has(trace: Path, tmp_path: Path) -> None:
    policy = KINDS["a policy with its own reason"]
    directory = simulate(tmp_path, "run", trace, **policy, max_batch_size=4).data.path
    killed(directory)
    rows = [json.loads(line) for line in (directory / "requests.jsonl").read_bytes().splitlines()[:-1]]
    for row in rows:
        for name in [part for part in row.get("attribution_s", {}) if "fairness" in part]:
            row["attribution_s"]["waiting_batch_size"] = row["attribution_s"].pop(name)
    (directory / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("plot", directory, "--only", "throughput", "--format", "svg")


def test_requests_that_the_trace_of_a_killed_server_lacks(normal: Path, tmp_path: Path) -> None:
    kill = copied(normal, tmp_path / "killed")
    killed_server(kill)
    whole, found = RecordedRun.load(normal), RecordedRun.load(kill)
    assert found.trace.keys() == found.spans.keys() | found.row_of.keys() < whole.trace.keys()
    for request_id, row in found.row_of.items():
        planned = whole.trace[request_id]
        assert (found.trace[request_id].prompt_len, found.trace[request_id].max_new_tokens) == (
            planned.prompt_len,
            planned.max_new_tokens,
        )
        assert found.arrival_s(request_id) == row["arrival_s"]
    assert [one for one in found.rank if one in found.row_of] == [one for one in whole.rank if one in found.row_of]


def test_a_run_whose_executor_failed(trace: Path, normal: Path, tmp_path: Path, monkeypatch) -> None:
    submit = SimulatedExecutor.submit

    def fail(self: SimulatedExecutor, batch: Batch) -> None:
        if batch.iteration >= 60:
            raise RuntimeError("device lost")
        submit(self, batch)

    monkeypatch.setattr(SimulatedExecutor, "submit", fail)
    with pytest.raises(IfbbenchError, match="device lost"):
        simulate(tmp_path, "run", trace, policy="max_utilization", overlap="partitioned")  # which runs batches
    answer = json.loads(run("why", tmp_path / "run", "--json"))
    assert answer["partial"]
    failed = [
        row["request_id"]
        for row in map(json.loads, (tmp_path / "run" / "requests.jsonl").open())
        if row["outcome"] == "failed"
    ]
    assert "device lost" in run("why", tmp_path / "run", "--request", str(failed[0]))
    assert run("compare", normal, tmp_path / "run")


def test_a_run_in_which_every_request_was_refused(trace: Path, normal: Path, tmp_path: Path) -> None:
    run_trace(str(trace), RunConfig(device="null", max_seq_len=2, output=str(tmp_path / "run"), quiet=True))
    text = "no iteration is recorded (40 requests failed"
    assert f"There is nothing to explain: {text}" in run("why", tmp_path / "run")
    printed = "".join(run("compare", normal, tmp_path / "run").split())
    assert "Decisionsofaandbarenotcompared:ofrunbnoiterationisrecorded" in printed
    assert text in error_of("why", tmp_path / "run", "--iteration", "0")


def test_lines_without_the_fields_of_this_version_are_named(normal: Path, tmp_path: Path) -> None:
    """A line of an older format, or of another tool."""
    for name, field in (("iterations", "ifbbench"), ("spans", "first_iteration"), ("requests", "outcome")):
        directory = tmp_path / name
        shutil.copytree(normal, directory)
        lines = (directory / f"{name}.jsonl").read_text().splitlines()
        row = json.loads(lines[5])
        del row[field]
        lines[5] = json.dumps(row)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        text = error_of("why", directory)
        assert f"{name}.jsonl, line 6" in text
        assert field in text
        if name != "spans":  # equal digests of all decisions make them unnecessary
            assert f"{name}.jsonl, line 6" in error_of("compare", normal, directory)


def test_an_older_run_without_later_fields_is_explained(normal: Path, tmp_path: Path) -> None:
    """Fields that were added later may be missing."""
    directory = tmp_path / "older"
    shutil.copytree(normal, directory)
    lines = [json.loads(line) for line in (directory / "iterations.jsonl").read_text().splitlines()]
    for row in lines:
        for name in ("host_ms", "kv_fragmentation", "tokens_recomputed"):
            del row["ifbbench"][name]
    (directory / "iterations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    description = json.loads((directory / "run.json").read_text())
    del description["config"]["window_mode"], description["schedule_digest"]
    (directory / "run.json").write_text(json.dumps(description))
    answer = json.loads(run("why", directory, "--json"))
    bound = answer["lower_bound"]
    assert sum(bound["parts_s"].values()) == pytest.approx(bound["duration_s"], abs=1e-9)
    assert run("compare", normal, directory)


def test_what_is_no_run_is_refused(normal: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("[1]")
    shutil.copytree(normal, tmp_path / "several" / "a")
    shutil.copytree(normal, tmp_path / "several" / "b")
    expected = {
        "empty": "holds no run",
        "file": "not a directory",
        "missing": "not a directory",
        "other": "expected one JSON object",
        "several": "holds 2 runs",
    }
    for name, text in expected.items():
        assert text in error_of("why", tmp_path / name), name
        assert text in error_of("compare", normal, tmp_path / name), name


def test_a_run_that_was_killed_before_its_first_iteration(normal: Path, tmp_path: Path) -> None:
    for name in ("run.json", "trace.jsonl"):
        shutil.copy(normal / name, tmp_path)
    assert "There is nothing to explain: no iteration is recorded (no request ran yet)." in run("why", tmp_path)
    answer = json.loads(run("why", tmp_path, "--json"))
    assert (answer["partial"], "no iteration is recorded" in answer["text"]) == (True, True)
    run("plot", tmp_path, "--html")
    assert "There is nothing to show: no iteration is recorded" in (tmp_path / "charts" / "run.html").read_text()
    for words in (("why", tmp_path, "--request", "1000"), ("plot", normal, tmp_path, "--html", "--overlay")):
        assert "no iteration is recorded" in error_of(*words)


def test_damaged_and_cut_off_files(trace: Path, tmp_path: Path) -> None:
    directory = simulate(tmp_path, "run", trace, recording_format="jsonl.gz").data.path
    path = directory / "iterations.jsonl.gz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert json.loads(run("why", directory, "--json"))["bound_by"]
    path.write_bytes(b"not gzip")
    assert "iterations.jsonl.gz" in error_of("why", directory)
    path.write_bytes(gzip.compress(b"not json\n"))
    assert "iterations.jsonl.gz, line 1" in error_of("why", directory)


def test_unknown_requests_and_iterations(normal: Path) -> None:
    assert "request 7 is not in" in error_of("why", normal, "--request", "7")
    assert "iteration 1000000 is not recorded" in error_of("why", normal, "--iteration", "1000000")
    assert "exclude each other" in error_of("why", normal, "--request", "1000", "--iteration", "1")


@pytest.mark.parametrize("name", ["trace", "spans", "requests", "iterations"])
def test_a_file_that_is_missing(name: str, normal: Path, tmp_path: Path) -> None:
    """Without its spans or requests a run is as if killed early; without the others there is nothing to explain."""
    shutil.copytree(normal, tmp_path / "run")
    (tmp_path / "run" / f"{name}.jsonl").unlink()
    if name in ("spans", "requests"):
        assert run("why", tmp_path / "run")
    else:
        assert ("trace.jsonl" if name == "trace" else "no iteration") in error_of("why", tmp_path / "run")
