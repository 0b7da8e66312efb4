"""`--recording summary` keeps the requests and all figures, and no iterations and spans."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.rundir.client_side import UNKNOWN_FIGURES
from ifbbench.rundir.figures import figures
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig

SIMULATED = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", max_num_samples=30, quiet=True)
VARIED = [
    {},
    {"policy": "max_utilization", "max_tokens_in_paged_kvcache": 4096, "time_scale": 0.0},
    {"streaming": True},
    {"type": "v1", "max_batch_size": 4},
    {"overlap": "async"},
    {"overlap": "partitioned"},
    {"enable_kv_cache_reuse": True},
    {"recording_format": "jsonl.gz"},
    {"slo": ("ttft=1s",)},
]


@pytest.mark.parametrize("changes", VARIED, ids=str)
def test_figures_and_requests_are_those_of_a_full_recording(changes, tmp_path: Path) -> None:
    config = SIMULATED.with_values(**changes)
    for recording in ("full", "summary"):
        run_trace("chat", config.with_values(recording=recording, output=str(tmp_path / recording)))
    full, summary = tmp_path / "full", tmp_path / "summary"
    suffix = config.recording_format
    for name in ("summary.json", f"requests.{suffix}", f"trace.{suffix}"):
        assert (summary / name).read_bytes() == (full / name).read_bytes(), name
    assert {path.name for path in summary.iterdir()} == {
        "run.json",
        "summary.json",
        f"requests.{suffix}",
        f"trace.{suffix}",
    }
    first, second = (json.loads((path / "run.json").read_text()) for path in (full, summary))
    assert first["schedule_digest"] == second["schedule_digest"]


def test_the_report_needs_no_iterations_and_other_commands_say_what_is_missing(tmp_path: Path) -> None:
    run_trace("chat", SIMULATED.with_values(recording="summary", output=str(tmp_path / "run")))
    assert CliRunner().invoke(main, ["report", str(tmp_path / "run")]).exit_code == 0
    for command in ("why", "export", "plot --html", "plot --only latency,bound"):
        result = CliRunner().invoke(main, [*command.split(), str(tmp_path / "run")])
        assert result.exit_code == 2, (command, result.output)
        assert "run again with --recording full" in result.output


def test_the_report_of_a_killed_run_has_what_its_requests_show(tmp_path: Path) -> None:
    for recording in ("full", "summary"):
        run_trace("chat", SIMULATED.with_values(recording=recording, output=str(tmp_path / recording)))
        (tmp_path / recording / "summary.json").unlink()
    full, killed = (figures(load_run(tmp_path / recording)) for recording in ("full", "summary"))
    unknown = {*UNKNOWN_FIGURES, "itl_s"} - {"waiting_by_limit"}
    assert {name for name in full if full[name] != killed[name]} <= unknown
    assert (killed["iterations"], killed["bound_by"], killed["itl_s"]["p50"]) == (None, {}, None)
    text = CliRunner().invoke(main, ["report", str(tmp_path / "summary")]).output
    assert "Partial: the run did not reach its end." in text
    assert "30 of 30" in text
    assert "limits are unknown: --recording summary leaves them out." in text


@pytest.mark.usefixtures("without_layout")
def test_plot_draws_what_needs_no_iterations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_trace("chat", SIMULATED.with_values(recording="summary", output=str(tmp_path / "run")))
    result = CliRunner().invoke(main, ["plot", "--format", "png", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert [path.name for path in sorted((tmp_path / "run" / "charts").iterdir())] == ["latency.png", "ttft.png"]
    (record,) = caplog.records
    assert "the charts other than latency and ttft" in record.getMessage()


def test_compare_compares_what_is_recorded(tmp_path: Path) -> None:
    tight = SIMULATED.with_values(policy="max_utilization", max_tokens_in_paged_kvcache=4096)
    for name, config in (("a", SIMULATED), ("full", SIMULATED.with_values(recording="full")), ("b", tight)):
        run_trace(
            "chat",
            config.with_values(output=str(tmp_path / name), **({} if name == "full" else {"recording": "summary"})),
        )

    def compared(*names: str) -> str:
        result = CliRunner().invoke(main, ["compare", *(str(tmp_path / name) for name in names)])
        assert result.exit_code == 0, result.output
        return result.output

    assert "The runs are identical" in compared("full", "a")
    output = " ".join(compared("a", "b").split())
    assert "of a and b are not compared: --recording summary leaves them out. They differ somewhere." in output
    assert "Lost most in b" in output
    assert "s longer" in output


@pytest.mark.parametrize("name", ["profile", "enable_steady_state", "iteration_log", "result_json", "result_format"])
def test_settings_that_read_iterations_are_refused(name, tmp_path: Path) -> None:
    paths = {"iteration_log": str(tmp_path / "log"), "result_json": str(tmp_path / "result"), "result_format": "vllm"}
    values = paths.get(name, True)
    config = SIMULATED.with_values(recording="summary", output=str(tmp_path / "run"), **{name: values})
    if name == "profile":
        config = config.with_values(device="cpu", model="tiny")
    with pytest.raises(InputError, match=f"--{name}: .*--recording"):
        run_trace("chat", config)
