"""Random values do not depend on who draws them."""

import pytest
import torch

from ifbbench.model import random_values
from ifbbench.model.random_values import normal_values


@pytest.mark.parametrize("size", [1, 99, 100, 101, 1030])
def test_threads_make_no_difference(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(random_values, "PIECE", 100)
    drawn = []
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        drawn.append(normal_values((size,), 7, "name"))
    assert torch.equal(*drawn)


def test_seed_and_name_decide() -> None:
    first = normal_values((3, 50), 7, "name")
    assert torch.equal(first, normal_values((3, 50), 7, "name"))
    assert not torch.equal(first, normal_values((3, 50), 8, "name"))
    assert not torch.equal(first, normal_values((3, 50), 7, "other"))


def test_pieces_differ_and_are_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_values, "PIECE", 1000)
    values = normal_values((100, 1000), 0, "name")
    assert len(values.unique()) > 99_000
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01


def test_within_inference_mode() -> None:
    with torch.inference_mode():
        within = normal_values((10,), 0, "name")
    assert torch.equal(within, normal_values((10,), 0, "name"))
