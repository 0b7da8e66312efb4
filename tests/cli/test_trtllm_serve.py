"""Command lines of `trtllm-serve` as config files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ifbbench.errors import InputError
from ifbbench.settings.names import setting
from ifbbench.settings.servers import read_line
from ifbbench.settings.trtllm_serve import arguments_of, read_arguments

LLM = """\
enable_attention_dp: true
attention_dp_config: {enable_balance: true, timeout_iters: 60}
cuda_graph_config: {max_batch_size: 256}
kv_cache_config: {free_gpu_memory_fraction: 0.85, enable_block_reuse: false, dtype: fp8}
scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}
stream_interval: 10
max_batch_size: 64
"""
MEANT = {
    "tp_size": 8,
    "ep_size": 8,
    "max_num_tokens": 8 * 4096,
    "attention_dp_enable_balance": True,
    "attention_dp_time_out_iters": 60,
    "kv_cache_free_gpu_mem_fraction": 0.85,
    "enable_kv_cache_reuse": False,
    "kv_cache_dtype": "fp8",
    "policy": "max_utilization",
    "stream_interval": 10,
    "max_batch_size": 8 * 64,
    "draft_mtp": 3,
    "attention_dp_size": 8,
}


@pytest.mark.parametrize("option", ["--extra_llm_api_options", "--config"])
def test_a_line_with_a_file_of_arguments(tmp_path: Path, option: str) -> None:
    """The arguments in the file win, and limits of a rank become those of all."""
    file = tmp_path / "llm.yaml"
    file.write_text(LLM)
    options = f"--tp_size 8 --ep_size 8 --max_num_tokens 4096 --max_batch_size 9 {option} {file}"
    found = read_line(f"mpirun -n 1 trtllm-serve serve m {options}")
    assert found.values == {"engine": "trtllm", "model": "m"} | MEANT
    assert found.not_simulated == ["extra-llm-api-options: cuda_graph_config.max_batch_size"]
    assert "add acceptance_rate" in found.notes[0]
    assert "those of the ranks together" in found.notes[1]


def test_options_alone() -> None:
    line = (
        "trtllm-serve m --backend pytorch --kv_cache_free_gpu_memory_fraction 0.8 --enable_chunked_prefill --pp_size 2"
    )
    found = read_line(line)
    options: dict[str, Any] = {"kv_cache_free_gpu_mem_fraction": 0.8, "enable_chunked_context": True, "pp_size": 2}
    assert found.values == {"engine": "trtllm", "model": "m"} | options
    assert found.ignored == ["backend"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--max_batch_sizes 3", "--max-batch-sizes: is no option of TensorRT-LLM 1; correct"),
        ("--config none.yaml", "none.yaml: the config file cannot be read"),
        ("--max_batch_size 0", "--max-batch-size"),
    ],
)
def test_what_a_line_cannot_mean_is_named(options: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        read_line(f"trtllm-serve m {options}")
    assert words in str(refused.value)


def test_written_limits_are_those_of_a_rank(tmp_path: Path) -> None:
    """With attention data parallelism the server has them for each rank; ours are those of all."""
    values = {"max_batch_size": 256, "max_num_tokens": 65536, "tp_size": 8, "attention_dp_size": 8, "ep_size": 4}
    values["max_tokens_in_paged_kvcache"] = 80_000
    written = arguments_of(values | {"draft_mtp": 3})
    assert (written["max_batch_size"], written["max_num_tokens"], written["enable_attention_dp"]) == (32, 8192, True)
    assert written["kv_cache_config"]["max_tokens"] == 10_000
    path = tmp_path / "arguments.yaml"
    path.write_text(yaml.safe_dump(written))
    read = read_line(f"trtllm-serve m --extra_llm_api_options {path}").values
    assert {name: read[name] for name in values} == values
    assert read["draft_mtp"] == 3


def test_written_arguments_are_read_again(tmp_path: Path) -> None:
    """Members of enumerations are in capitals, data types are not."""
    values: dict[str, Any] = {"max_batch_size": 64, "tp_size": 2, "policy": "max_utilization", "kv_cache_dtype": "fp8"}
    values |= {"enable_chunked_context": True, "enable_kv_cache_reuse": False, "tokens_per_block": 32}
    written = arguments_of(values | {"device": "sim:h100-sxm"})
    assert written["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert written["kv_cache_config"]["dtype"] == "fp8"
    path = tmp_path / "arguments.yaml"
    path.write_text(yaml.safe_dump(written))
    read = {name: setting(name).check(value) for name, value in read_arguments(path).values.items()}
    assert read == values
