"""Data types of quantized checkpoints, by their files and by their names, and what runs with them."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.build.resolve import resolve_limits
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config, published_shape
from ifbbench.models.quantization import Quantization, quantization_of
from ifbbench.settings.config import RunConfig
from ifbbench.torch.build import load_model

SHAPE = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("name", "dtype", "kv_cache_dtype", "format"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct-FP8", "fp8", None, "fp8"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8", None, "fp8"),
        ("nvidia/Llama-3.1-8B-Instruct-FP4", "nvfp4", None, "fp4"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "nvfp4", None, "nvfp4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "fp8", None, "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "int4", None, "int4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", None, None, "int8"),
        ("amd/Llama-3.1-8B-Instruct-FP8-KV", "fp8", "fp8", "fp8"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "int4", None, "int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", None, None, "int8"),
        ("unsloth/llama-3-8b-bnb-4bit", "int4", None, "int4"),
    ],
)
def test_names(name: str, dtype: str | None, kv_cache_dtype: str | None, format: str) -> None:
    assert quantization_of(name) == Quantization(dtype, kv_cache_dtype, format, "the name of the model")
    assert published_shape(name) is not None


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek-ai/DeepSeek-R1", "fp8_block"), ("openai/gpt-oss-120b", "mxfp4")]
)
def test_shapes_of_quantised_models(name: str, dtype: str) -> None:
    found = quantization_of(name)
    assert found is not None
    assert (found.dtype, found.kv_cache_dtype) == (dtype, None)
    assert found.source.startswith("quantization_config in ")


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "qwen3-30b-a3b"])
def test_names_without_quantization(name: str) -> None:
    assert quantization_of(name) is None


FLOAT_8 = {"weights": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    ("file", "content", "dtype", "kv_cache_dtype"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8", "fp8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "nvfp4", None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "int4", None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "A_NEW_ONE"}}, None, None),
        ("config.json", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", None),
        ("config.json", {"quant_method": "fbgemm_fp8"}, "fp8", None),
        ("config.json", {"quant_method": "awq", "bits": 4}, "int4", None),
        ("config.json", {"quant_method": "gptq", "bits": 8}, None, None),
        ("config.json", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", None),
        ("config.json", {"quant_method": "mxfp4"}, "mxfp4", None),
        ("config.json", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", None),
        ("config.json", {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", None),
        (
            "config.json",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": FLOAT_8},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "fp8",
            "fp8",
        ),
        (
            "config.json",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
            None,
        ),
    ],
)
def test_files(
    file: str, content: dict[str, Any], dtype: str | None, kv_cache_dtype: str | None, tmp_path: Path
) -> None:
    directory = tmp_path / "model-AWQ"  # the files are right, not the name
    directory.mkdir()
    shape = SHAPE if file != "config.json" else SHAPE | {"quantization_config": content}
    (directory / "config.json").write_text(json.dumps(shape))
    if file != "config.json":
        (directory / file).write_text(json.dumps(content))
    found = quantization_of(str(directory))
    assert found is not None
    assert (found.dtype, found.kv_cache_dtype) == (dtype, kv_cache_dtype)
    assert file in found.source

    config = RunConfig(device="sim:h100-sxm", model=str(directory), max_seq_len=256)
    if dtype is None:
        with pytest.raises(InputError, match=r"are not simulated; .* --dtype"):
            resolve_limits(config, 256, on_cpu=False)
        assert resolve_limits(config.with_values(dtype="bf16"), 256, on_cpu=False).dtype == "bf16"
    else:
        resolved = resolve_limits(config, 256, on_cpu=False)
        assert resolved.dtype == dtype
        assert resolved.kv_cache_dtype == kv_cache_dtype or ("fp8" if dtype == "fp8" else "bf16")
    with pytest.raises(InputError, match="quantized weights are not read"):
        load_model(RunConfig(device="cpu", model=str(directory), dtype="float32"))


def test_a_directory_without_quantization(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": None}))
    assert quantization_of(str(tmp_path)) is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    assert quantization_of(str(tmp_path)) is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 3}')
    with pytest.raises(InputError, match=r"hf_quant_config\.json: quantization is 3"):
        quantization_of(str(tmp_path))


def test_a_published_name_is_a_model_for_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.1-8B-Instruct-FP8"
    assert load_model_config(name) == load_model_config("llama-3.1-8b")
    step = ["explain-step", name, "--device", "h100", "--generation", "1x10"]
    for command in (
        ["run", "chat", "--max_num_samples", "3", "--device", "h100", "--model", name, "--output", "run"],
        ["bench", "--model", name, "throughput", "chat", "--num_requests", "3", "--device", "h100", "--output", "b"],
        ["capacity", name, "--device", "h100", "--input-len", "100", "--output-len", "10"],
        step,
    ):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        assert "h100: this is h100-sxm." in caplog.text
        assert f"--model {name}: the built-in shape llama-3.1-8b, with random weights; weights in fp8" in caplog.text
        caplog.clear()
    for run in ("run", "b"):
        recorded = json.loads(Path(run, "run.json").read_text())
        assert (recorded["config"]["dtype"], recorded["config"]["device"]) == ("fp8", "sim:h100-sxm")
        assert recorded["model"]["quantization"] == "weights in fp8, by the name of the model"
    printed = CliRunner().invoke(main, ["report", "run"]).stdout
    assert "weights in fp8, by the name of the model" in " ".join(printed.split())


@pytest.mark.parametrize("name", ["./llama-3.1-8b-mine", "/m/llama-3.1-8b-mine", "a/b/llama-3.1-8b", "lama-3.1-8b"])
def test_a_path_that_does_not_exist_is_no_published_name(name: str) -> None:
    with pytest.raises(InputError, match="neither a directory nor a built-in model"):
        load_model_config(name)


def test_a_gpu_needs_a_model() -> None:
    for device in ("h100", "sim:l4", "cuda"):
        refused = CliRunner().invoke(main, ["run", "chat", "--device", device])
        assert refused.exit_code == 2
        assert "--model: missing" in refused.stderr
        assert "llama-3.1-8b" in refused.stderr


def test_a_run_with_a_config_file_says_what_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_batch_size: 4\ndevice: 'null'\n")
    words = ["run", "documentation", "--config", str(file), "--time_scale", "0", "--output", str(tmp_path / "run")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert f"With {file}: --model tiny (the default) and --device null." in caplog.text
    other = CliRunner().invoke(main, [*words, "--overwrite", "--model", "llama-3.1-8b"])
    assert other.exit_code == 0, other.output
    assert f"With {file}: --model llama-3.1-8b (of the command line) and --device null." in caplog.text


def test_an_engine_brings_its_settings_where_none_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [
        "run",
        "chat",
        "--max_num_samples",
        "3",
        "--device",
        "h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--engine_overhead",
        "vllm",
        "--output",
        str(tmp_path / "run"),
    ]
    done = CliRunner().invoke(main, [*words, "--kv_cache_dtype", "fp8"])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["policy"], config["overlap"], config["kv_cache_dtype"]) == ("max_utilization", "async", "fp8")
    assert "as the defaults of that engine, --policy max_utilization" in caplog.text
    assert "--kv_cache_dtype" not in caplog.text
