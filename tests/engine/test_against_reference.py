"""The schedulers and their literal transcription decide alike, whatever the requests, the pool and the limits."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st

from ifbbench.engine.request import Request, RequestTable
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import Sequence
from ifbbench.schedulers.tensorrt_llm.active import ActiveRequests
from ifbbench.schedulers.tensorrt_llm.chunks import ChunkLimits
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES, CapacityDecision, LoraLimits
from tests.conformance.microbatch import limit_of
from tests.drawing import holds
from tests.engine import reference

MAX_SEQ_LEN = 40


@dataclass(frozen=True)
class Standing:
    """A request and where it stands: `position` prompt tokens computed, `generated` tokens made."""

    prompt_len: int
    max_new_tokens: int
    position: int
    generated: int
    drafts: int
    beam_width: int
    lora: int | None
    priority: float

    @property
    def started(self) -> bool:
        return self.position > 0


@st.composite
def standings(draw) -> Standing:
    prompt_len = draw(st.integers(1, 20))
    max_new_tokens = draw(st.integers(2, MAX_SEQ_LEN - prompt_len))
    phase = draw(st.sampled_from(["waiting", "chunked", "generation", "generation"]))
    position, generated = 0, 0
    if phase == "chunked" and prompt_len > 1:
        position = draw(st.integers(1, prompt_len - 1))
    if phase == "generation":
        position, generated = prompt_len, draw(st.integers(1, max_new_tokens - 1))
    drafts = draw(st.sampled_from([0, 0, 0, 1, 3, 9]))
    beam_width = draw(st.sampled_from([1, 1, 1, 2]))
    lora = draw(st.sampled_from([None, None, 1, 2, 3]))
    priority = draw(st.sampled_from([0.2, 0.5, 0.9]))
    return Standing(prompt_len, max_new_tokens, position, generated, drafts, beam_width, lora, priority)


attention_windows = st.builds(
    AttentionWindow,
    tokens_per_block=st.integers(1, 6),
    size=st.sampled_from([MAX_SEQ_LEN, MAX_SEQ_LEN, 12, 7]),
    max_seq_len=st.just(MAX_SEQ_LEN),
    sink=st.sampled_from([0, 0, 3]),
    max_beam_width=st.just(2),
)


def stand_up(
    requests: list[Standing], attention_window: AttentionWindow, spare: int
) -> tuple[ActiveRequests, KvCacheManager]:
    """The requests in the engine's own structures, in a pool with `spare` blocks besides those that they hold."""
    roomy = KvCacheManager(attention_window, 10_000, slots=len(requests))
    _enter(requests, roomy)
    cache = KvCacheManager(attention_window, roomy.num_blocks - roomy.free_blocks + spare, slots=len(requests))
    return _enter(requests, cache), cache


def _enter(requests: list[Standing], cache: KvCacheManager) -> ActiveRequests:
    active = ActiveRequests(RequestTable(len(requests)))
    for request_id, standing in enumerate(requests):
        request = Request(
            request_id,
            standing.prompt_len,
            standing.max_new_tokens,
            priority=standing.priority,
            beam_width=standing.beam_width,
            lora_task_id=standing.lora,
            num_draft_tokens=standing.drafts,
        )
        active.add(request)
        if not standing.started:
            continue
        cache.add_request(request)
        request.set_chunk(standing.position)
        request.advance_context()
        if standing.generated:
            request.start_generation()
            active.move_to_generation(request)
            active.table.generated[request.slot] = standing.generated
            for _ in range(standing.generated - 1):
                cache.add_tokens(np.array([request.slot]))
    return active


def entries_of(active: ActiveRequests, cache: KvCacheManager) -> list[reference.Entry]:
    """The same requests as plain data."""
    return [_entry(request, cache.sequences.get(request.slot)) for request in active]


def _entry(request: Request, sequence: Sequence | None) -> reference.Entry:
    beams = sequence.beams if sequence else [[]]
    return reference.Entry(
        request.request_id,
        request.in_context,
        request.prompt_len,
        request.max_new_tokens,
        position=request.position,
        generated=request.num_generated,
        drafts=request.num_draft_tokens,
        beam_width=request.beam_width,
        lora=request.lora_task_id,
        blocks=[block for beam in beams for block in beam],
        blocks_per_beam=len(beams[0]),
    )


def ids(requests) -> list[int]:
    return [request.request_id for request in requests]


def fitting_order(active: ActiveRequests, decision: CapacityDecision) -> list[int]:
    """All that a decision lets run, in the order in which the micro-batch scheduler considers them."""
    out = set(ids(decision.held)) | {pause.victim.request_id for pause in decision.paused}
    generation = [request for request in active.generation if request.request_id not in out]
    if decision.generation_first:
        return ids(generation + decision.admitted)
    return ids(sorted(generation + decision.admitted, key=lambda request: request.order))


def check_capacity(policy, requests, attention_window, spare, limit, lora):
    active, cache = stand_up(requests, attention_window, spare)
    plain = reference.Cache(
        attention_window.tokens_per_block,
        attention_window.size,
        MAX_SEQ_LEN,
        attention_window.max_beam_width,
        attention_window.sink,
        cache.free_blocks,
    )
    expected = reference.POLICIES[policy](entries_of(active, cache), plain, reference.Limits(limit, *lora))
    decision = POLICY_CLASSES[policy](limit, LoraLimits(*lora)).schedule(active, cache)
    assert [pause.victim.request_id for pause in decision.paused] == ids(expected.paused)
    assert fitting_order(active, decision) == ids(expected.requests)
    running = {entry.request_id for entry in expected.requests + expected.paused}
    assert sorted(ids(decision.held)) == sorted(set(ids(active.generation)) - running)


capacity_cases = {
    "requests": st.lists(standings(), min_size=1, max_size=9),
    "attention_window": attention_windows,
    "spare": st.integers(0, 25),
    "limit": st.integers(1, 10),
    "lora": st.sampled_from([(0, 0), (1, 1), (2, 5), (1, 3)]),
}


@pytest.mark.parametrize("policy", POLICY_CLASSES)
@holds(80, 5_000, **capacity_cases)
def test_capacity_policies(policy, requests, attention_window, spare, limit, lora):
    check_capacity(policy, requests, attention_window, spare, limit, lora)


batch_limits = st.builds(
    reference.BatchLimits,
    max_batch_size=st.integers(1, 10),
    max_num_tokens=st.one_of(st.none(), st.integers(1, 60)),
    chunking_policy=st.sampled_from([None, "first_come_first_served", "equal_progress"]),
    unit=st.integers(1, 8),
    longest=st.one_of(st.none(), st.integers(1, 25)),
)


def check_micro_batch(requests, policy, spare, limits, in_flight):
    if limits.chunking_policy is None:
        # Without chunking a prompt is computed at once.
        requests = [request for request in requests if request.position in (0, request.prompt_len)]
    active, cache = stand_up(requests, AttentionWindow(4, MAX_SEQ_LEN, MAX_SEQ_LEN, max_beam_width=2), spare)
    decision = POLICY_CLASSES[policy](8).schedule(active, cache)
    entries = {entry.request_id: entry for entry in entries_of(active, cache)}
    order = fitting_order(active, decision)
    expected = reference.micro_batch([entries[request_id] for request_id in order], in_flight, limits)
    scheduler = MicroBatchScheduler(
        limits.max_batch_size,
        limit_of(limits.max_num_tokens),
        limits.chunking_policy,
        ChunkLimits(limits.unit, limit_of(limits.longest)),
    )
    for request in active:
        if request.request_id in in_flight:
            active.table.micro_batch[request.slot] = 1
    active.table.begin_turn(0)
    selected = scheduler.schedule(active, decision)
    assert {item.request_id: item.chunk for item in selected.context} == {
        entry.request_id: entry.chunk for entry in expected.context
    }
    fitting_generation = {request_id for request_id in order if not entries[request_id].in_context} - in_flight
    assert sorted(ids(selected.held)) == sorted(fitting_generation - set(ids(expected.generation)))
    assert {item.request_id: item.num_draft_tokens for item in active} == {
        request_id: entry.drafts for request_id, entry in entries.items()
    }
    finishing = [item.is_last_chunk for item in selected.context]
    assert finishing == sorted(finishing) or sum(item.chunk < item.remaining_context for item in selected.context) == 0


micro_batch_cases = {
    "requests": st.lists(standings(), max_size=9),
    "policy": st.sampled_from(sorted(POLICY_CLASSES)),
    "spare": st.integers(0, 40),
    "limits": batch_limits,
    "in_flight": st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 8))),
}


@holds(150, 10_000, **micro_batch_cases)
def test_micro_batches(requests, policy, spare, limits, in_flight):
    check_micro_batch(requests, policy, spare, limits, in_flight)
