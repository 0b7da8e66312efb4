"""Settings as options: what is printed can be pasted, and means the same."""

from typing import Any

import pytest

from ifbbench.settings.command_line import option_words
from ifbbench.settings.config import settings
from ifbbench.settings.vllm_serve import VLLM_SERVE
from tests.cli.test_vllm import shown


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_batch_size": 8, "enable_kv_cache_reuse": False}, "--max_batch_size 8 --no_enable_kv_cache_reuse"),
        ({"max_num_tokens": None, "max_seq_len": None}, "--max_num_tokens none"),
    ],
)
def test_each_setting_is_an_option(values: dict[str, Any], words: str) -> None:
    assert " ".join(option_words(values, "trtllm")) == words


def test_vllm_has_its_own_names_which_are_options_here_too() -> None:
    values: dict[str, Any] = {
        "max_seq_len": 4096,
        "max_batch_size": 8,
        "max_num_tokens": 512,
        "max_num_scheduled_tokens": 256,
        "max_num_active_seqs": 6,
        "max_queue_size": 7,
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 64,
        "watermark": 0.05,
        "tokens_per_block": 32,
        "gpu_memory_utilization": 0.5,
        "num_gpu_blocks_override": 4000,
        "kv_cache_dtype": "fp8",
        "dtype": "bf16",
        "tp_size": 2,
        "pp_size": 1,
        "seed": 3,
        "prefix_cache_retention_interval": 64,
        "stream_interval": 4,
    }
    values |= {name: name == "enable_chunked_context" for name in VLLM_SERVE.flags}
    assert values.keys() == VLLM_SERVE.options.keys()
    words = option_words(values, "vllm")
    assert words[2:6] == ["--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    assert "--no-enable-prefix-caching" in words
    found = shown("--device", "h100-sxm", "--model", "llama-3.1-8b", *words)
    same = {item.name for item in settings()} & values.keys() - {"max_seq_len"}
    assert {name: found[name] for name in same} == {name: values[name] for name in same}
