"""Host memory for models and KV caches. Without torch, for those who ask only how much there is."""

import os
from pathlib import Path

# On a CPU the KV cache shares memory with all else, and runs there are small.
MAX_CPU_KV_BYTES = 2 * 1024**3


def available_host_bytes() -> int:
    """Memory that can be taken without swapping; half of all memory where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
