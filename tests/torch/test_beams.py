"""Beam search through the executor finds the beams of transformers, over blocks that beams share and own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.engine.batch import Batch, BeamInputs, StepOutputs
from ifbbench.engine.sampling_params import EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.cache_windows import one_window_layout, rows_to_copy
from ifbbench.torch.model_executor import ModelExecutor
from ifbbench.torch.sampling import STAND_IN_SCORE, best_candidates
from tests.torch.driving import FakeRequest, driver_of, requests_of
from tests.torch.transformers_reference import Reference, checkpoint, reference_logits

LENGTHS = [(5, 9), (30, 12), (1, 6), (8, 4), (13, 17)]
END_TOKENS = (7, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72)


def generated(reference: Reference, request: FakeRequest) -> tuple[list[list[int]], list[float]]:
    """Tokens and scores of the final beams by transformers."""
    prompt = torch.tensor([request.prompt.tolist()])
    early = {"always": True, "heuristic": False, "never": "never"}[request.sampling.early_stopping.value]
    ends = list(request.stop.end_tokens) or None
    result: Any = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=request.beam_width,
        num_return_sequences=request.beam_width,
        max_new_tokens=request.output_len,
        eos_token_id=ends,
        pad_token_id=0,
        length_penalty=request.sampling.length_penalty,
        early_stopping=early,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = result.sequences[:, prompt.shape[1] :].tolist()
    return [_without_padding(beam, request.stop.end_tokens) for beam in beams], result.sequences_scores.tolist()


def _without_padding(beam: list[int], end_tokens: tuple[int, ...]) -> list[int]:
    """The beam up to its end token."""
    ends = [index for index, token in enumerate(beam) if token in end_tokens]
    return beam[: ends[0] + 1] if ends else beam


PLAIN = SamplingParams()
SHORT = SamplingParams(length_penalty=0.5, early_stopping=EarlyStopping.ALWAYS)
LONG = SamplingParams(length_penalty=2.0, early_stopping=EarlyStopping.NEVER)


@pytest.mark.parametrize(
    ("beam_width", "slots", "largest_chunk", "end_tokens", "sampling"),
    [
        (2, 5, None, (), PLAIN),
        (4, 2, None, END_TOKENS, PLAIN),
        (3, 3, 7, END_TOKENS, SHORT),
        (3, 5, 7, (), SHORT),
        (4, 2, None, END_TOKENS, LONG),
    ],
)
def test_beams_of_transformers(
    tmp_path: Path,
    beam_width: int,
    slots: int,
    largest_chunk: int | None,
    end_tokens: tuple[int, ...],
    sampling: SamplingParams,
) -> None:
    model, reference = checkpoint(tmp_path)
    requests = requests_of(
        LENGTHS, model.config.vocab_size, sampling=sampling, beam_width=beam_width, stop=StopConditions(end_tokens)
    )
    driver_of(model, slots, 4, 48, seed=beam_width, max_beams=beam_width).run(requests, largest_chunk)
    for request in requests:
        beams, scores = generated(reference, request)
        final = request.search.final()
        assert [beam.tokens.tolist() for beam in final] == beams
        np.testing.assert_allclose([beam.score for beam in final], scores, atol=1e-4)


def test_fewer_beams_than_the_engine_allows(tmp_path: Path) -> None:
    model, reference = checkpoint(tmp_path)
    pairs = requests_of(LENGTHS[:2], model.config.vocab_size, beam_width=2)
    single = requests_of(LENGTHS[2:], model.config.vocab_size)
    driver = driver_of(model, 2, 4, 48, max_beams=4)
    driver.run(pairs)
    driver.run(single)
    for request in pairs:
        assert [beam.tokens.tolist() for beam in request.search.final()] == generated(reference, request)[0]
    alone = requests_of(LENGTHS[2:], model.config.vocab_size)
    driver_of(model, 3, 16, 48).run(alone)
    assert [request.outputs for request in single] == [request.outputs for request in alone]


def test_logits_of_beams(tmp_path: Path) -> None:
    model, reference = checkpoint(tmp_path)
    asking, plain, late = requests_of([(6, 9), (9, 9), (4, 9)], model.config.vocab_size, beam_width=3)
    asking.slot, plain.slot, late.slot = 0, 1, 2
    asking.options = late.options = OutputOptions(False, True, True, True)
    driver = driver_of(model, 3, 4, 24, max_beams=3)
    driver.step([(plain, 9)], [])
    prompt = driver.step([(asking, 6)], [plain])
    expected = reference_logits(reference, asking.prompt.tolist())
    np.testing.assert_allclose(prompt.context_logits[0], expected, atol=1e-4)
    np.testing.assert_allclose(prompt.generation_logits[0], expected[-1:], atol=1e-4)
    first_tokens = asking.search.tokens.tolist()
    mixed = driver.step([(late, 4)], [plain, asking])
    assert (list(mixed.context_logits), sorted(mixed.generation_logits)) == ([0], [0, 2])
    assert (mixed.tokens, mixed.log_probs) == (None, None)
    assert mixed.generation_logits[0].shape == (1, model.config.vocab_size)
    expected = torch.stack(
        [reference_logits(reference, [*asking.prompt.tolist(), token])[-1] for token in first_tokens]
    )
    np.testing.assert_allclose(mixed.generation_logits[2], expected, atol=1e-4)


def test_batches_without_outputs_have_no_candidates(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    (request,) = requests_of([(6, 9)], model.config.vocab_size, beam_width=3)
    request.slot = 0
    outputs: StepOutputs = driver_of(model, 1, 4, 24, max_beams=3).step([(request, 2)], [])
    assert outputs.tokens is None
    assert outputs.candidates is not None
    assert outputs.candidates.tokens.shape == outputs.candidates.scores.shape == (0, 6)


def test_generation_without_what_the_search_decided_is_an_error(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    one = np.zeros(1, np.int32)
    executor = ModelExecutor(model, one_window_layout(model.config, 8, 4), 1)
    with pytest.raises(ValueError, match="beam width 2 without beams"):
        executor.submit(Batch(0, (), one, one + 4, np.zeros((1, 2, 4), np.int32), beam_width=2, num_candidates=4))


def test_copies_cover_the_private_positions_of_beams_with_another_parent() -> None:
    tables = np.arange(36, dtype=np.int32).reshape(2, 3, 6)
    parents = np.array([[1, 1, 0], [0, 0, 0]], np.int32)
    beams = BeamInputs(parents, parents, parents.astype(np.float32), np.array([4, 8], np.int32))
    positions = np.array([7, 8], np.int32)
    batch = Batch(0, (), np.array([1, 0], np.int32), positions, tables, 3, beams, 6)
    sources, destinations = rows_to_copy(batch, tables, AttentionWindow(4))
    # Positions 4 to 6 of the first request; the other has nothing of its own yet.
    first_rows = tables[1, :, 1] * 4
    assert destinations.tolist() == [row for beam in (0, 2) for row in range(first_rows[beam], first_rows[beam] + 3)]
    assert sources.tolist() == [row for beam in (1, 0) for row in range(first_rows[beam], first_rows[beam] + 3)]


def test_copies_leave_out_what_a_window_hides() -> None:
    tables = np.arange(12, dtype=np.int32).reshape(1, 2, 6)
    parents = np.array([[1, 1]], np.int32)
    beams = BeamInputs(parents, parents, parents.astype(np.float32), np.array([2], np.int32))
    batch = Batch(0, (), np.zeros(1, np.int32), np.array([20], np.int32), tables, 2, beams, 4)
    # The next query, at position 20, sees the sink positions 0 to 2 and 16 to 20; position 0 is shared, and with the
    # bubble position 1 may be private.
    _, linear = rows_to_copy(batch, tables, AttentionWindow(4, 8, sink=3, is_cyclic=False))
    assert linear.tolist() == [1, 2, 17, 18, 19, 20]
    _, cyclic = rows_to_copy(batch, tables, AttentionWindow(4, 8, sink=3, max_beam_width=2))
    assert cyclic.tolist() == [1, 2, 8, 9, 10, 11]


def test_what_parent_and_child_share_is_not_copied() -> None:
    tables = np.array([[[0, 1, 2], [0, 1, 3]]], np.int32)
    parents = np.array([[1, 1]], np.int32)
    beams = BeamInputs(parents, parents, parents.astype(np.float32), np.array([4], np.int32))
    batch = Batch(0, (), np.zeros(1, np.int32), np.array([10], np.int32), tables, 2, beams, 4)
    sources, destinations = rows_to_copy(batch, tables, AttentionWindow(4))
    assert (sources.tolist(), destinations.tolist()) == ([12, 13], [8, 9])


def test_candidates_are_best_first_and_equal_ones_by_place() -> None:
    log_probs = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).log_softmax(-1)
    tokens, beams, scores = best_candidates(log_probs, torch.tensor([[-1.0, -0.5]]), 1, 5)
    assert tokens.tolist() == [[1, 2, 0, 1, 2], [0, 1, 2, 0, 1]]
    assert beams.tolist() == [[0] * 5, [1, 1, 1, 0, 0]]
    assert (scores[0, 3:] <= STAND_IN_SCORE).all()
    torch.testing.assert_close(scores[0, :3], log_probs[0, [1, 2, 0]])
    torch.testing.assert_close(scores[1], torch.tensor([-0.5, -0.5, -0.5, -1.0, -1.0]) - np.log(3))


def test_no_more_candidates_than_there_are() -> None:
    tokens, _, _ = best_candidates(torch.zeros(3, 3), torch.zeros(1, 2), 1, 50)
    assert tokens.shape == (2, 6)
    assert sorted(tokens[1].tolist()) == [0, 0, 1, 1, 2, 2]
