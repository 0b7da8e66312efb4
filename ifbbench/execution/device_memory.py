"""What memory a device has left, and one message where it runs out: what was being done, and what to lower."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ifbbench.errors import InputError
from ifbbench.execution.host_memory import available_host_bytes

# How PyTorch, cuBLAS and the CUDA driver tell of it where they have no error class of their own for it.
SIGNS = ("out of memory", "DefaultCPUAllocator", "ALLOC_FAILED", "Storage size calculation overflowed")
ASKED = re.compile(r"[Tt]ried to allocate ([\d.,]+ ?\w+)")

LOWER_FOR_WEIGHTS = "choose a smaller model or --dtype"
LOWER_FOR_LARGEST_BATCH = "lower --max_num_tokens, or choose a smaller model or --dtype"
LOWER_FOR_PAGED_CACHE = "lower --kv_cache_free_gpu_mem_fraction or --max_tokens_in_paged_kvcache"
LOWER_FOR_CONTIGUOUS_CACHE = "lower --max_batch_size or --max_seq_len"
LOWER_FOR_BATCH = (
    "lower --kv_cache_free_gpu_mem_fraction, --max_num_tokens or --max_batch_size, or choose a smaller model or --dtype"
)


def free_bytes(device: torch.device) -> int:
    """Memory that may still be taken: of a GPU, or of the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_host_bytes()


class OutOfMemory(InputError):
    """The device has too little memory for what the settings ask of it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it came from, is about memory. What fails within the capture of a CUDA graph makes the
    end of the capture fail too, so it is not always the last error that tells."""
    cause = error.__cause__ or error.__context__
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS))
        or (cause is not None and is_out_of_memory(cause))
    )


@contextmanager
def needing_memory(doing: str, advice: str, device: torch.device) -> Iterator[None]:
    """OutOfMemory in place of an error that is about memory. doing: what needs it. advice: what the user can do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found = ASKED.search(str(error))
        asked = f"{found[1]} more were asked for" if found else "more was asked for"
        raise OutOfMemory(f"{device} is out of memory while {doing}: {asked}, and {free_bytes(device):,} bytes are "
                          f"free; {advice}.") from error
