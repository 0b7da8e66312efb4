"""The host: its free memory, malloc options, and threads on a CPU. Imports torch only to set threads."""

import ctypes
import os
from pathlib import Path

# A KV cache in host memory shares it with everything else, and CPU runs are small.
MAX_CPU_KV_BYTES = 2 * 1024**3
# mallopt options (glibc malloc.h): free bytes at the top of the heap before it shrinks; blocks allocated by mmap.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MAX_INT = 2**31 - 1
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_host_bytes() -> int:
    """Memory available without swapping; half of all memory where the system does not report it."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def keep_freed_memory() -> None:
    """Let malloc keep memory freed from now on, for the whole process; does nothing without glibc's mallopt.

    Each iteration allocates what the one before has freed. Large blocks would be returned to the system in between, and
    their pages mapped and cleared again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MAX_INT)
        mallopt(M_MMAP_MAX, 0)


def use_threads(wanted: int | None) -> int:
    """Compute with `wanted` threads in this process, or as many as it can keep busy; returns the number.

    PyTorch's default is one for each core, or OMP_NUM_THREADS. It ignores a container's share of the processors; with
    more threads than that, each waits for others that do not run.
    """
    import torch

    granted = granted_processors()
    threads = wanted or min(torch.get_num_threads(), granted or torch.get_num_threads())
    torch.set_num_threads(threads)
    return threads


def granted_processors() -> int | None:
    """Processors that the control groups (cgroup v2 or v1) grant this process, rounded up; None without a limit."""
    if not MEMBERSHIP.exists():
        return None
    shares = []
    for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = CGROUPS / "cpu" if controllers else CGROUPS
        # In a container the path may be the host's; then only the top directory exists.
        own = top / group.lstrip("/")
        for directory in (own, *own.parents):
            if directory.is_relative_to(top) and (share := _share(directory)) is not None:
                shares.append(share)
    return min(shares, default=None)


def _share(directory: Path) -> int | None:
    """Processors that one control group grants, None without a limit."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (directory / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
            )
    except OSError:
        return None
    if quota == "max" or int(quota) <= 0:
        return None
    return max(1, -(-int(quota) // int(period)))
