"""Cache rows: copies that overlap, and the spare row."""

import torch

from ifbbench.torch.model.kv_cache import PagedKvCache
from tests.torch.driving import SMALL


def filled() -> PagedKvCache:
    """Three blocks of two rows; each row's values are its number, plus 100 in layer 1, negative for keys."""
    cache = PagedKvCache(SMALL, 3, 2, torch.device("cpu"), torch.float32)
    rows = torch.arange(6)
    for layer in range(2):
        values = (rows + 100.0 * layer).view(6, 1, 1).expand(6, 2, 8)
        cache.write(layer, rows, -values, values)
    return cache


def test_copies_read_all_sources_before_they_write() -> None:
    cache = filled()
    cache.copy_rows(torch.tensor([0, 4, 0, 5]), torch.tensor([4, 0, 2, 3]))
    expected = torch.tensor([4.0, 1.0, 0.0, 5.0, 0.0, 5.0])
    for layer in range(2):
        keys, values = cache.gather(layer, torch.tensor([[0, 1, 2]]))
        assert torch.equal(values[0, 1, :, 3], expected + 100 * layer)
        assert torch.equal(keys, -values)


def test_the_spare_row_is_in_no_block() -> None:
    cache = filled()
    assert cache.spare_row == 6
    values_of_padding = torch.full((3, 2, 8), 7.0)
    cache.write(0, torch.full((3,), cache.spare_row), values_of_padding, values_of_padding)
    _, values = cache.gather(0, torch.tensor([[0], [1], [2]]))
    assert values[:, 0, :, 0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
