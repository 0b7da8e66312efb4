"""Static batching's padding: prompts run as long as the longest, which does not change the results."""

from pathlib import Path

import numpy as np
import pytest

from ifbbench.engine.arrays import FloatArray
from ifbbench.engine.sampling_params import OutputOptions
from tests.torch.driving import FakeRequest, RecordingModel, driver_of, requests_of
from tests.torch.transformers_reference import checkpoint

LENGTHS = [(5, 9), (37, 4), (1, 6), (16, 7)]


def run(model: RecordingModel, padded: bool, beam_width: int) -> list[FakeRequest]:
    requests = requests_of(LENGTHS, model.config.vocab_size, beam_width=beam_width)
    for request in requests:
        request.options = OutputOptions(False, True, True, True)
    driver = driver_of(model, 4, 4, 48, max_beams=beam_width)
    driver.padded = padded
    driver.run(requests)
    return requests


def assert_close(found: FloatArray | None, expected: FloatArray | None) -> None:
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_results_are_those_without_padding(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    for padded, plain in zip(run(model, True, 1), run(model, False, 1), strict=True):
        assert padded.outputs == plain.outputs
        assert_close(padded.numbers.log_probs(), plain.numbers.log_probs())
        assert_close(padded.numbers.context_logits, plain.numbers.context_logits)
        assert_close(padded.numbers.generation_logits(), plain.numbers.generation_logits())


def test_beams_are_those_without_padding(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    for padded, plain in zip(run(model, True, 3), run(model, False, 3), strict=True):
        found, expected = padded.search.final(), plain.search.final()
        assert [beam.tokens.tolist() for beam in found] == [beam.tokens.tolist() for beam in expected]


def test_all_rows_run_and_padding_is_kept_out_of_the_cache(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    requests = requests_of(LENGTHS, model.config.vocab_size)
    driver = driver_of(model, 4, 4, 48)
    driver.padded = True
    for slot, request in enumerate(requests):
        request.slot = slot
    driver.step([(request, request.prompt_len) for request in requests], [])
    inputs = model.last_inputs
    assert len(inputs.tokens) == 4 * 37
    assert inputs.positions.tolist() == list(range(37)) * 4
    assert inputs.output_rows.tolist() == [4, 37 + 36, 2 * 37, 3 * 37 + 15]
    layer = inputs.layers[0]
    assert layer.cache.spare_row is not None
    cache_rows = layer.cache_rows
    spare = cache_rows.eq(layer.cache.spare_row)
    assert spare.sum() == 4 * 37 - sum(length for length, _ in LENGTHS)
    assert not inputs.tokens[spare].any()
    assert len(cache_rows[~spare].unique()) == (~spare).sum()
    driver.step([], requests)
    assert len(model.last_inputs.tokens) == 4


def test_only_whole_prompts_can_be_padded(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    (request,) = requests_of([(9, 3)], model.config.vocab_size)
    request.slot = 0
    driver = driver_of(model, 1, 4, 16)
    driver.step([(request, 4)], [])
    driver.padded = True
    with pytest.raises(ValueError, match="only whole prompts are padded"):
        driver.step([(request, 5)], [])
