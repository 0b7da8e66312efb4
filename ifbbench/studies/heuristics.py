"""trtllm-bench's rule for max_batch_size and max_num_tokens: the limits that users get today without a search."""

from math import ceil

from ifbbench.build.resolve import resolve_limits
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.settings.dtypes import DTYPE_BYTES
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard

MAX_BATCH_SIZE, MAX_NUM_TOKENS = 4096, 32_768
MIN_BATCH_SIZE, MIN_NUM_TOKENS = 64, 2048
# (value, multiple): what lies below the value is rounded up to the multiple.
BATCH_STEPS = ((256.0, 32), (1024.0, 128), (float("inf"), 256))
TOKEN_STEPS = ((4096.0, 256), (8192.0, 512), (float("inf"), 1024))
TUNERS = {"enable_batch_size_tuning": True, "enable_max_num_tokens_tuning": True}


def trtllm_bench_limits(config: RunConfig, prompt_len: float, output_len: float) -> dict[str, int]:
    """max_batch_size and max_num_tokens by trtllm-bench's rule, for requests of these average lengths.

    config: settings with a simulated device. The rule takes all memory beside the weights as free.
    InputError if the weights do not fit, or the device is not simulated.
    """
    if config.hardware is None:
        raise InputError(f"--device {config.device}: memory is known of simulated devices only; give sim:PROFILE.")
    model, hardware = load_model_config(config.model), load_hardware(config.hardware)
    config = resolve_limits(config, max(model.max_position_embeddings, config.max_seq_len or 0), hardware.is_cpu)
    shard, gpus = Shard.of_config(model, config), config.tp_size * config.pp_size
    free_bytes = (hardware.memory_bytes - shard.parameter_bytes) * gpus
    if free_bytes <= 0:
        raise InputError(f"model {config.model} does not fit {hardware.name} with --tp_size {config.tp_size}.")
    heads = max(config.tp_size, model.num_kv_heads)  # each GPU has at least one
    token_bytes = 2 * model.num_layers * heads * model.head_dim * DTYPE_BYTES[shard.kv_cache_dtype]
    in_cache = free_bytes * config.kv_cache_free_gpu_mem_fraction / (token_bytes * (prompt_len + output_len))
    batch_size = min(in_cache, MAX_BATCH_SIZE) / config.pp_size
    num_tokens = min(batch_size * (1 + prompt_len / output_len), MAX_NUM_TOKENS)
    return {
        "max_batch_size": max(_rounded_up(batch_size, BATCH_STEPS), MIN_BATCH_SIZE),
        "max_num_tokens": max(_rounded_up(num_tokens, TOKEN_STEPS), MIN_NUM_TOKENS),
    }


def _rounded_up(value: float, steps: tuple[tuple[float, int], ...]) -> int:
    multiple = next(multiple for below, multiple in steps if value < below)
    return ceil(value / multiple) * multiple
