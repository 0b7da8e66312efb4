"""Host memory for models and KV caches. Without torch, for those who ask only how much there is."""

import ctypes
import os
from pathlib import Path

# On a CPU the KV cache shares memory with all else, and runs there are small.
MAX_CPU_KV_BYTES = 2 * 1024**3
# Of glibc's malloc.h: from how many free bytes at its end the heap is made smaller, and how many pieces of memory may
# lie apart from it.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep what is freed from now on for what is allocated next, where the C library can be told so.

    Each iteration takes the memory that the one before has freed. Given back to the system in between, as large pieces
    are, every page would have to be cleared and mapped again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MOST)
        mallopt(M_MMAP_MAX, 0)


def available_host_bytes() -> int:
    """Memory that can be taken without swapping; half of all memory where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
