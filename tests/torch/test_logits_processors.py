"""The processors of logits are those of transformers: alone, greedy, sampled and with beams, in mixed batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.engine.batch import BeamInputs
from ifbbench.engine.sampling_params import EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.torch.logits_processors import LogitsProcessors
from tests.torch.driving import CPU, FakeRequest, driver_of, requests_of
from tests.torch.transformers_reference import Reference, checkpoint

VOCABULARY = 199
END_TOKENS = (7, 60, 61, 62)
LENGTHS = [(5, 19), (70, 22), (1, 26), (33, 8), (64, 15)]


def bias_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32)


def words_of(seed: int, sequence: list[int]) -> tuple[tuple[int, ...], ...]:
    """Bad words of one to four tokens, of which some begin with the end of `sequence`; one is an end token."""
    random = np.random.default_rng(seed)
    words = [tuple(random.integers(0, VOCABULARY, length).tolist()) for length in (1, 1, 2, 3)]
    return (*words, *((*sequence[-length:], seed + length) for length in (1, 2, 3)), (7,), (50, 7))


def processors_of(sampling: SamplingParams, prompt_len: int, ends: tuple[int, ...]) -> Any:
    """Those of transformers, in the order of its `generate`."""
    from transformers.generation import logits_process as of

    chosen = of.LogitsProcessorList()
    if sampling.embedding_bias is not None:
        bias = {(token,): float(value) for token, value in enumerate(sampling.embedding_bias)}
        chosen.append(of.SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1:
        chosen.append(of.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        words = [list(word) for word in sampling.bad_words]
        chosen.append(of.NoBadWordsLogitsProcessor(words, eos_token_id=list(ends)))
    if sampling.min_length:
        chosen.append(of.MinNewTokensLengthLogitsProcessor(prompt_len, sampling.min_length, list(ends)))
    return chosen


def variants(seed: int, sequence: list[int]) -> list[SamplingParams]:
    """Each processor alone, and all of them."""
    alone: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"min_length": 4},
        {"bad_words": words_of(seed, sequence)},
        {"embedding_bias": bias_of(seed)},
    ]
    every = {name: value for fields in alone for name, value in fields.items()}
    return [SamplingParams(**fields) for fields in (*alone, every, {})]


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_those_of_transformers(seed: int) -> None:
    """Also of a sequence that continues on the device, and of rows without processors in between."""
    pytest.importorskip("transformers")
    random = np.random.default_rng(seed)
    sequences = [random.integers(0, VOCABULARY, length).tolist() for length in (1, 2, 9, 30, 5, 6)]
    sampling = variants(seed, sequences[seed])
    processors = LogitsProcessors(6, VOCABULARY, CPU)
    slots = np.arange(6)
    lengths = list(map(len, sequences))
    for slot in range(6):
        processors.assign(slot, sampling[slot], END_TOKENS, lengths[slot], np.array(sequences[slot], np.int32))
    for _ in range(7):
        order = random.permutation(6)
        scores = torch.from_numpy(random.normal(size=(6, VOCABULARY)).astype(np.float32) * 5)
        found = processors.apply(scores.clone(), slots[order], np.array([len(sequences[slot]) for slot in order]))
        for row, slot in enumerate(order.tolist()):
            theirs = processors_of(sampling[slot], lengths[slot], END_TOKENS)
            expected = theirs(torch.tensor([sequences[slot]]), scores[row : row + 1].clone())[0]
            torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-6)
        # Tokens that continue a bad word, or repeat.
        chosen = [random.choice([*sampling[2].bad_words[3], *sequences[slot]]).item() for slot in range(6)]
        processors.note(torch.tensor([chosen[slot] for slot in order]), slots[order])
        for slot in range(6):
            sequences[slot].append(chosen[slot])


def test_scores_of_beams_follow_their_parents() -> None:
    pytest.importorskip("transformers")
    random = np.random.default_rng(1)
    prompt = random.integers(0, VOCABULARY, 12).tolist()
    (*_, sampling, _) = variants(1, prompt)
    processors = LogitsProcessors(3, VOCABULARY, CPU)
    processors.assign(2, sampling, END_TOKENS, 12, np.array(prompt, np.int32), beam_width=3)
    beams = [list(prompt)] * 3
    theirs = processors_of(sampling, 12, END_TOKENS)
    for step in range(6):
        parents = random.integers(0, 3, 3) if step else np.zeros(3, int)
        tokens = random.choice([*prompt, *sampling.bad_words[3]], 3)
        beams = [[*beams[parent], token] for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
        decision = BeamInputs(
            tokens[None].astype(np.int32),
            parents[None].astype(np.int32),
            np.zeros((1, 3), np.float32),
            np.zeros(1, np.int32),
        )
        processors.follow(decision, np.array([2]))
        scores = torch.from_numpy(random.normal(size=(3, VOCABULARY)).astype(np.float32)).log_softmax(-1)
        found = processors.apply(scores.clone(), np.full(3, 2), np.full(3, 13 + step), np.arange(3))
        torch.testing.assert_close(found, theirs(torch.tensor(beams), scores.clone()), rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_penalty_count_prompt_and_output() -> None:
    prompt, chosen = [3, 4, 4, 5], [4, 9]
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(1, VOCABULARY)).astype(np.float32))
    processors = LogitsProcessors(1, VOCABULARY, CPU)
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    processors.assign(0, sampling, (), 4, np.array(prompt, np.int32))
    slot = np.zeros(1, np.int64)
    for token in chosen:
        processors.note(torch.tensor([token]), slot)
    expected = scores.clone()
    for token, count in ((3, 1), (4, 3), (5, 1), (9, 1)):
        expected[0, token] += 0.25 * count - 0.5
    torch.testing.assert_close(processors.apply(scores, slot, np.array([6])), expected)


def test_a_slot_forgets_the_processors_of_its_request_before() -> None:
    scores = torch.zeros(1, VOCABULARY)
    processors, slot = LogitsProcessors(1, VOCABULARY, CPU), np.zeros(1, np.int64)
    (*_, every, _) = variants(0, [1, 2, 3])
    processors.assign(0, every, END_TOKENS, 3, np.array([1, 2, 3], np.int32))
    assert processors.apply(scores, slot, np.array([3])) is not scores
    processors.assign(0, SamplingParams(bad_words=((8,),)), END_TOKENS, 3, np.array([1, 2, 3], np.int32))
    expected = scores.clone()
    expected[0, 8] = -torch.inf
    torch.testing.assert_close(processors.apply(scores, slot, np.array([3])), expected)
    processors.assign(0, SamplingParams(), END_TOKENS, 3, None)
    assert processors.apply(scores, slot, np.array([3])) is scores


def test_a_wider_request_follows_in_a_slot_with_processors() -> None:
    """In turn with processors and without, which others in the batch have."""
    processors = LogitsProcessors(2, VOCABULARY, CPU)
    (*_, every, _) = variants(0, [1, 2, 3])
    prompt = np.array([1, 2, 3], np.int32)
    processors.assign(0, every, END_TOKENS, 3, prompt)
    for sampling in (SamplingParams(), every, SamplingParams(bad_words=((8, 9),))):
        processors.assign(0, sampling, END_TOKENS, 3, prompt, beam_width=3)
        processors.assign(1, every, END_TOKENS, 3, prompt, beam_width=3)
        beams = BeamInputs(
            np.full((2, 3), 8, np.int32),
            np.zeros((2, 3), np.int32),
            np.zeros((2, 3), np.float32),
            np.zeros(2, np.int32),
        )
        processors.follow(beams, np.array([0, 1]))
        slots, parents = np.repeat([0, 1], 3), np.tile(np.arange(3), 2)
        found = processors.apply(torch.zeros(6, VOCABULARY), slots, np.full(6, 4), parents)
        theirs = processors_of(sampling, 3, END_TOKENS)
        torch.testing.assert_close(found[:3], theirs(torch.tensor([[1, 2, 3, 8]] * 3), torch.zeros(3, VOCABULARY)))


def processed_requests(seed: int, **fields: Any) -> list[FakeRequest]:
    requests = requests_of(LENGTHS, VOCABULARY, stop=StopConditions(END_TOKENS), beam_width=fields.pop("beam_width", 1))
    for index, request in enumerate(requests):
        request.sampling = SamplingParams(
            repetition_penalty=(1.0, 1.3, 2.0, 0.8, 1.0)[index],
            min_length=(0, 6, 0, 5, 8)[index],
            bad_words=words_of(seed + index, request.prompt.tolist()) if index != 3 else (),
            embedding_bias=bias_of(index) if index in (0, 2) else None,
            **fields,
            seed=index,
        )
    return requests


def generated(reference: Reference, request: FakeRequest, **options: Any) -> Any:
    prompt = torch.tensor([request.prompt[: request.original_prompt_len].tolist()])
    sampling = request.sampling
    bias = sampling.embedding_bias
    if bias is not None:
        options["sequence_bias"] = [[[token], float(value)] for token, value in enumerate(bias)]
    return reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=request.output_len,
        repetition_penalty=sampling.repetition_penalty,
        min_new_tokens=sampling.min_length or None,
        bad_words_ids=[list(word) for word in sampling.bad_words] or None,
        eos_token_id=list(END_TOKENS),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


def until_end(tokens: list[int]) -> list[int]:
    ends = [offset for offset, token in enumerate(tokens) if token in END_TOKENS]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize(("slots", "largest_chunk", "pauses"), [(1, None, 0), (5, None, 0), (2, 9, 4)])
def test_greedy_tokens(tmp_path: Path, slots: int, largest_chunk: int | None, pauses: int) -> None:
    model, reference = checkpoint(tmp_path)
    requests = processed_requests(slots)
    driver_of(model, slots, 16, 100, seed=slots).run(requests, largest_chunk, pauses)
    for request in requests:
        expected = generated(reference, request).sequences[0, request.original_prompt_len :].tolist()
        assert until_end(request.outputs) == until_end(expected)
        assert len(until_end(request.outputs)) >= min(request.sampling.min_length, request.output_len)


@pytest.mark.parametrize(("beam_width", "slots", "largest_chunk"), [(2, 5, None), (3, 2, 9), (4, 3, None)])
def test_beams(tmp_path: Path, beam_width: int, slots: int, largest_chunk: int | None) -> None:
    model, reference = checkpoint(tmp_path)
    requests = processed_requests(beam_width, beam_width=beam_width, early_stopping=EarlyStopping.NEVER)
    driver_of(model, slots, 4, 100, seed=slots, max_beams=beam_width).run(requests, largest_chunk)
    for request in requests:
        result = generated(
            reference, request, num_beams=beam_width, num_return_sequences=beam_width, early_stopping="never"
        )
        expected = [until_end(beam) for beam in result.sequences[:, request.prompt_len :].tolist()]
        final = request.search.final()
        assert [beam.tokens.tolist() for beam in final] == expected
        np.testing.assert_allclose([beam.score for beam in final], result.sequences_scores, atol=1e-4)


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_pauses(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    outputs = []
    for slots, chunk, pauses in ((1, None, 0), (5, 8, 0), (2, 20, 4)):
        requests = processed_requests(3, temperature=1.2, top_k=40, presence_penalty=0.7, frequency_penalty=0.1)
        driver_of(model, slots, 16, 100).run(requests, chunk, pauses)
        outputs.append([request.outputs for request in requests])
        for request in requests:
            sequence = [*request.prompt[: request.original_prompt_len].tolist(), *request.outputs]
            for word in request.sampling.bad_words:
                if word != (7,):  # an end token
                    starts = range(request.original_prompt_len - len(word) + 1, len(sequence))
                    assert not any(tuple(sequence[max(start, 0) : start + len(word)]) == word for start in starts)
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_temperature_of_beams_divides_the_logits(tmp_path: Path) -> None:
    model, reference = checkpoint(tmp_path)
    requests = requests_of(LENGTHS, VOCABULARY, beam_width=3, sampling=SamplingParams(temperature=0.6))
    driver_of(model, 3, 16, 100, max_beams=3).run(requests)
    reference.lm_head.weight.data /= 0.6
    for request in requests:
        prompt = torch.tensor([request.prompt.tolist()])
        result = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=request.output_len,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [beam.tokens.tolist() for beam in request.search.final()] == result[:, prompt.shape[1] :].tolist()


def test_no_memory_without_processors(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path)
    driver = driver_of(model, 2, 4, 24)
    driver.run(requests_of([(8, 3), (4, 4)], VOCABULARY))
    assert driver.executor._processors._counts is None


@pytest.mark.parametrize("normalize", [False, True])
def test_log_probs_may_be_those_among_the_kept_tokens(tmp_path: Path, normalize: bool) -> None:
    """Of a greedy token that is 0; of a sampled one its share of the tokens that top-k and top-p leave."""
    from ifbbench.torch.cache_windows import one_window_layout
    from ifbbench.torch.model_executor import ModelExecutor
    from tests.torch.driving import Driver

    model, reference = checkpoint(tmp_path)
    layout = one_window_layout(model.config, 64, 4)
    driver = Driver(ModelExecutor(model, layout, 3, normalize_log_probs=normalize), 3, 64)
    sampled = SamplingParams(temperature=0.8, top_k=4, seed=3, repetition_penalty=1.5)
    requests = requests_of([(5, 8), (9, 8), (4, 8)], VOCABULARY)
    for request, sampling in zip(requests, (SamplingParams(), sampled, sampled), strict=True):
        request.sampling, request.options = sampling, OutputOptions(return_log_probs=request.request_id != 2)
    driver.run(requests)
    for request in requests[:2]:
        sequence = [*request.prompt.tolist(), *request.outputs]
        with torch.inference_mode():
            logits = reference(torch.tensor([sequence])).logits[0, len(request.prompt) - 1 : -1]
        expected = []
        for offset, token in enumerate(request.outputs):
            row = logits[offset : offset + 1]
            if normalize:
                before = torch.tensor([sequence[: len(request.prompt) + offset]])
                row = processors_of(request.sampling, len(request.prompt), ())(before, row)
                row = row / (request.sampling.temperature or 1.0)
                kept = row.topk(request.sampling.top_k or 1).values[0, -1]
                row = row.masked_fill(row < kept, -torch.inf)
            expected.append(float(row.log_softmax(-1)[0, token]))
        np.testing.assert_allclose(request.numbers.log_probs(), expected, atol=1e-4)
    assert not requests[2].numbers.log_probs().any()
