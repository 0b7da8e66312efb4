"""trtllm-bench's rule, against limits computed by hand."""

import pytest

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.hardware import load_hardware
from ifbbench.studies.heuristics import trtllm_bench_limits

LLAMA_8B_BYTES = 8_030_261_248 * 2
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def config(**values) -> RunConfig:
    return RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", **values)


def test_the_batch_fills_the_cache_and_the_tokens_follow_the_lengths():
    free = load_hardware("h100-sxm").memory_bytes - LLAMA_8B_BYTES
    requests = 0.9 * free / (TOKEN_BYTES * (1000 + 500))
    assert 256 < requests < 384
    # In steps of 128, and of 256 below 4,096 tokens.
    assert trtllm_bench_limits(config(), 1000, 500) == {"max_batch_size": 384, "max_num_tokens": 1024 + 1024}
    assert requests * 3 < 2048


def test_long_sequences_have_the_smallest_limits():
    assert trtllm_bench_limits(config(), 100_000, 20_000) == {"max_batch_size": 64, "max_num_tokens": 2048}


def test_short_sequences_have_the_largest_limits():
    assert trtllm_bench_limits(config(), 90, 10) == {"max_batch_size": 4096, "max_num_tokens": 32_768}


def test_pipeline_stages_divide_the_batch_and_tensor_parallelism_adds_memory():
    one = trtllm_bench_limits(config(), 90, 10)["max_batch_size"]
    assert trtllm_bench_limits(config(pp_size=2), 90, 10)["max_batch_size"] == one / 2
    small = trtllm_bench_limits(config(), 4000, 500)["max_batch_size"]
    assert trtllm_bench_limits(config(tp_size=2), 4000, 500)["max_batch_size"] >= 2 * small


def test_a_device_that_is_not_simulated_is_refused():
    with pytest.raises(InputError, match="--device cpu"):
        trtllm_bench_limits(RunConfig(device="cpu"), 100, 100)
