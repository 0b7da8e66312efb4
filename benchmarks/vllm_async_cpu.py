"""vLLM's asynchronous scheduling on a CPU, where vLLM turns it off: a plugin of vLLM for `benchmarks.vllm_server`.

vLLM's CPU worker is its GPU worker on tensors of the CPU, so that its asynchronous code runs too, but for streams and
events of CUDA: a CPU has computed a tensor when the call returns, and nothing is waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENTRY_POINT = f"{__name__}:register"


class _Done:
    """A stream or an event on which everything is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass


@contextmanager
def _on_stream(_: Any) -> Iterator[None]:
    yield


def register() -> None:
    """Let `--async-scheduling` stand. vLLM calls it in each of its processes."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    replaced = {"Event": _Done, "Stream": _Done, "stream": _on_stream, "current_stream": _Done}
    for name, replacement in replaced.items():
        setattr(torch.cuda, name, replacement)
    setattr(CpuPlatform, check.__name__, staticmethod(check_and_update_config))


def describe(folder: Path) -> None:
    """Write a package description with this plugin, for processes that have `folder` in PYTHONPATH."""
    description = folder / "ifbbench_async_cpu-0.dist-info"
    description.mkdir(parents=True)
    (description / "METADATA").write_text("Metadata-Version: 2.1\nName: ifbbench-async-cpu\nVersion: 0\n")
    (description / "entry_points.txt").write_text(f"[vllm.general_plugins]\nasync_cpu = {ENTRY_POINT}\n")
