"""From the settings of a user to the LoRA adapters of the engine: which there are, and the sizes of their caches."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ifbbench.errors import InputError
from ifbbench.kv.adapters import LoraConfig
from ifbbench.models.config import ModelConfig
from ifbbench.models.lora_modules import device_pages, page_layout, pages_of_bytes
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import memory_size

# A run without adapters does not need the packages that read them, so functions import these.
if TYPE_CHECKING:
    from ifbbench.torch.model.lora_files import Adapter
    from ifbbench.torch.model.lora_store import MakePages
    from ifbbench.torch.model.part import ModelPart

DEFAULT_RANK = 8
# Defaults of TensorRT-LLM's PeftCacheConfig.
DEFAULT_DEVICE_FRACTION = 0.02
DEFAULT_HOST_BYTES = 1 << 30


def resolve_lora(config: RunConfig) -> RunConfig:
    """Fill in the settings of adapters. InputError if they contradict each other."""
    if config.lora_rank is not None and (config.lora_dir or config.num_loras is None):
        raise InputError(
            "--lora_rank: is the rank of random adapters; give it with --num_loras and without --lora_dir."
        )
    rank = config.lora_rank or min(DEFAULT_RANK, config.max_lora_rank)
    if config.num_loras is not None and rank > config.max_lora_rank:
        raise InputError(
            f"--lora_rank: {rank} is above --max_lora_rank {config.max_lora_rank}; lower it, or raise --max_lora_rank."
        )
    return config.with_values(
        lora_rank=rank if config.num_loras is not None and not config.lora_dir else None,
        lora_device_mem_fraction=config.lora_device_mem_fraction or DEFAULT_DEVICE_FRACTION,
    )


def lora_config(
    config: RunConfig,
    model: ModelConfig,
    free_bytes: int | None,
    value_bytes: int,
    make_pages: "MakePages | None" = None,
    part: "ModelPart | None" = None,
) -> LoraConfig:
    """The adapters of a resolved `config` that uses some, and their caches.

    free_bytes: memory of a device beside the weights; None for devices without memory.
    value_bytes: bytes of one value.
    make_pages: None without a model.
    part: the part of the model that the device has, None if all.

    InputError for what is not an adapter of the model, or does not fit on the device.
    """
    from ifbbench.torch.model.lora_files import check_architecture
    from ifbbench.torch.model.lora_store import AdapterStore

    check_architecture(model)
    adapters = _adapters(config, model)
    if part is not None and model.num_layers % config.pp_size:
        raise InputError(
            f"--pp_size: {config.pp_size} stages have different numbers of the {model.num_layers} layers, "
            "so that adapters take different numbers of pages; choose a divisor."
        )
    store = AdapterStore(
        model,
        adapters,
        config.max_lora_rank,
        make_pages,
        rank=0 if part is None else part.tp_rank,
        world=config.tp_size,
        layers=range(-(-model.num_layers // config.pp_size)) if part is None else part.layers,
    )
    layout = page_layout(config, model)
    sizes = {task_id: len(store.placement(task_id).used) for task_id in adapters}
    page_bytes = layout.page_values * value_bytes
    pages = sum(sizes.values()) if free_bytes is None else device_pages(config, layout, free_bytes, value_bytes)
    largest = max(sizes, key=sizes.__getitem__, default=0)
    if sizes and sizes[largest] > pages:
        raise InputError(
            f"--lora_device_mem_fraction: the device cache has {pages} pages of {memory_size(page_bytes)}, and LoRA "
            f"task {largest} takes {sizes[largest]}. Raise it, or --lora_num_device_mod_layers."
        )
    host_bytes = config.lora_host_cache_bytes
    if host_bytes is None:
        host_bytes = max(DEFAULT_HOST_BYTES, sum(sizes.values()) * page_bytes)
    host_pages = pages_of_bytes(host_bytes, page_bytes)
    return LoraConfig(store, pages, host_pages, page_bytes, value_bytes)


def _adapters(config: RunConfig, model: ModelConfig) -> "dict[int, Adapter]":
    """Adapters by task id."""
    from ifbbench.torch.model.lora_files import RandomAdapter, find_adapters

    count = config.num_loras
    if config.lora_dir:
        found = find_adapters(config.lora_dir, model, config.max_lora_rank)
        if count is not None and count > len(found):
            raise InputError(
                f"--num_loras: {count} is more than the {len(found)} adapters in {config.lora_dir}; give "
                "a smaller number, or leave --lora_dir out for random ones."
            )
        return found
    return {
        task_id: RandomAdapter(task_id, config.lora_rank or DEFAULT_RANK, model, config.seed)
        for task_id in range(count or 0)
    }


def adapter_names(config: RunConfig) -> dict[str, int]:
    """The LoRA tasks of a resolved `config` by name: the folder of an adapter, or lora-0 and so on for random ones."""
    if config.lora_dir:
        from ifbbench.torch.model.lora_files import adapter_folders

        return {path.resolve().name: task_id for task_id, path in adapter_folders(config.lora_dir).items()}
    return {f"lora-{task_id}": task_id for task_id in range(config.num_loras or 0)}


def drawn_tasks(config: RunConfig, tasks: Iterable[int]) -> list[int]:
    """The LoRA tasks that requests of a trace without any draw from: the first `num_loras` of `tasks`; none without
    that setting."""
    return list(tasks)[: config.num_loras or 0]
