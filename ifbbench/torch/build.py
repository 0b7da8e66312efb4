"""From settings to an executor: device, data types, model, memory for the KV cache, and the executor itself."""

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from ifbbench.engine.batch import Batch
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import Request, RequestTable
from ifbbench.engine.step_profile import StepProfile
from ifbbench.errors import InputError
from ifbbench.kv.adapters import LoraConfig
from ifbbench.kv.attention_window import ceil_div
from ifbbench.kv.sizing import CacheLayout
from ifbbench.models.config import GPT2, ModelConfig
from ifbbench.models.named_models import load_model_config, weights_path
from ifbbench.models.quantization import quantization_of
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import memory_size
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.device import free_bytes, needing_memory
from ifbbench.torch.host import MAX_CPU_KV_BYTES
from ifbbench.torch.model.compiled import keep_triton_kernels
from ifbbench.torch.model.linear import FP8_MULTIPLE, Fp8Linear, MakeProduct, make_linear
from ifbbench.torch.model.llama import Gpt2Model, LlamaModel
from ifbbench.torch.model.operations import operations_for
from ifbbench.torch.model.weights import ModelWeights, load_weights, random_weights
from ifbbench.torch.model_executor import ModelExecutor
from ifbbench.torch.pipeline import StageExecutor, layout_of_stage
from ifbbench.torch.timed_executor import TimedExecutor

if TYPE_CHECKING:
    from ifbbench.torch.communicator import Communicator

# Types of weights, activations, embeddings, norms and output layer; with fp8 all but the layers' weights are bfloat16.
TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Types of keys and values in the cache; fp8 is e4m3 without scales.
KV_CACHE_DTYPES = TORCH_DTYPES | {"fp8": torch.float8_e4m3fn}
# The first GPUs with fp8 in matrix units and Triton: Ada, then Hopper.
FIRST_CAPABILITY_WITH_FP8 = (8, 9)
NO_ROWS = np.zeros(0, np.int32)


def choose_device(config: RunConfig) -> torch.device:
    """The device that `config.device` names. InputError for null, and for cuda where there is none."""
    if config.device == "null":
        raise InputError("--device: null runs no model; expected auto, cpu or cuda here.")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device: 'cuda' was asked for, but PyTorch finds no CUDA device here. Use --device cpu, or "
            "check the driver and that PyTorch is a CUDA build."
        )
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def check_data_types(config: RunConfig, model: ModelConfig, device: torch.device) -> None:
    """InputError if `device` does not support the data types of weights and KV cache, or fp8 products not the model's
    sizes."""
    asked = [name for name in ("dtype", "kv_cache_dtype") if getattr(config, name) == "fp8"]
    if not asked or (device.type != "cuda" and asked == ["kv_cache_dtype"]):
        return
    needed = ".".join(map(str, FIRST_CAPABILITY_WITH_FP8))
    if device.type != "cuda":
        raise InputError(
            f"--dtype: fp8 weights need a GPU of compute capability {needed} or higher, and this run is "
            f"on {device}; choose float32, bf16 or fp16, or --device sim:PROFILE."
        )
    found = torch.cuda.get_device_capability(device)
    if found < FIRST_CAPABILITY_WITH_FP8:
        raise InputError(
            f"--{asked[0]}: fp8 needs a GPU of compute capability {needed} or higher; "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}. Choose bf16 or fp16."
        )
    sizes = (model.hidden_size, model.query_size, model.kv_size, model.intermediate_size)
    if "dtype" in asked and any(size % FP8_MULTIPLE for size in sizes):
        raise InputError(
            f"--dtype: fp8 weights need sizes that are multiples of {FP8_MULTIPLE}; model {config.model} "
            f"has hidden, query, KV and feed-forward sizes of {', '.join(map(str, sizes))}. Choose bf16."
        )


def check_weights_fit(config: RunConfig, weight_bytes: int, device: torch.device) -> None:
    """InputError, before anything is loaded, if the weights take more than the device's free memory."""
    free = free_bytes(device)
    if weight_bytes > free:
        raise InputError(
            f"--model: the weights of {config.model} take {memory_size(weight_bytes)} in "
            f"{config.weight_dtype}, but {memory_size(free)} are free on {device}. Choose a smaller "
            "model or --dtype, or --device sim:PROFILE."
        )


def load_model(config: RunConfig, communicator: "Communicator | None" = None) -> LlamaModel:
    """The model that `config` names, on its device. A built-in shape gets random weights from `config.seed`.

    communicator: connects the ranks that share the model, of which this process loads its part.

    OutOfMemory if the weights do not fit, InputError if the device does not support the data types, or the ranks cannot
    share the model.
    """
    device = choose_device(config) if communicator is None else communicator.device
    dtype = TORCH_DTYPES.get(config.weight_dtype, torch.bfloat16)
    model_config, path = load_model_config(config.model), weights_path(config.model)
    if path is not None and path.is_dir() and (found := quantization_of(config.model)) is not None:
        raise InputError(
            f"--model {config.model}: {found}; quantized weights are not read. Choose --device "
            "sim:PROFILE, or the model before its quantization."
        )
    part = None if communicator is None else communicator.part(model_config, config.ep_size)
    own_config = model_config if part is None else part.config
    check_data_types(config, own_config, device)
    is_computed = model_config.routing is not None
    refused = {"lora_dir": config.uses_lora, "kv_cache_type": config.kv_cache_type == "contiguous"}
    for name in [name for name, is_given in refused.items() if is_given and model_config.latent is not None]:
        raise InputError(f"--{name}: is not built for models with latent attention; leave it out.")
    if model_config.latent is not None and config.weight_dtype == "fp8":
        raise InputError("--dtype: fp8 is not built for models with latent attention; choose bf16.")
    if (model_config.num_experts or model_config.layers or model_config.windows) and not is_computed:
        raise InputError(
            f"--model: {config.model} has layers that run on simulated devices only. "
            "Choose --device sim:PROFILE, or another model."
        )
    make_product: MakeProduct = Fp8Linear if config.weight_dtype == "fp8" else make_linear
    doing = f"loading the weights of {config.model} in {config.weight_dtype}"
    with torch.inference_mode(), needing_memory(doing, "choose a smaller model or --dtype", device):
        if path is None:
            weights = random_weights(model_config, config.seed, device, dtype, make_product, part)
        else:
            weights = load_weights(model_config, path, device, dtype, make_product, part)
        return make_model(own_config, weights)


def make_model(config: ModelConfig, weights: ModelWeights) -> LlamaModel:
    """The model of `config`, which is the shape of `weights`, in the fastest implementation for their device: the C
    kernels on a CPU, Triton's on a GPU if Triton is installed."""
    device = weights.embedding.device
    operations = operations_for(device, weights.embedding.dtype)
    if config.architecture == GPT2:
        return Gpt2Model(config, weights, operations)
    if config.latent is not None:
        from ifbbench.torch.model.deepseek import DeepseekModel

        return DeepseekModel(config, weights, operations)
    if device.type != "cuda" or find_spec("triton") is None:
        return LlamaModel(config, weights, operations)
    from ifbbench.torch.model.kernel_llama import KernelLlama

    keep_triton_kernels()
    return KernelLlama(config, weights)


def adapter_memory(device: torch.device) -> int:
    """Bytes of the memory that a share is taken of for LoRA adapters, when the weights are loaded."""
    return free_bytes(device) if device.type == "cuda" else min(free_bytes(device), MAX_CPU_KV_BYTES)


def kv_memory(
    config: RunConfig, model: LlamaModel, device: torch.device, lora_bytes: int = 0, num_sharing: int = 1
) -> int:
    """Bytes for keys and values: `kv_cache_free_gpu_mem_fraction` of the free memory, or what `gpu_memory_utilization`
    of all of it leaves beside the model.

    On CUDA the peak of the largest batch and `lora_bytes`, for adapters, are subtracted first; on a CPU the limit is 2
    GiB.

    config: settings with resolved limits.
    num_sharing: ranks that share the host's memory.

    OutOfMemory if the largest batch does not fit.
    """
    if device.type == "cuda":
        longest = model.config.max_position_embeddings
        longest = min(config.max_num_tokens or longest, longest)
        doing = f"measuring the memory of the largest batch, {longest:,} tokens"
        advice = "lower --max_num_tokens, or choose a smaller model or --dtype"
        with needing_memory(doing, advice, device):
            activations = activation_bytes(model, longest, config.tokens_per_block)
        free = free_bytes(device) - activations - lora_bytes
        if config.gpu_memory_utilization is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            return int(max(0, free - (1 - config.gpu_memory_utilization) * total))
        return int(config.kv_cache_free_gpu_mem_fraction * max(0, free))
    share = config.gpu_memory_utilization or config.kv_cache_free_gpu_mem_fraction
    return int(min(share * free_bytes(device) / num_sharing, MAX_CPU_KV_BYTES))


def activation_bytes(model: LlamaModel, num_tokens: int, tokens_per_block: int) -> int:
    """Peak of CUDA memory that a prompt of `num_tokens` tokens takes, without its KV cache.

    Memory freed by the run is returned from PyTorch's allocator to the device, so that it counts as free.
    """
    device = model.device
    num_blocks = ceil_div(num_tokens, tokens_per_block)
    executor = executor_class(model)(model, one_window_layout(model.config, num_blocks, tokens_per_block), 1)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    request = Request(0, num_tokens, 1, prompt_tokens=np.zeros(num_tokens, np.int32))
    request.enter(RequestTable(1), 0)
    tables = np.arange(num_blocks, dtype=np.int32).reshape(1, 1, num_blocks)
    executor.submit(Batch(0, (ContextChunk(request, 0, num_tokens),), NO_ROWS, NO_ROWS, tables))
    executor.collect()
    peak = torch.cuda.max_memory_allocated(device) - before
    executor.close()
    del executor
    torch.cuda.empty_cache()
    return max(0, peak)


def executor_class(model: LlamaModel) -> type[ModelExecutor]:
    """The class of executors of `model`."""
    return ModelExecutor if model.part is None or model.part.pp_size == 1 else StageExecutor


def make_executor(
    model: LlamaModel,
    num_slots: int,
    max_seq_len: int,
    *,
    layout: CacheLayout,
    kv_cache_dtype: str | None = None,
    profile: StepProfile | None = None,
    lora: LoraConfig | None = None,
    draft_model: LlamaModel | None = None,
    normalize_log_probs: bool = False,
) -> ModelExecutor:
    """An executor with the KV cache `layout`, of the whole model, for up to `num_slots` sequences at a time.

    kv_cache_dtype: one of KV_CACHE_DTYPES; the model's if None.
    profile: profile to add times to.
    lora: adapters that requests may have.
    draft_model: see ModelExecutor.
    normalize_log_probs: see `OptionalOutputs`.

    OutOfMemory if the cache does not fit.
    """
    make = executor_class(model) if profile is None else partial(TimedExecutor, profile=profile)
    if model.part is not None:
        layout = layout_of_stage(layout, model.part)
    size = f"{layout.windows[0].num_blocks:,} blocks"
    advice = "lower --kv_cache_free_gpu_mem_fraction or --max_tokens_in_paged_kvcache"
    if layout.is_contiguous:
        size, advice = f"{num_slots:,} sequences", "lower --max_batch_size or --max_seq_len"
    with needing_memory(f"allocating the KV cache of {size}", advice, model.device):
        dtype = None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
        return make(
            model,
            layout,
            num_slots,
            max_seq_len,
            kv_cache_dtype=dtype,
            lora=lora,
            draft_model=draft_model,
            normalize_log_probs=normalize_log_probs,
        )
