"""The contiguous cache gives the tokens that the paged one gives."""

import numpy as np
import pytest
import torch

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.torch.model.kv_cache import ContiguousKvCache
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from tests.torch.driving import CPU, Driver, layout_driver, requests_of
from tests.torch.test_attention_windows import SMALL, asking_requests, assert_dense

LENGTHS = [(5, 30), (37, 12), (1, 40), (16, 7), (61, 10), (12, 12)]
SLOTS, LONGEST, SIZE = 3, 80, 4


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(SMALL, random_weights(SMALL, 3, CPU, torch.float32))


def driver_of(model: LlamaModel, is_contiguous: bool, window: int = LONGEST, sink: int = 0, beams: int = 1) -> Driver:
    """In a contiguous cache, the block tables say nothing."""
    attention_window = AttentionWindow(SIZE, window, LONGEST, sink, beams, is_cyclic=False)
    num_blocks = SLOTS * beams * attention_window.max_blocks_per_sequence
    layout = CacheLayout((WindowLayout((0, 1, 2), attention_window, num_blocks),), is_contiguous)
    driver = layout_driver(model, layout, SLOTS)
    if is_contiguous:
        driver.own_blocks = np.full((SLOTS, beams, LONGEST // SIZE), -5, np.int32)
        driver.tables = driver.own_blocks.copy()
    return driver


@pytest.mark.parametrize(("window", "sink"), [(LONGEST, 0), (LONGEST, 3), (10, 0), (13, 3)])
@pytest.mark.parametrize(("padded", "largest_chunk"), [(True, None), (False, None), (False, 7)])
def test_logits_of_every_position(
    model: LlamaModel, padded: bool, largest_chunk: int | None, window: int, sink: int
) -> None:
    requests = asking_requests(LENGTHS)
    driver = driver_of(model, True, window, sink)
    driver.padded = padded
    driver.run(requests, largest_chunk)
    paged = asking_requests(LENGTHS)
    driver_of(model, False, window, sink).run(paged, largest_chunk)
    assert [request.outputs for request in requests] == [request.outputs for request in paged]
    for request in requests:
        assert_dense(request, [(window, sink)] * 3)


@pytest.mark.parametrize("padded", [True, False])
def test_beams(model: LlamaModel, padded: bool) -> None:
    finals = []
    for is_contiguous in (True, False):
        requests = requests_of(LENGTHS, SMALL.vocab_size, beam_width=3)
        driver = driver_of(model, is_contiguous, beams=4)
        driver.padded = padded
        driver.run(requests)
        finals.append([[beam.tokens.tolist() for beam in request.search.final()] for request in requests])
    assert finals[0] == finals[1]


def test_shape(model: LlamaModel) -> None:
    (window,) = driver_of(model, True, beams=2).executor._cache.windows
    assert isinstance(window.cache, ContiguousKvCache)
    assert [storage.shape for storage in window.cache.storage.values()] == [(SLOTS * 2, 2, 2, LONGEST, 8)] * 3


def test_a_contiguous_cache_has_no_host_blocks(model: LlamaModel) -> None:
    window = WindowLayout((0, 1, 2), AttentionWindow(SIZE, LONGEST, LONGEST), 9, num_host_blocks=1)
    with pytest.raises(ValueError, match="no host blocks"):
        layout_driver(model, CacheLayout((window,), is_contiguous=True), SLOTS)
