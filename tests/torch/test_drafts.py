"""Draft tokens through a real model on a CPU: greedy tokens are those without drafts, sampled ones keep their
distribution."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.build.engine import build_engine
from ifbbench.clock import WallClock
from ifbbench.engine.drafts import NO_DRAFTS, DraftSettings
from ifbbench.engine.interfaces import Observer
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams
from ifbbench.schedulers.engines import make_loop
from ifbbench.settings.config import RunConfig
from ifbbench.torch.verification import accept_or_replace, draw
from tests.engine.engine import scheduler_of

BASE = RunConfig(
    device="cpu",
    model="tiny",
    max_batch_size=16,
    tokens_per_block=8,
    max_tokens_in_paged_kvcache=1_600,
    max_num_tokens=96,
    max_seq_len=256,
    enable_chunked_context=True,
)
VOCABULARY = 4096  # of the tiny model

pytestmark = pytest.mark.usefixtures("small_model")


class Counts(Observer):
    def __init__(self) -> None:
        self.drafted = self.accepted = self.iterations = self.paused = 0

    def iteration(self, record: IterationRecord) -> None:
        self.iterations += 1
        self.paused += len(record.paused)
        if record.drafts is not None:
            self.drafted += record.drafts.drafted
            self.accepted += record.drafts.accepted


def requests(count: int = 32, **options: Any) -> list[Request]:
    """Mixed lengths; a half repeats phrases, and a third shares a beginning."""
    draw, common, made = np.random.default_rng(1), np.random.default_rng(2).integers(0, VOCABULARY, 40), []
    for index in range(count):
        phrase = draw.integers(0, VOCABULARY, int(draw.integers(2, 6)))
        tokens = np.tile(phrase, 8) if index % 2 else draw.integers(0, VOCABULARY, int(draw.integers(1, 60)))
        tokens = np.concatenate([common, tokens]) if index % 3 == 0 else tokens
        made.append(
            Request(
                index,
                len(tokens),
                int(draw.integers(2, 24)),
                index=index,
                prompt_tokens=tokens.astype(np.int32),
                **options,
            )
        )
    return made


def run(
    config: RunConfig, made: list[Request], drafts: DraftSettings | None = None
) -> tuple[dict[int, list[int]], Counts, dict[int, Response]]:
    """The output of each request. drafts: instead of those of `config`."""
    engine, counts, responses, waiting = build_engine(config), Counts(), {}, list(made)
    limits = engine.limits if drafts is None else dataclasses.replace(engine.limits, drafts=drafts)

    def get_requests(count: int) -> list[Request]:
        taken = waiting[:count]
        del waiting[:count]
        return taken

    def send_response(response: Response) -> None:
        responses[response.request.request_id] = response

    loop = make_loop(limits, engine.executor, WallClock(), get_requests, send_response, counts)
    while loop.step():
        scheduler_of(loop).kv_cache.check_consistency()
    engine.executor.close()
    assert all(response.error is None for response in responses.values())
    tokens = {index: np.asarray(response.output_tokens).tolist() for index, response in responses.items()}
    return tokens, counts, responses


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    return run(BASE, requests())[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_ngram": 3},
        {"draft_ngram": 2, "draft_len": 7, "policy": "max_utilization", "max_tokens_in_paged_kvcache": 480},
        {"draft_ngram": 3, "enable_kv_cache_reuse": True, "type": "inflight_unfused"},
        {"draft_model": "tiny", "draft_len": 3},
        {
            "draft_model": "tiny",
            "enable_kv_cache_reuse": True,
            "policy": "max_utilization",
            "max_tokens_in_paged_kvcache": 280,
        },
        {"draft_model": "tiny", "enable_chunked_context": False, "max_num_tokens": 256, "kv_cache_type": "contiguous"},
    ],
)
def test_greedy_tokens_are_those_without_drafts(changes, plain):
    """32 requests in mixed batches, with pauses and reuse. (As draft model, the model itself: it guesses all right.)"""
    outputs, counts, _ = run(BASE.with_values(**changes), requests())
    assert outputs == plain
    assert counts.accepted > 0
    if "draft_model" in changes:
        assert counts.accepted == counts.drafted
    if changes.get("policy") == "max_utilization":
        assert counts.paused > 0


def test_a_wrong_draft_model_changes_no_token(plain, monkeypatch):
    """Other random weights guess nothing right, and all is rewound."""
    from ifbbench.torch import build

    load = build.load_model
    seeds = iter([0, 7])
    monkeypatch.setattr(build, "load_model", lambda config, _=None: load(config.with_values(seed=next(seeds))))
    outputs, counts, _ = run(BASE.with_values(draft_model="tiny"), requests())
    assert outputs == plain
    assert counts.drafted > 20 * counts.accepted


def test_right_guesses_of_clients_are_accepted(plain):
    """A third wrong from the second token on. Log-probabilities and logits are those without drafts, too."""

    def made(has_drafts: bool) -> list[Request]:
        found = []
        for one in requests():
            guess = plain[one.request_id][:5]
            if one.request_id % 3 == 0:
                guess = [*guess[:1], (guess[0] + 1) % VOCABULARY]
            options = OutputOptions(
                return_log_probs=True,
                return_generation_logits=one.request_id % 5 == 0,
                draft_input_ids=np.array(guess, np.int32) if has_drafts else None,
            )
            found.append(
                Request(
                    one.request_id, one.prompt_len, one.max_new_tokens, prompt_tokens=one.prompt_tokens, options=options
                )
            )
        return found

    outputs, counts, responses = run(BASE, made(has_drafts=True))
    assert outputs == plain
    assert counts.accepted > 32
    _, _, references = run(BASE, made(has_drafts=False))
    for index, response in responses.items():
        np.testing.assert_allclose(response.log_probs[0], references[index].log_probs[0], atol=1e-4)
        if index % 5 == 0:
            np.testing.assert_allclose(response.generation_logits[0], references[index].generation_logits[0], atol=1e-3)


@pytest.mark.parametrize("penalty", [1.0, 0.8])
def test_sampled_tokens_of_look_up_are_those_without_drafts(penalty):
    """A fixed guess is accepted if it is the token that is drawn anyway. Penalties see the tokens before."""
    made = [requests(20, sampling=SamplingParams(0.3, 3, 0.9, seed=5, repetition_penalty=penalty)) for _ in range(2)]
    without, with_look_up = run(BASE, made[0]), run(BASE.with_values(draft_ngram=3), made[1])
    assert without[0] == with_look_up[0]
    assert with_look_up[1].drafted > 0


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    is_likely = expected >= 5
    difference = counts[is_likely] - expected[is_likely]
    return float((difference**2 / expected[is_likely]).sum())


def test_rejection_sampling_keeps_the_distribution():
    """Drafts of another distribution: what comes out is distributed as the target, at the rate 1 - total variation."""
    number, generator = 200_000, torch.Generator().manual_seed(3)
    target = torch.tensor([0.5, 0.2, 0.0, 0.05, 0.25])
    proposed = torch.tensor([0.1, 0.3, 0.3, 0.25, 0.05])
    uniform = torch.rand(3, number, generator=generator, dtype=torch.float64)
    drafts = draw(proposed.expand(number, -1), uniform[0])
    tokens = accept_or_replace(target.expand(number, -1), proposed.expand(number, -1), drafts, uniform[1], uniform[2])
    counts = np.bincount(tokens.numpy(), minlength=5)
    # 0.999 quantile of 3 degrees of freedom.
    assert counts[2] == 0
    assert chi_square(counts, number * target.numpy().astype(float)) < 16.3
    rate = float(torch.minimum(target, proposed).sum())
    assert float((tokens == drafts).double().mean()) == pytest.approx(rate, abs=0.01)


NUMBER = 400
SAMPLED = BASE.with_values(max_batch_size=64, max_num_tokens=1024, max_tokens_in_paged_kvcache=8_000)


def sampled(first_seed: int, options: Callable[[], OutputOptions] = OutputOptions) -> list[Request]:
    """Requests with equal prompts and different seeds, that choose among four tokens."""
    prompt = np.arange(5, dtype=np.int32)
    return [
        Request(
            index,
            5,
            3,
            prompt_tokens=prompt,
            sampling=SamplingParams(1.0, 4, seed=first_seed + index),
            options=options(),
        )
        for index in range(NUMBER)
    ]


@pytest.fixture(scope="module")
def freely_sampled() -> dict[int, list[int]]:
    return run(SAMPLED, sampled(0))[0]


def assert_equally_distributed(one: dict[int, list[int]], other: dict[int, list[int]]) -> None:
    """A chi-square test of the tokens at each of the first two positions."""
    for place in (0, 1):
        tokens = [outputs[place] for found in (one, other) for outputs in found.values()]
        values, index = np.unique(tokens, return_inverse=True)
        table = np.zeros((2, len(values)))
        np.add.at(table, (np.repeat([0, 1], NUMBER), index), 1)
        table = table[:, table.sum(axis=0) >= 10]
        expected = table.sum(axis=0) / 2
        statistic, freedom = float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1
        assert freedom >= 3
        # Beyond the 0.9999 quantile.
        assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 5


def test_sampling_with_a_draft_model_keeps_the_distribution(freely_sampled, monkeypatch):
    from ifbbench.torch import build

    load, seeds = build.load_model, iter([0, 7])
    monkeypatch.setattr(build, "load_model", lambda config, _=None: load(config.with_values(seed=next(seeds))))
    outputs, counts, _ = run(SAMPLED.with_values(draft_model="tiny", draft_len=2), sampled(10_000))
    assert counts.drafted > NUMBER / 2
    assert_equally_distributed(freely_sampled, outputs)


def test_sampling_with_drafts_that_clients_drew_keeps_the_distribution(freely_sampled):
    rng, logits = np.random.default_rng(0), np.full((2, VOCABULARY), -30.0, np.float32)
    likely = np.bincount([tokens[0] for tokens in freely_sampled.values()], minlength=VOCABULARY).argsort()[::-1][:4]
    logits[:, likely] = [0.0, 1.0, 0.5, -1.0]
    weights = np.exp(logits[0, likely])

    def drafts() -> OutputOptions:
        drawn = rng.choice(likely, 2, p=weights / weights.sum()).astype(np.int32)
        return OutputOptions(draft_input_ids=drawn, draft_logits=logits)

    outputs, counts, _ = run(SAMPLED, sampled(10_000, drafts))
    assert counts.accepted > NUMBER / 4
    assert_equally_distributed(freely_sampled, outputs)


def test_no_drafts_means_no_draft_settings():
    assert build_engine(BASE).limits.drafts is NO_DRAFTS
