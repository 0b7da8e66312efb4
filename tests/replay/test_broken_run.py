"""A run that breaks off in the middle keeps what it had done, says so, and can be reported."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from ifbbench.cli.main import main
from ifbbench.engine.batch import Batch
from ifbbench.engine.passes import NullExecutor
from ifbbench.replay.client import ReplayClient
from ifbbench.torch.model.llama import ForwardInputs, LlamaModel

pytestmark = pytest.mark.usefixtures("small_model")

ARGUMENTS = ["run", "--device", "null", "--time_scale", "0", "--max_batch_size", "8", "--quiet", "--output"]


@pytest.fixture
def broken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Path, Result]:
    """The bundled trace on an executor that raises `request.param` in iteration 300."""

    def submit(self: NullExecutor, batch: Batch) -> None:
        if batch.iteration == 300:
            raise request.param

    monkeypatch.setattr(NullExecutor, "submit", submit)
    outputs = ["--report_json", str(tmp_path / "report.json"), "--result_format", "vllm"]
    return tmp_path / "run", CliRunner().invoke(main, [*ARGUMENTS, str(tmp_path / "run"), *outputs])


@pytest.mark.parametrize("broken_run", [RuntimeError("device lost")], indirect=True)
def test_a_failing_executor_ends_the_run_with_status_1(broken_run: tuple[Path, Result]) -> None:
    directory, result = broken_run
    assert result.exit_code == 1
    assert "iteration 300: device lost" in result.output
    # The one that failed is there too, with what it was to run.
    check_partial(directory, result, iterations=301)
    failed = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    errors = {row["error"] for row in failed if row["outcome"] == "failed"}
    assert errors == {"the executor failed: device lost"}


@pytest.mark.parametrize("broken_run", [RuntimeError("device lost"), KeyboardInterrupt()], indirect=True)
def test_files_for_other_tools_are_written_all_the_same(broken_run: tuple[Path, Result]) -> None:
    directory, _ = broken_run
    done = json.loads((directory / "summary.json").read_text())["requests"]["completed"]
    assert done > 0
    assert json.loads((directory.parent / "report.json").read_text())["request_info"]["num_requests"] == done
    assert json.loads((directory / "result.json").read_text())["completed"] == done


@pytest.mark.parametrize("broken_run", [KeyboardInterrupt()], indirect=True)
def test_an_interrupt_keeps_the_results(broken_run: tuple[Path, Result]) -> None:
    directory, result = broken_run
    assert result.exit_code == 130
    check_partial(directory, result, iterations=300)


def test_a_replay_that_makes_no_progress_ends_and_names_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_requests = ReplayClient.get_requests
    monkeypatch.setattr(
        ReplayClient, "get_requests", lambda self, count: get_requests(self, count) if self.answered < 40 else []
    )
    result = CliRunner().invoke(main, [*ARGUMENTS, str(tmp_path / "run"), "--concurrency", "1"])
    assert result.exit_code == 1
    assert "no progress" in result.output
    assert "requests 40 were fetched and 40 answered; 0 wait in the engine and 1 in the client" in " ".join(
        result.output.split()
    )


def real_run(directory: Path, *options: str) -> Result:
    """Of some requests of the bundled trace, on the model of this CPU."""
    return CliRunner().invoke(
        main,
        [
            "run",
            "--device",
            "cpu",
            "--time_scale",
            "0",
            "--max_num_samples",
            "6",
            "--max_batch_size",
            "2",
            "--quiet",
            "--max_prompt_len",
            "20",
            "--output",
            str(directory),
            *options,
        ],
    )


def breaking_forward(error: Exception, number: int) -> Callable[[LlamaModel, ForwardInputs], Tensor]:
    """A forward pass that raises `error` when it is called for this time, counted from 0."""
    numbers, forward = count(), LlamaModel.forward

    def counted(self: LlamaModel, inputs: ForwardInputs) -> Tensor:
        if next(numbers) == number:
            raise error
        return forward(self, inputs)

    return counted


def test_a_run_out_of_memory_says_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    monkeypatch.setattr(LlamaModel, "forward", breaking_forward(error, 200))
    result = real_run(tmp_path / "run")
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    for words in (
        "out of memory while running",
        "2.50 GiB",
        "are free",
        "--max_num_tokens",
        "--max_batch_size",
        "--kv_cache_free_gpu_mem_fraction",
        "--dtype",
    ):
        assert words in result.output
    iterations = (tmp_path / "run/iterations.jsonl").read_text().splitlines()
    check_partial(tmp_path / "run", result, iterations=len(iterations))


def test_a_warm_up_out_of_memory_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaModel, "forward", breaking_forward(torch.OutOfMemoryError("CUDA out of memory."), 0))
    result = real_run(tmp_path / "run")
    assert result.exit_code == 2
    assert "--max_num_tokens" in result.output
    assert not (tmp_path / "run").exists()


def test_a_kernel_that_fails_is_named_with_its_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("ifbbench.torch.kernels.launch", reason="needs Triton", exc_type=ImportError)
    with pytest.raises(launch.KernelError) as caught, launch.launching("swiglu", gate_up=torch.zeros(3, 8)):
        raise RuntimeError("an illegal memory access")
    monkeypatch.setattr(LlamaModel, "forward", breaking_forward(caught.value, 100))
    result = real_run(tmp_path / "run")
    assert result.exit_code == 1
    for words in ("the kernel swiglu failed", "an illegal memory access", "gate_up [3, 8] float32 on cpu"):
        assert words in result.output


def check_partial(directory: Path, result: Result, iterations: int) -> None:
    assert str(directory) in result.output
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["partial"] is True
    assert json.loads((directory / "run.json").read_text())["partial"] is True
    assert 0 < summary["requests"]["completed"] < summary["requests"]["total"]
    assert len((directory / "iterations.jsonl").read_text().splitlines()) == summary["iterations"] == iterations
    report = CliRunner().invoke(main, ["report", str(directory)])
    assert report.exit_code == 0
    assert "partial" in report.output.lower()
