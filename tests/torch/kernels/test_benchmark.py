"""The GPU benchmark on small shapes and without a clock, and its message without a GPU."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu_kernels


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def once(work: Callable[[], object]) -> float:
        work()
        return 1e-3

    sizes = {"HEADS": 4, "KV_HEADS": 2, "HEAD_SIZE": 16, "DTYPE": torch.float32, "DEVICE": device, "seconds": once}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_generation_counts_keys_and_values_once() -> None:
    row = gpu_kernels.generation(batch=2, length=64, bandwidth=1e9)
    moved = 2 * (2 * 64) * 2 * 16 * 4
    assert row["share_of_copy_bandwidth"] == round(moved / 1e-3 / 1e9, 3)
    assert row["relative_difference"] == pytest.approx(0.0, abs=1e-5)


def test_context_is_compared_with_torch_for_whole_prompts_only() -> None:
    whole, later = gpu_kernels.context(chunk=40, cached=0), gpu_kernels.context(chunk=8, cached=32)
    assert whole["share_of_torch_speed"] == 1.0
    assert "share_of_torch_speed" not in later
    assert [row["relative_difference"] for row in (whole, later)] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_a_wrong_result_shows() -> None:
    queries, keys, values = (gpu_kernels.drawn(tokens, heads, 16) for tokens, heads in ((2, 4), (9, 2), (9, 2)))
    assert gpu_kernels.relative_difference(torch.zeros_like(queries), queries, keys, values, 7) == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_message_without_a_gpu() -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_kernels.main()
    message = "This measures a GPU, and PyTorch finds none here. Run it on a machine with one."
    assert ended.value.code == message  # which Python writes to standard error, with status 1
