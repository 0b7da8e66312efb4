"""The memory that a model and its KV cache are to share: of a device here, or of one that is only thought of."""

from dataclasses import dataclass
from typing import Protocol

from ifbbench.config import RunConfig
from ifbbench.simulation.hardware import load_hardware

CPU, CUDA, NULL, IMAGINED = "cpu", "cuda", "null", "a device with this memory"


class Device(Protocol):
    """Where a run would take place.

    free_bytes: memory without the model's weights in it; None where it does not matter. max_kv_bytes: the most of it
    that a KV cache gets, None for all that is left. is_cpu: whether limits default to those of a CPU.
    """

    @property
    def name(self) -> str: ...

    @property
    def free_bytes(self) -> int | None: ...

    @property
    def max_kv_bytes(self) -> int | None: ...

    @property
    def is_cpu(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """A Device by its figures."""

    name: str
    free_bytes: int | None = None
    max_kv_bytes: int | None = None
    is_cpu: bool = False


def find_device(config: RunConfig, memory_bytes: int | None = None) -> Device:
    """The device that `config` names, with the memory that is free on it now, or `memory_bytes` instead.

    Given memory need not be here: nothing is asked of a device then, and `auto` means one that is no CPU. Nor need a
    `cuda` be here for which the settings give the KV cache's size; its memory is taken to suffice. Raises InputError if
    a device is to be asked and is not there.
    """
    is_sized = memory_bytes is not None or config.max_tokens_in_paged_kvcache is not None
    if config.device == NULL or (is_sized and config.device == CUDA):
        return Memory(config.device, memory_bytes)
    if config.device == CPU:
        return _cpu(memory_bytes)
    if config.hardware is not None:
        hardware = load_hardware(config.hardware)
        if memory_bytes is not None:
            return Memory(IMAGINED, memory_bytes, is_cpu=hardware.is_cpu)
        return Memory(config.device, hardware.memory_bytes, is_cpu=hardware.is_cpu)
    if memory_bytes is not None:
        return Memory(IMAGINED, memory_bytes)
    # Imported here because torch takes seconds to load.
    import torch

    from ifbbench.execution.build import choose_device

    device = choose_device(config)
    if device.type == CPU:
        return _cpu(None)
    return Memory(str(device), torch.cuda.mem_get_info(device)[0])


def _cpu(memory_bytes: int | None) -> Memory:
    from ifbbench.execution.host_memory import MAX_CPU_KV_BYTES, available_host_bytes

    free_bytes = available_host_bytes() if memory_bytes is None else memory_bytes
    return Memory(CPU, free_bytes, MAX_CPU_KV_BYTES, is_cpu=True)
