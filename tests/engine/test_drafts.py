"""Draft tokens in the engine: scheduling arithmetic, KV cache, what ends a request, and what the records say."""

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.drafts import UNKNOWN_TOKEN, DraftSettings, continuation
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions, StopConditions
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.modes import BatchingType, Overlap
from tests.engine.engine import Loop, output_of, scheduler_of, token_of, with_tokens
from tests.engine.executors import SpyExecutor

CONFIG = BatchingConfig("max_utilization", 4, 64, 100, 99, 4, 60, chunk_unit=4)
WRONG = 5_000  # not a token of `token_of`


class VerifyingExecutor:
    """Makes the tokens of `token_of`, proposes the unknown drafts (a fixed pattern of them wrong), and verifies all.

    Its memory holds (request, position, token) in each slot of each block. All that a step attends to must be there.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._memory: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._owners: dict[int, Request] = {}
        self._answers: deque[StepOutputs] = deque()
        self.accepted: list[int] = []

    def submit(self, batch: Batch) -> None:
        spans = []
        for chunk in batch.context:
            self._owners[chunk.request.slot] = chunk.request
            spans.append((chunk.request, chunk.start, chunk.length, chunk.is_last))
        for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
            spans.append((self._owners[slot], position, 1, True))
        num_outputs = sum(is_last for *_, is_last in spans)
        counts = np.zeros(num_outputs, int) if batch.drafts is None else batch.drafts.counts
        given = iter([] if batch.drafts is None else batch.drafts.tokens.tolist())
        tokens, accepted, output = np.zeros((num_outputs, 1 + counts.max(initial=0)), np.int32), [], 0
        for request, start, length, is_last in spans:
            sequence = [token_of(request, start + at) for at in range(length)]
            end, taken = start + length, 0
            if is_last:
                drafts = [next(given) for _ in range(counts[output])]
                for at, draft in enumerate(drafts):
                    if draft == UNKNOWN_TOKEN:
                        is_right = (request.request_id + end + at) % 3
                        drafts[at] = token_of(request, end + at) if is_right else WRONG
                while taken < len(drafts) and drafts[taken] == token_of(request, end + taken):
                    taken += 1
                sequence += drafts
                tokens[output, : taken + 1] = [token_of(request, end + at) for at in range(taken + 1)]
                accepted.append(taken)
                output += 1
            for at, token in enumerate(sequence):
                self._memory[self._place(batch, request, start + at)] = (request.request_id, start + at, token)
            for position in range(end):
                expected = (request.request_id, position, token_of(request, position))
                assert self._memory[self._place(batch, request, position)] == expected
        self.accepted += accepted
        if batch.drafts is None:
            self._answers.append(StepOutputs(tokens[:, 0]))
        else:
            self._answers.append(StepOutputs(tokens, accepted=np.array(accepted, np.int32)))

    def _place(self, batch: Batch, request: Request, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self._size)
        return int(batch.block_tables[request.slot, 0, block]), offset

    def collect(self) -> StepOutputs:
        return self._answers.popleft()

    def close(self) -> None:
        pass


def drafted(config: BatchingConfig = CONFIG, max_len: int = 4, **changes: Any) -> BatchingConfig:
    return dataclasses.replace(config, drafts=DraftSettings(max_len), **changes)


def with_client_drafts(request: Request, tokens: list[int], **options: Any) -> Request:
    """`request` anew, with drafts that its client brings."""
    return with_tokens(
        Request(
            request.request_id,
            request.prompt_len,
            request.max_new_tokens,
            options=OutputOptions(draft_input_ids=np.array(tokens, np.int32), **options),
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25), st.integers(0, 8)), min_size=1, max_size=9),
    st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
    st.sampled_from([BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED]),
    st.integers(1, 6),
    st.booleans(),
    st.integers(14, 40),
    st.sampled_from([12, 30, 64]),
)
def test_tokens_and_blocks_are_those_of_a_run_without_drafts(
    sizes, policy, batching_type, max_len, is_chunked, num_blocks, max_num_tokens
):
    """Every slot that a step reads is right, the cache is consistent, and each request gets all its tokens once."""
    config = dataclasses.replace(
        drafted(max_len=max_len),
        policy=policy,
        batching_type=batching_type,
        num_blocks=num_blocks,
        max_num_tokens=max_num_tokens if is_chunked else 64,
        chunk_unit=4 if is_chunked else None,
        max_input_len=64,
    )
    arrivals = [(at, with_tokens(Request(index, prompt, new))) for index, (prompt, new, at) in enumerate(sizes)]
    loop = Loop(config, arrivals, VerifyingExecutor(4))

    def check() -> None:
        manager = loop.manager
        scheduler_of(manager).kv_cache.check_consistency()
        for request in scheduler_of(manager).active.generation:
            cached = request.prompt_len + request.num_generated - 1
            assert scheduler_of(manager).kv_cache.registered[request.slot] == cached, (
                "a rejected draft is still in the cache"
            )

    while (
        loop.client.waiting
        or len(scheduler_of(loop.manager).active)
        or len(loop.manager.scheduler.waiting)
        or loop.client.now == 0
    ):
        loop.step()
        check()
    for _, request in arrivals:
        assert loop.result.tokens(request) == output_of(request, request.output_len)
    assert scheduler_of(loop.manager).kv_cache.num_used == 0


def test_a_step_yields_the_accepted_drafts_and_one_token():
    request = with_tokens(Request(3, 6, 20))
    loop = Loop(drafted(), [(0, request)], executor := VerifyingExecutor(4))
    run = loop.run()
    assert run.tokens(request) == output_of(request, 20)
    assert len(run.records) < 20
    drafts = [record.drafts for record in run.records if record.drafts is not None]
    assert sum(one.accepted for one in drafts) == sum(executor.accepted) == 20 - len(run.records)
    assert request.accepted_drafts == 20 - len(run.records)
    assert request.num_drafted == sum(one.drafted for one in drafts) > request.accepted_drafts
    assert all(one.requests == 1 for one in drafts)


def test_drafts_leave_room_for_the_token_of_the_model_itself():
    request = with_tokens(Request(0, 4, 4))
    spy = SpyExecutor(VerifyingExecutor(4))
    Loop(drafted(max_len=9), [(0, request)], spy).run()
    assert next(int(batch.drafts.counts[0]) for batch in spy.batches if batch.drafts is not None) == 2


def test_an_end_token_among_accepted_drafts_ends_the_request_there():
    request = Request(1, 5, 30)
    end = token_of(request, 5 + 7)
    request = with_tokens(Request(1, 5, 30, stop=StopConditions(end_tokens=(end,))))
    run = Loop(drafted(max_len=6), [(0, request)], VerifyingExecutor(4)).run()
    assert run.tokens(request) == output_of(request, 8)
    assert scheduler_of(run.manager).kv_cache.num_used == 0


def test_a_stop_sequence_among_accepted_drafts_ends_the_request_there():
    request = Request(1, 5, 30)
    words = (tuple(token_of(request, 5 + at) for at in (8, 9)),)
    request = with_tokens(Request(1, 5, 30, stop=StopConditions(stop_sequences=words)))
    run = Loop(drafted(max_len=6), [(0, request)], VerifyingExecutor(4)).run()
    assert run.tokens(request) == output_of(request, 10)


def test_streaming_sends_all_tokens_of_a_step_together():
    request = with_tokens(Request(1, 5, 15, options=OutputOptions(streaming=True)))
    run = Loop(drafted(max_len=3), [(0, request)], VerifyingExecutor(4)).run()
    pieces = run.pieces(request)
    assert run.tokens(request) == output_of(request, 15)
    assert max(map(len, pieces)) > 1
    assert len([piece for piece in pieces if piece]) == len(run.records)


def test_draft_tokens_count_in_the_token_budget():
    """Requests of 1 + 4 tokens a step: two of them fit 12 tokens, where without drafts all three would."""
    requests = [with_tokens(Request(index, 3, 12)) for index in range(3)]
    config = dataclasses.replace(drafted(policy="guaranteed_no_evict"), max_num_tokens=12)
    run = Loop(config, [(0, request) for request in requests], VerifyingExecutor(4)).run()
    assert all(record.budget_used <= 12 for record in run.records)
    steady = next(record for record in run.records if not record.context and record.num_generation)
    assert steady.num_generation == 2
    assert len(steady.held) == 1
    assert steady.left_out is not None
    assert steady.left_out.limit == "num_tokens"


def test_client_drafts_are_verified_with_the_last_chunk():
    plain = Request(2, 6, 9)
    right = output_of(plain, 9)
    request = with_client_drafts(plain, [*right[:2], WRONG, right[3]])
    run = Loop(dataclasses.replace(CONFIG), [(0, request)], VerifyingExecutor(4)).run()
    assert run.tokens(request) == right
    first, *others = run.records
    assert first.drafts is not None
    assert (first.drafts.drafted, first.drafts.accepted) == (4, 2)
    assert first.budget_used == 6 + 4
    assert len(others) == 9 - 3
    assert all(record.drafts is None for record in others)


def test_client_drafts_are_cut_to_the_room_in_the_last_unit_of_a_chunk():
    """Not all fits: 7 tokens of an 8-token unit leave room for one draft, and none where the chunk fills its unit."""
    config = dataclasses.replace(CONFIG, max_num_tokens=24, chunk_unit=8, tokens_per_block=8)
    for prompt_len, expected in ((7, 1), (8, 0)):
        request = with_client_drafts(Request(0, prompt_len, 9), output_of(Request(0, prompt_len, 9), 3))
        other = with_tokens(Request(1, 40, 2))
        spy = SpyExecutor(VerifyingExecutor(8))
        loop = Loop(config, [(0, request), (0, other)], spy)
        run = loop.run()
        drafts = spy.batches[0].drafts
        assert (0 if drafts is None else int(drafts.counts.max())) == expected
        assert run.tokens(request) == output_of(request, 9)


@pytest.mark.parametrize(
    ("changes", "options", "error"),
    [
        ({"batching_type": BatchingType.V1}, {}, "static batches"),
        ({"overlap": Overlap.ASYNC}, {}, "overlap"),
        ({"overlap": Overlap.PARTITIONED}, {}, "overlap"),
        ({"pp_size": 2}, {}, "pipeline stages"),
        ({"vocab_size": 4_000}, {}, "not in the vocabulary"),
        ({"vocab_size": 6_000}, {"draft_logits": np.zeros((1, 6_000), np.float32)}, r"\[1, 6000\]: expected \[2,"),
    ],
)
def test_client_drafts_are_refused_where_they_cannot_be_verified(changes, options, error):
    request = with_client_drafts(Request(0, 4, 9), [1, WRONG], **options)
    config = dataclasses.replace(CONFIG, **changes)
    run = Loop(config, [(0, request)], NullExecutor()).run()
    assert run.final(request).error is not None
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(run.final(request).error)


def test_beams_and_drafts_exclude_each_other():
    request = Request(0, 4, 9, beam_width=2, options=OutputOptions(draft_input_ids=np.array([1], np.int32)))
    config = dataclasses.replace(CONFIG, max_beam_width=2)
    run = Loop(config, [(0, with_tokens(request))], NullExecutor()).run()
    assert "beam width of 2" in (run.final(request).error or "")
    with pytest.raises(ValueError, match="beam widths"):
        dataclasses.replace(drafted(), max_beam_width=2)


def test_settings_that_cannot_have_drafts_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        drafted(overlap=Overlap.ASYNC)
    with pytest.raises(ValueError, match="static"):
        drafted(batching_type=BatchingType.V1, chunk_unit=None)


# The acceptance model of executors that make no tokens.


def acceptance_run(
    acceptance: tuple[float, ...], policy: str = "guaranteed_no_evict", num_blocks: int = 2_000, seed: int = 0
):
    config = dataclasses.replace(
        CONFIG,
        policy=policy,
        num_blocks=num_blocks,
        max_seq_len=500,
        max_input_len=499,
        drafts=DraftSettings(4, acceptance=acceptance, seed=seed),
    )
    requests = [Request(index, 10, 300) for index in range(4)]
    return requests, Loop(config, [(0, request) for request in requests], NullExecutor()).run()


def test_the_acceptance_rate_gives_the_expected_tokens_per_step():
    requests, run = acceptance_run((0.8, 0.5, 0.25))
    drafts = [record.drafts for record in run.records if record.drafts is not None]
    steps, accepted = sum(one.requests for one in drafts), sum(one.accepted for one in drafts)
    expected = 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.25 + 0.8 * 0.5 * 0.25 * 0.25
    assert accepted / steps == pytest.approx(expected, abs=0.1)
    assert all(request.has_left and request.accepted_drafts for request in requests)


def test_acceptance_depends_on_seed_request_and_position_alone():
    accepted = []
    for policy, num_blocks, seed in (
        ("guaranteed_no_evict", 2_000, 0),
        ("max_utilization", 2_000, 0),
        ("guaranteed_no_evict", 100, 0),
        ("guaranteed_no_evict", 2_000, 1),
    ):
        requests, _ = acceptance_run((0.7,), policy, num_blocks, seed)
        accepted.append([request.accepted_drafts for request in requests])
    assert accepted[0] == accepted[1] == accepted[2] != accepted[3]
    assert len(set(accepted[0])) > 1


@pytest.mark.parametrize(("rate", "steps"), [((1.0,), 61), ((0.0,), 300)])
def test_certain_acceptance(rate, steps):
    _, run = acceptance_run(rate)
    assert len(run.records) == steps


# Prompt look-up.


@pytest.mark.parametrize(
    ("sequence", "max_ngram", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, 3, [3, 9, 1]),
        ([1, 2, 3, 9, 1, 2], 3, 1, [3]),
        ([5, 2, 7, 1, 2, 8, 1, 2], 1, 2, [7, 1]),  # the first match of one token
        ([5, 2, 7, 1, 2, 8, 1, 2], 2, 2, [8, 1]),  # of two tokens
        ([4, 4, 4, 4], 2, 3, [4, 4]),
        ([1, 2, 3], 2, 4, []),
        ([1], 2, 4, []),
    ],
)
def test_prompt_look_up(sequence, max_ngram, count, expected):
    assert continuation(np.array(sequence, np.int32), max_ngram, count).tolist() == expected
