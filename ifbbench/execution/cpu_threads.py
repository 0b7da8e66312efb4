"""How many threads compute on a CPU."""

from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def use_threads(wanted: int | None) -> int:
    """Compute with that many threads from now on, or with as many as this process can keep busy; returns how many.

    PyTorch's own choice is one for each core that the process may run on, or what OMP_NUM_THREADS says. It does not
    know of a container's share of the processor: with more threads than that, each waits for others that do not run.
    """
    granted = granted_processors()
    threads = wanted or (torch.get_num_threads() if granted is None else min(torch.get_num_threads(), granted))
    torch.set_num_threads(threads)
    return threads


def current_threads() -> int:
    """How many threads this process computes with."""
    return torch.get_num_threads()


def granted_processors() -> int | None:
    """How many processors' time the control groups (cgroup v2 or v1) of this process grant it, rounded up; None if they
    set no limit, or there are none."""
    if not MEMBERSHIP.exists():
        return None
    shares = []
    for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = CGROUPS / "cpu" if controllers else CGROUPS
        # In a container, the group's path may be the host's, of which only the top is to be seen.
        own = top / group.lstrip("/")
        for directory in (own, *own.parents):
            if directory.is_relative_to(top) and (share := _share(directory)) is not None:
                shares.append(share)
    return min(shares, default=None)


def _share(directory: Path) -> int | None:
    """Processors that one control group grants, None if it has no limit."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in
                             ("quota", "period"))  # fmt: skip
    except OSError:
        return None
    if quota == "max" or int(quota) <= 0:
        return None
    return max(1, -(-int(quota) // int(period)))
