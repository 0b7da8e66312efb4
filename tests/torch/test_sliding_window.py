"""A model's own sliding window: Mistral's, as transformers computes it."""

from pathlib import Path

import pytest
import torch

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.model_executor import ModelExecutor
from tests.torch.driving import layout_driver, requests_of
from tests.torch.test_equality_with_transformers import assert_greedy
from tests.torch.transformers_reference import mistral_checkpoint, reference_logits

WINDOW = 8
LENGTHS = [(5, 20), (40, 12), (1, 15), (8, 9), (7, 7)]


def layout_of(is_cyclic: bool, window: int = WINDOW) -> CacheLayout:
    attention_window = AttentionWindow(4, window, 60, is_cyclic=is_cyclic)
    return CacheLayout((WindowLayout((0, 1, 2), attention_window, 60),))


@pytest.mark.parametrize("is_cyclic", [True, False])
@pytest.mark.parametrize("largest_chunk", [None, 5, 20])
def test_generation_of_transformers(tmp_path: Path, is_cyclic: bool, largest_chunk: int | None) -> None:
    model, reference = mistral_checkpoint(tmp_path, WINDOW)
    requests = requests_of(LENGTHS, model.config.vocab_size)
    layout_driver(model, layout_of(is_cyclic), 3).run(requests, largest_chunk)
    for request in requests:
        assert_greedy(reference, request)


@pytest.mark.parametrize("layout", [None, layout_of(True), layout_of(False)])
def test_logits_of_transformers(tmp_path: Path, layout: CacheLayout | None) -> None:
    model, reference = mistral_checkpoint(tmp_path, WINDOW)
    (request,) = requests_of([(30, 12)], model.config.vocab_size)
    driver = layout_driver(model, layout or one_window_layout(model.config, 60, 4), 1)
    request.slot = 0
    driver.step([(request, 30)], [])
    seen = list(model.last_logits)
    while not request.is_done:
        driver.step([], [request])
        seen += list(model.last_logits)
    expected = reference_logits(reference, request.prompt.tolist() + request.outputs)[29:-1]
    torch.testing.assert_close(torch.stack(seen), expected, atol=1e-4, rtol=0)


def test_the_models_window_is_kept_without_being_told(tmp_path: Path) -> None:
    model, _ = mistral_checkpoint(tmp_path, WINDOW)
    assert model.config.sliding_window == WINDOW
    (window,) = ModelExecutor(model, one_window_layout(model.config, 20, 4), 1)._cache.windows
    assert window.attention.size == WINDOW
    attention = AttentionWindow(4, WINDOW, WINDOW, is_cyclic=False)
    assert not attention.is_limited
    assert attention.is_straight(torch.arange(WINDOW + 1).numpy()).all()
