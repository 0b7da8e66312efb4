"""Beam search against `transformers`, against all sequences there are, and by hand.

The tests take the executor's part: they score whole sequences again in each step and hand over the best continuations.
"""

import itertools
import math
from functools import cache, partial

import numpy as np
import pytest
import torch
import transformers

from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.sampling_params import EarlyStopping, SamplingParams, StopConditions

VOCAB = 50
MAX_LEN = 12
PROMPTS = [(7, 3, 41), (12, 5, 9, 30), (1, 44)]
LENGTH_PENALTIES = [0.0, 1.0, 2.0, -1.0]
EARLY_STOPPING = {EarlyStopping.ALWAYS: True, EarlyStopping.HEURISTIC: False, EarlyStopping.NEVER: "never"}

close = partial(pytest.approx, rel=1e-5, abs=1e-4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The model is far too small to share out: threads that wait for each other made the tests take minutes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def model():
    """A random model whose distributions are sharp enough for beams to differ and end tokens to come up."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@cache
def model_log_probs(tokens):
    with torch.no_grad():
        return torch.log_softmax(model()(torch.tensor([tokens])).logits[0, -1], dim=-1).numpy()


@cache
def table_log_probs(tokens):
    """Log-probabilities over four tokens, drawn for every sequence before them."""
    logits = np.random.default_rng([len(tokens), *tokens]).normal(scale=1.5, size=4).astype(np.float32)
    return logits - np.log(np.exp(logits).sum())


class Search:
    """A beam search, and what its beams were before each step: `outputs[n][beam]` after n tokens."""

    def __init__(self, log_probs, prompt, width, max_len, sampling, stop, *, num_steps=None):
        self.log_probs, self.prompt, self.max_len, self.sampling = log_probs, prompt, max_len, sampling
        self.beams = BeamSearch(width, sampling, stop, max_len)
        self.num_candidates = BeamSearch.num_candidates(width, stop)
        self.outputs = [[()]]
        self.over = False
        while not self.over and self.beams.num_tokens != num_steps:
            self.step()

    def step(self):
        outputs, search = self.outputs[-1], self.beams
        scores = search.scores[:, None] + np.stack([self.log_probs(self.prompt + output) for output in outputs])
        best = np.argsort(-scores, axis=None, kind="stable")[: self.num_candidates]
        beams, tokens = np.divmod(best, scores.shape[1])
        is_last = search.num_tokens + 1 == self.max_len
        self.over = search.advance(tokens, beams, scores.flat[best], is_last=is_last)
        self.outputs.append([outputs[p] + (t,) for t, p in zip(search.tokens.tolist(), search.parents, strict=True)])

    def final(self):
        """The result, each beam compared with the beams of its path and the model's log-probabilities."""
        final = self.beams.final()
        for beam in final:
            tokens = tuple(beam.tokens.tolist())
            assert len(tokens) == len(beam.path) == len(beam.log_probs)
            assert beam.path[0] == 0
            for length, parent in enumerate(beam.path):
                assert self.outputs[length][parent] == tokens[:length]
            before = [self.log_probs(self.prompt + tokens[:length]) for length in range(len(tokens))]
            assert beam.log_probs == close([row[t] for row, t in zip(before, tokens, strict=True)])
            divisor = len(tokens) ** self.sampling.length_penalty
            assert beam.score == close(beam.cumulative_log_prob / divisor)
        assert [beam.score for beam in final] == sorted((beam.score for beam in final), reverse=True)
        return final


def ends_with(prompt_len, sequences):
    """The stop sequences as a stopping criterion of `transformers`: which rows end with one of them."""

    def criterion(input_ids, scores, **kwargs):
        rows = [tuple(row[prompt_len:]) for row in input_ids.tolist()]
        return torch.tensor([any(row[-len(s) :] == s for s in sequences) for row in rows])

    return criterion


def generate(prompt, width, sampling, stop):
    """What `transformers` makes of it: tokens, beam indices and scores of each beam, and how many steps it took."""
    config = transformers.GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=MAX_LEN,
        pad_token_id=0,
        length_penalty=sampling.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.early_stopping],
        eos_token_id=list(stop.end_tokens) or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    criteria = transformers.StoppingCriteriaList([ends_with(len(prompt), stop.stop_sequences)])
    inputs = torch.tensor([prompt])
    out = model().generate(inputs, config, None, criteria, attention_mask=torch.ones_like(inputs))
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    tokens = [row[len(prompt) :][:n] for row, n in zip(out.sequences.tolist(), lengths, strict=True)]
    paths = [row[:n] for row, n in zip(out.beam_indices.tolist(), lengths, strict=True)]
    return tokens, paths, out.sequences_scores.tolist(), len(out.scores)


def assert_equals_transformers(prompt, width, sampling, stop):
    search = Search(model_log_probs, prompt, width, MAX_LEN, sampling, stop)
    final = search.final()
    tokens, paths, scores, num_steps = generate(prompt, width, sampling, stop)
    assert [beam.tokens.tolist() for beam in final] == tokens
    assert [beam.path.tolist() for beam in final] == paths
    assert [beam.score for beam in final] == close(scores)
    assert search.beams.num_tokens == num_steps
    return final, num_steps


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end_tokens", [(), (21,), (21, 38)])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_equal_those_of_transformers(width, early_stopping, end_tokens, every):
    """Each penalty with each prompt; by default with one of the three, another one for the next penalty and ends."""
    for index, length_penalty in enumerate(LENGTH_PENALTIES):
        sampling = SamplingParams(length_penalty=length_penalty, early_stopping=early_stopping)
        for prompt in PROMPTS[(index + len(end_tokens)) % every :: every]:
            assert_equals_transformers(prompt, width, sampling, StopConditions(end_tokens))


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_stop_sequences_end_beams_as_they_do_in_transformers(early_stopping):
    sequences = ((21, 32), (38, 32, 27), (12,), (12, 10))
    sampling = SamplingParams(length_penalty=0.0, early_stopping=early_stopping)
    ended = set()
    for prompt, width in itertools.product(PROMPTS, [3, 5]):
        final, _ = assert_equals_transformers(prompt, width, sampling, StopConditions((11,), sequences))
        outputs = [tuple(beam.tokens.tolist()) for beam in final if len(beam.tokens) < MAX_LEN]
        ended |= {next(s for s in ((11,), *sequences) if output[-len(s) :] == s) for output in outputs}
    assert ended >= {(11,), (38, 32, 27), (12,)}


def test_the_early_stopping_rules_stop_at_different_steps():
    stop = StopConditions((42, 10, 32))
    always, heuristic, never = (
        assert_equals_transformers(PROMPTS[0], 2, SamplingParams(length_penalty=0.6, early_stopping=rule), stop)[1]
        for rule in (EarlyStopping.ALWAYS, EarlyStopping.HEURISTIC, EarlyStopping.NEVER)
    )
    assert always < heuristic < never < MAX_LEN


@pytest.mark.parametrize("end_tokens", [(), (3,), (3, 1)])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
def test_with_a_beam_for_every_sequence_the_result_is_all_of_them_by_score(length_penalty, early_stopping, end_tokens):
    complete = {}
    for tokens in itertools.product(range(4), repeat=3):
        length = next((n for n, token in enumerate(tokens, 1) if token in end_tokens), 3)
        log_prob = sum(table_log_probs(tokens[:n])[tokens[n]] for n in range(length))
        complete[tokens[:length]] = log_prob / length**length_penalty
    sampling = SamplingParams(length_penalty=length_penalty, early_stopping=early_stopping)
    final = Search(table_log_probs, (), 4**3, 3, sampling, StopConditions(end_tokens)).final()
    assert [tuple(beam.tokens.tolist()) for beam in final] == sorted(complete, key=complete.__getitem__, reverse=True)
    assert [beam.score for beam in final] == close(sorted(complete.values(), reverse=True))


@pytest.mark.parametrize("end_tokens", [(), (21, 38)])
@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_a_search_cut_short_gives_what_one_of_that_length_would(num_steps, end_tokens):
    for prompt, width in itertools.product(PROMPTS, [2, 5]):
        conditions = SamplingParams(), StopConditions(end_tokens)
        cut = Search(model_log_probs, prompt, width, MAX_LEN, *conditions, num_steps=num_steps)
        whole = Search(model_log_probs, prompt, width, num_steps, *conditions)
        expected = [(beam.tokens.tolist(), beam.score) for beam in whole.final()]
        assert [(beam.tokens.tolist(), beam.score) for beam in cut.final()] == expected
        assert len(expected) == width
        cut.final()
        assert len(cut.beams.final()) == width


def test_before_the_first_step_there_is_the_prompt_alone():
    search = BeamSearch(3, SamplingParams(), StopConditions(), 4)
    assert (search.num_tokens, search.scores.tolist(), search.final()) == (0, [0.0], [])


def test_enough_candidates_are_asked_for_that_the_beams_can_go_on():
    assert BeamSearch.num_candidates(4, StopConditions()) == 8
    assert BeamSearch.num_candidates(4, StopConditions((1,))) == 8
    assert BeamSearch.num_candidates(4, StopConditions((1, 2), ((3, 4),))) == 16


def advance(search, *candidates, is_last=False):
    tokens, beams, scores = (np.array(column) for column in zip(*candidates, strict=True))
    return search.advance(tokens, beams, scores, is_last=is_last)


def test_only_the_best_candidates_may_complete():
    search = BeamSearch(2, SamplingParams(), StopConditions((9,), ((4, 5),)), 3)
    assert not advance(search, (4, 0, -1.0), (1, 0, -1.5), (9, 0, -2.0))
    assert not advance(search, (5, 0, -1.5), (5, 1, -1.6), (9, 1, -1.7), (4, 1, -2.0))
    assert (search.tokens.tolist(), search.parents.tolist()) == ([5, 4], [1, 1])
    assert search.scores.tolist() == pytest.approx([-1.6, -2.0])
    assert advance(search, (2, 0, -6.6), (3, 1, -7.0), is_last=True)
    assert [beam.tokens.tolist() for beam in search.final()] == [[4, 5], [1, 5, 2]]
    assert [beam.score for beam in search.final()] == pytest.approx([-0.75, -2.2])


@pytest.mark.parametrize(("log_prob", "over"), [(-3.9, False), (-4.1, True)])
def test_never_stopping_early_lets_a_beam_hope_up_to_the_full_length(log_prob, over):
    search = BeamSearch(1, SamplingParams(early_stopping=EarlyStopping.NEVER), StopConditions((9,)), 4)
    assert advance(search, (9, 0, -1.0), (1, 0, log_prob)) == over


def test_dead_beams_stand_in_for_missing_candidates_and_never_win():
    search = BeamSearch(3, SamplingParams(early_stopping=EarlyStopping.ALWAYS), StopConditions((9,)), 8)
    assert not advance(search, (9, 0, -0.5), (1, 0, -1.0))
    assert (search.tokens[0], search.parents.tolist()) == (1, [0, 0, 0])
    assert search.scores.tolist() == [-1.0, -1e9, -1e9]
    assert not advance(search, (1, 0, -1.1), (9, 1, -1e9), (1, 2, -math.inf))
    assert search.scores.tolist() == close([-1.1, -1e9, -1e9])
    assert [beam.tokens.tolist() for beam in search.final()] == [[9], [1, 1]]
    assert advance(search, (9, 0, -1.2), (1, 1, -1e9 - 5))
    assert [beam.tokens.tolist() for beam in search.final()] == [[1, 1, 9], [9]]


def test_a_search_without_candidates_left_ends_with_fewer_beams():
    final = Search(table_log_probs, (), 9, 2, SamplingParams(), StopConditions((0, 1, 2))).final()
    assert sorted(beam.tokens.tolist() for beam in final) == [[0], [1], [2], [3, 0], [3, 1], [3, 2], [3, 3]]
    search = Search(table_log_probs, (), 9, 5, SamplingParams(), StopConditions((0, 1, 2, 3)))
    assert (search.beams.num_tokens, len(search.final())) == (1, 4)


@pytest.mark.parametrize("length_penalty", [1000.0, -1000.0])
def test_an_extreme_length_penalty_still_gives_beams(length_penalty):
    sampling = SamplingParams(length_penalty=length_penalty)
    search = Search(table_log_probs, (), 3, 6, sampling, StopConditions((0,)))
    final = search.beams.final()
    assert len(final) == 3
    assert all(math.isfinite(beam.score) for beam in final)
