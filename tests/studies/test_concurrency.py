"""How many requests run at once, compared with counting by hand and with the engine."""

import dataclasses
from typing import Any

import pytest

from ifbbench.engine.plan import Limit
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import TOKENS_ONLY
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.modes import BatchingType
from ifbbench.studies.capacity import POLICY_CASES, Fit, PolicyCase, admit, contiguous_fit, fit
from ifbbench.workload.trace import TraceRequest
from tests.engine import engine

GUARANTEED, AT_START, AT_END, STATIC = POLICY_CASES


def limits(**changes: Any) -> BatchingConfig:
    """An engine with ample room, but for `changes`."""
    ample = BatchingConfig(
        policy="guaranteed_no_evict",
        max_batch_size=2048,
        max_num_tokens=8192,
        max_seq_len=20_000,
        max_input_len=8192,
        tokens_per_block=32,
        num_blocks=7319,
    )
    return dataclasses.replace(ample, **changes)


def request(prompt_len: int, output_len: int, reserved: int | None = None, beam_width: int = 1) -> TraceRequest:
    """A request that reserves its output length by default."""
    return TraceRequest(0, 0.0, prompt_len, reserved or output_len, output_len, beam_width=beam_width)


def fit_of(case: PolicyCase, one: TraceRequest, config: BatchingConfig) -> Fit:
    return fit(case, [one], config, config.pools)


def refusal(one: TraceRequest, config: BatchingConfig) -> str | None:
    """Why the engine refuses `one`, or None."""
    _, refusals = admit([one], config, TOKENS_ONLY)
    return refusals[0] if refusals else None


def test_the_known_case():
    found = {case: fit_of(case, request(1096, 211, 7000), limits()) for case in POLICY_CASES}
    assert {case: int(fit.mean_blocks) for case, fit in found.items()} == {
        GUARANTEED: 253,
        AT_START: 35,
        AT_END: 41,
        STATIC: 253,
    }
    assert {case: fit.at_once for case, fit in found.items()} == {GUARANTEED: 28, AT_START: 209, AT_END: 178, STATIC: 7}
    assert found[GUARANTEED].bound_by is Limit.KV_BLOCKS
    assert found[STATIC].bound_by is Limit.NUM_TOKENS


@pytest.mark.parametrize(
    ("changes", "at_once", "bound_by"),
    [
        ({"max_batch_size": 28}, 28, Limit.BATCH_SIZE),  # As the policies, which count requests before blocks.
        ({"max_batch_size": 5}, 5, Limit.BATCH_SIZE),
        ({"max_num_tokens": 1100}, 5, Limit.NUM_TOKENS),  # 4 tokens beside the last prompt
        ({"max_num_tokens": 1100, "chunk_unit": 32}, 28, Limit.KV_BLOCKS),
        # A prompt takes 35 iterations, so that six others generate their 211 tokens meanwhile.
        ({"max_num_tokens": 40, "chunk_unit": 32}, 7, Limit.NUM_TOKENS),
    ],
)
def test_the_tightest_limit_binds(changes, at_once, bound_by):
    found = fit_of(GUARANTEED, request(1096, 211, 7000), limits(**changes))
    assert (found.at_once, found.bound_by) == (at_once, bound_by)


def test_beams_share_full_prompt_blocks_and_take_a_token_each():
    config = limits(max_beam_width=4, max_num_tokens=100)
    found = fit_of(GUARANTEED, request(64, 32, beam_width=4), config)
    assert found.mean_blocks == 2 + 4
    assert found.by_limit[Limit.NUM_TOKENS] == 1 + (100 - 64) // 4


def test_a_trace_is_packed_in_its_order():
    requests = [request(32, 32), request(3200, 32), request(32, 32)]
    config = limits(num_blocks=105)
    found = fit(GUARANTEED, requests, config, config.pools)
    assert found.mean_blocks == pytest.approx((2 + 101 + 2) / 3)
    assert (found.at_once, found.first) == (3, 3)
    config = limits(num_blocks=102)
    assert fit(GUARANTEED, requests, config, config.pools).first == 1, "those behind one that does not fit wait"
    config = limits(max_num_tokens=3200)
    assert fit(GUARANTEED, requests, config, config.pools).first == 1, "no room for the prompt beside the token"
    assert fit(STATIC, requests, limits(max_num_tokens=3232), limits().pools).first == 2
    assert fit(GUARANTEED, requests, limits(max_batch_size=2), limits().pools).first == 2


def test_the_window_with_the_least_room_binds():
    short, long = (AttentionWindow(32, window, 20_000) for window in (64, 20_000))
    found = fit(GUARANTEED, [request(320, 320)], limits(), ((long, 1000), (short, 10)))
    assert found.mean_blocks == 2 + 20
    assert found.by_limit[Limit.KV_BLOCKS] == 10 // 2


def test_a_contiguous_cache_has_room_for_the_longest_sequence_of_each():
    config = limits(max_seq_len=3200, max_beam_width=2, num_blocks=1000)
    kv_bytes = 1000 * 32 * 100
    found = contiguous_fit(config, kv_bytes, bytes_per_token=100)
    assert (found.positions, found.bytes_per_request, found.fit) == (6400, 640_000, 5)
    assert contiguous_fit(dataclasses.replace(config, max_batch_size=3), kv_bytes, 100).at_once == 3


def test_requests_that_an_engine_refuses():
    config = limits(max_seq_len=3200, max_input_len=1000, num_blocks=50)
    assert refusal(request(1000, 600), config) is None
    assert "51 KV cache blocks" in str(refusal(request(1000, 601), config))
    assert "max_input_len" in str(refusal(request(1001, 1), config))
    assert "max_beam_width" in str(refusal(request(10, 1, beam_width=2), config))


def test_a_contiguous_cache_refuses_nothing_for_its_blocks():
    config = limits(max_seq_len=3200, max_input_len=1000, num_blocks=1, is_contiguous=True)
    assert refusal(request(1000, 600), config) is None


def test_new_tokens_end_at_max_seq_len():
    ((clamped,), _) = admit([request(1000, 50, 5000)], limits(max_seq_len=1040), TOKENS_ONLY)
    assert (clamped.max_new_tokens, clamped.output_len) == (40, 40)


# What the engine does with many such requests, all there from the start.


def run_many(config: BatchingConfig, one: TraceRequest, count: int) -> engine.Run:
    requests = [Request(index, one.prompt_len, one.max_new_tokens, output_len=one.output_len) for index in range(count)]
    run, _ = engine.checked_run(config, *requests)
    assert len(run.completed) == count
    return run


def max_at_once(run: engine.Run) -> int:
    return max(record.num_generation + len(record.context) + record.idle for record in run.records)


SMALL: dict[str, Any] = {
    "max_batch_size": 10,
    "max_num_tokens": 60,
    "max_seq_len": 200,
    "max_input_len": 60,
    "tokens_per_block": 4,
    "num_blocks": 100,
}
CASES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 90},
    {"num_blocks": 60},
    {"max_batch_size": 3},
    {"max_num_tokens": 14, "max_input_len": 14},
    {"max_num_tokens": 12, "max_input_len": 12},
    {"max_num_tokens": 6, "chunk_unit": 4},
    {"max_num_tokens": 45, "num_blocks": 400, "max_batch_size": 40},
]


@pytest.mark.parametrize("changes", CASES)
def test_the_engine_runs_the_predicted_number_under_guaranteed_no_evict(changes):
    config = limits(**SMALL | changes)
    one = request(10, 60, 80)
    assert max_at_once(run_many(config, one, 50)) == fit_of(GUARANTEED, one, config).at_once


@pytest.mark.parametrize("changes", [changes for changes in CASES if "chunk_unit" not in changes])
@pytest.mark.parametrize("batching", [{"policy": "static_batch"}, {"batching_type": BatchingType.V1}])
def test_the_engine_runs_the_predicted_number_in_a_static_batch(changes, batching):
    config = limits(**SMALL | changes | batching)
    one = request(10, 6, 9)
    assert max_at_once(run_many(config, one, 50)) == fit_of(STATIC, one, config).at_once


def test_a_prompt_that_is_cut_waits_for_the_first_static_batch_to_end():
    config = limits(**SMALL | {"policy": "static_batch", "max_num_tokens": 25, "chunk_unit": 4})
    one = request(10, 6, 9)
    assert run_many(config, one, 50).records[1].num_generation == fit_of(STATIC, one, config).at_once == 2


@pytest.mark.parametrize(("prompt_len", "output_len"), [(10, 20), (8, 1), (8, 2), (9, 40), (12, 17)])
def test_max_utilization_pauses_none_of_the_requests_that_fit_at_their_end(prompt_len, output_len):
    config = limits(**SMALL | {"policy": "max_utilization", "max_batch_size": 90, "max_num_tokens": 1000})
    one = request(prompt_len, output_len, 50)
    at_once = fit_of(AT_END, one, config).at_once
    assert fit_of(AT_END, one, config).bound_by is Limit.KV_BLOCKS
    assert not any(record.paused for record in run_many(config, one, at_once).records)
    more = run_many(config, one, at_once + 1)
    if at_once < fit_of(AT_START, one, config).at_once:
        assert any(record.paused for record in more.records)
    else:
        assert max_at_once(more) == at_once


def test_max_utilization_starts_the_requests_whose_prompts_fit():
    config = limits(**SMALL | {"policy": "max_utilization", "max_batch_size": 90, "max_num_tokens": 1000})
    one = request(10, 20)
    run = run_many(config, one, 50)
    assert len(run.records[0].context) == fit_of(AT_START, one, config).at_once == 33
