"""The benchmark of whole runs on a GPU: its arithmetic on made-up runs, its parts with a small model on this CPU."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_kernels
from benchmarks.gpu_checkpoint import write_checkpoint
from benchmarks.gpu_engine import Step, Workload, bytes_read, figures, hidden_host_time, run_engine, steps
from benchmarks.gpu_transformers import run_transformers
from ifbbench.models.config import ModelConfig
from ifbbench.models.layers import LayerKind
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.single import RunResult
from ifbbench.simulated.shard import Shard
from ifbbench.torch.model.weights import load_weights

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WORKLOAD = Workload(requests=3, prompt_len=10, output_len=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    (directory / "shape.json").write_text(json.dumps(SHAPE))
    write_checkpoint(str(directory / "shape.json"), directory / "checkpoint", CPU)
    return str(directory / "checkpoint")


def test_a_checkpoint_has_every_weight(checkpoint: str) -> None:
    config = load_model_config(checkpoint)
    weights = load_weights(config, checkpoint, CPU, torch.bfloat16)
    assert len(weights.layers) == 2
    assert 0.8 < float(weights.embedding.float().std()) < 1.2
    assert (weights.final_norm == 1).all()


def test_what_an_iteration_has_to_read() -> None:
    model = ModelConfig(
        vocab_size=100,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=256,
    )
    layers = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 96)
    assert model.num_layers * model.matrix_parameters(LayerKind()) == layers
    kv_values = 2 * 2 * 32
    assert bytes_read(Shard(model, "bf16", "bf16"), 1000) == 2 * layers + 2 * 6400 + 2 * kv_values * 1000
    assert bytes_read(Shard(model, "fp8", "fp8"), 1000) == layers + 2 * 6400 + kv_values * 1000
    assert bytes_read(Shard(model, "fp8", "bf16"), 0) == layers + 2 * 6400


def test_shares_of_the_bandwidth() -> None:
    """A bandwidth at which each iteration's reading takes half of its time, and two thirds of the device's."""
    shard = Shard(ModelConfig.tiny(), "bf16", "bf16")
    result = RunResult(Path(), {"output_throughput_tokens_per_s": 123.456, "duration_s": 2.0, "iterations": 9}, 0)
    found = figures(result, [Step(4.0, 1.0, 3.0, 500.0)] * 5, shard, bandwidth=bytes_read(shard, 500.0) / 2e-3)
    generation = found.pop("generation")
    assert found == {"output_tokens_per_s": 123.5, "duration_s": 2.0, "iterations": 9, "failed": 0}
    assert (generation["share_of_copy_bandwidth"], generation["share_of_copy_bandwidth_on_device"]) == (0.5, 0.667)
    assert (generation["iterations"], generation["period_ms"], generation["host_ms"]) == (5, 4.0, 1.0)
    with pytest.raises(ValueError, match="no two iterations"):
        figures(result, [], shard, 1e9)


def test_host_time_that_overlap_hides() -> None:
    def run(period_ms: float, device_ms: float) -> dict[str, Any]:
        return {"generation": {"period_ms": period_ms, "device_ms": device_ms}}

    found = hidden_host_time(run(12.0, 10.0), run(10.5, 11.0))
    assert found == {"host_ms": 2.0, "hidden_ms": 1.5, "hidden_share": 0.75}
    assert hidden_host_time(run(12.0, 12.0), run(12.0, 12.0))["hidden_share"] == 0.0


@pytest.mark.parametrize(("setting", "value"), [("quiet", True), ("overlap", "async"), ("profile", True)])
def test_a_run_of_the_engine(setting: str, value: Any, checkpoint: str, tmp_path: Path) -> None:
    found = run_engine(checkpoint, WORKLOAD, tmp_path, 1e9, **{"device": "cpu", setting: value})
    assert (found["generation"]["device_busy_ms"] is not None) == (setting == "profile")
    assert (found["failed"], found["iterations"]) == (0, 7)
    assert found["output_tokens_per_s"] > 0
    # The first iteration has the prompts; the one behind it took part of its time from that.
    assert found["generation"]["iterations"] == 5
    assert found["generation"]["period_ms"] > 0
    generation = list(steps(tmp_path / "run"))
    cached = [3 * (10 + number) for number in range(2, 7)]
    assert [step.kv_tokens for step in generation] == pytest.approx(cached, rel=1e-3)


def test_the_same_requests_in_transformers(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its call is right; continuous batching itself wants a GPU."""
    transformers = pytest.importorskip("transformers")
    asked: list[int] = []

    class Answer:
        generated_tokens = (0,) * WORKLOAD.output_len

    def generate_batch(model: object, inputs: list[list[int]], **options: Any) -> dict[str, Answer]:
        assert options["generation_config"].max_new_tokens == WORKLOAD.output_len
        assert all(len(prompt) == WORKLOAD.prompt_len for prompt in inputs)
        asked.append(len(inputs))
        return {str(index): Answer() for index in range(len(inputs))}

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate_batch", generate_batch)
    found = run_transformers(checkpoint, WORKLOAD, "cpu")
    assert asked == [WORKLOAD.requests] * 2
    assert found["output_tokens_per_s"] > 0


def test_a_part_that_fails_leaves_the_others_alone() -> None:
    def run(part: str) -> dict[str, Any]:
        if part == "transformers":
            return {"error": "ImportError: no such thing"}
        generation = {"period_ms": 4.0 if part == "engine" else 3.5, "device_ms": 3.0}
        speed = {"engine": 100.0, "engine_without_graphs": 50.0, "engine_with_overlap": 120.0}[part]
        return {"output_tokens_per_s": speed, "generation": generation}

    reported: list[int] = []
    parts = ["transformers", "engine", "engine_without_graphs", "engine_with_overlap"]
    found = gpu.measured(parts, run, lambda found: reported.append(len(found)))
    assert found["transformers"] == {"error": "ImportError: no such thing"}
    assert found["speed_ratios"] == {"to_engine_without_graphs": 2.0, "of_engine_with_overlap": 1.2}
    assert found["host_time_hidden"]["hidden_ms"] == 0.5
    assert reported == [1, 2, 4, 6]


def test_a_part_s_process_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = gpu.Setup(tmp_path, quick=True)
    if not torch.cuda.is_available():
        assert gpu.in_a_process("engine", setup, 60) == {"error": gpu.NO_GPU, "stderr": [gpu.NO_GPU]}

    def answer(stdout: str, stderr: str, *args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 3, stdout, stderr)

    for stdout, stderr, expected in (
        ('noise\nRESULT {"a": 1}\n', "a warning\n", {"a": 1}),
        (
            "",
            "Traceback\nOutOfMemory: lower this\n\n",
            {"error": "OutOfMemory: lower this", "stderr": ["Traceback", "OutOfMemory: lower this"]},
        ),
        (
            "",
            "Traceback\ntorch.AcceleratorError: CUDA error\nA hint\n",
            {
                "error": "torch.AcceleratorError: CUDA error",
                "stderr": ["Traceback", "torch.AcceleratorError: CUDA error", "A hint"],
            },
        ),
        ("", "", {"error": "ended with status 3", "stderr": []}),
    ):
        monkeypatch.setattr(subprocess, "run", partial(answer, stdout, stderr))
        assert gpu.in_a_process("engine", setup, 60) == expected


def test_the_checkpoint_of_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "QUICK_SHAPE", SHAPE)
    monkeypatch.setattr(gpu_kernels, "DEVICE", CPU)
    setup = gpu.Setup(tmp_path, quick=True)
    found = gpu.checkpoint(setup)
    assert found["bytes"] > 2 * load_model_config(setup.checkpoint).num_parameters


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--quick"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == gpu.NO_GPU  # which Python writes to standard error, with status 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.slow
def test_every_part_on_this_gpu(tmp_path: Path) -> None:
    setup = gpu.Setup(tmp_path, quick=True)
    found = gpu.measured(gpu.PARTS, lambda part: gpu.in_a_process(part, setup, gpu.TIME_LIMIT_S), lambda found: None)
    allowed = {"transformers"} | ({"engine_with_fp8_weights", "engine_in_fp8"} if old_gpu() else set())
    assert {part for part in gpu.PARTS if "error" in found[part]} <= allowed


def old_gpu() -> bool:
    return torch.cuda.get_device_capability() < (8, 9)
