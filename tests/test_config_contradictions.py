"""Settings that contradict each other are refused, and those that a batching type leaves no choice of are forced."""

import logging

import pytest

from ifbbench.build.resolve import batching_config, cache_layout, resolve_limits
from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import BatchingType
from ifbbench.settings.names import from_mapping


def resolved(trace_beam_width=1, **settings):
    return resolve_limits(RunConfig(**settings), 256, on_cpu=True, trace_beam_width=trace_beam_width)


def limits_of(config, vocab_size=None):
    return batching_config(config, cache_layout(config, ModelConfig.tiny(), memory_bytes=None), vocab_size)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_chunked_context": True, "context_chunk_unit": 48}, ["--context_chunk_unit: 48", "per_block 32"]),
        ({"overlap": "async", "max_beam_width": 2}, ["--enable_trt_overlap", "refused with beam width above 1"]),
        ({"enable_trt_overlap": True, "beam_width": 2}, ["--enable_trt_overlap", "refused with beam width above 1"]),
        ({"enable_trt_overlap": True, "max_beam_width": 2}, ["refused with beam width above 1"]),
        ({"enable_trt_overlap": True, "trace_beam_width": 2}, ["refused with beam width above 1"]),
        ({"max_beam_width": 2, "beam_width": 4}, ["--max_beam_width: 2", "--beam_width 4"]),
        ({"max_num_tokens": 3, "beam_width": 4}, ["--max_num_tokens: 3", "4 beams"]),
        ({"concurrency": 3, "static_emulated_batch_size": 4}, ["--concurrency", "--static_emulated_batch_size"]),
        ({"enable_chunked_context": True, "max_num_tokens": 31}, ["--max_num_tokens: 31", "chunk of 32"]),
        ({"device": "null", "return_log_probs": True}, ["--return_log_probs", "--device null"]),
        ({"device": "null", "return_context_logits": True}, ["--return_context_logits", "--device null"]),
        ({"device": "null", "return_generation_logits": True}, ["--return_generation_logits", "--device null"]),
        ({"policy": "first_come"}, ["--policy: 'first_come'", "guaranteed_no_evict"]),
        (
            {"kv_cache_type": "contiguous", "policy": "max_utilization"},
            ["--kv_cache_type contiguous", "policy max_utilization pauses for blocks"],
        ),
        ({"kv_cache_type": "contiguous", "enable_kv_cache_reuse": True}, ["--enable_kv_cache_reuse", "a paged cache"]),
        ({"kv_cache_type": "contiguous", "kv_host_cache_bytes": 10**6}, ["--kv_host_cache_bytes", "a paged cache"]),
        ({"kv_cache_type": "contiguous", "enable_chunked_context": True}, ["--enable_chunked_context", "paged cache"]),
        ({"max_attention_window": "9,99", "enable_kv_cache_reuse": True}, ["one attention window"]),
        ({"max_attention_window": "9,99", "kv_host_cache_bytes": 10**6}, ["one attention window"]),
        ({"max_attention_window": "9,x", "kv_host_cache_bytes": 10**6}, ["--max_attention_window: '9,x'"]),
    ],
)
def test_contradictions(settings, words):
    with pytest.raises(InputError) as caught:
        resolved(**settings)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("settings", "max_beam_width"),
    [
        ({}, 1),
        ({"beam_width": 3}, 3),
        ({"trace_beam_width": 4}, 4),
        ({"trace_beam_width": 4, "beam_width": 1}, 1),
        ({"max_beam_width": 5}, 5),
        ({"max_beam_width": 2, "trace_beam_width": 4}, 2),
    ],
)
def test_the_most_beams(settings, max_beam_width):
    assert resolved(**settings).max_beam_width == max_beam_width


def test_v1_forces_what_static_batches_need(caplog):
    config = resolved(
        type="v1",
        policy="max_utilization",
        enable_chunked_context=True,
        streaming=True,
        enable_trt_overlap=True,
        max_num_tokens=100,
    )
    assert config.overlap is None
    assert (config.type, config.policy) == ("v1", "guaranteed_no_evict")
    assert [config.enable_chunked_context, config.streaming, config.enable_trt_overlap] == [False, False, False]
    assert config.max_input_len == 255  # padded input has no token budget
    assert limits_of(config).max_num_tokens is None
    assert caplog.messages == [
        "--type v1 runs under policy guaranteed_no_evict, not max_utilization.",
        "--type v1 turns --enable_chunked_context off.",
        "--type v1 turns --streaming off.",
        "--type v1 turns --enable_trt_overlap off.",
    ]
    assert {(record.name, record.levelno) for record in caplog.records} == {("ifbbench", logging.WARNING)}


def test_v1_turns_reuse_off_and_so_takes_any_cache(caplog):
    config = resolved(type="v1", enable_kv_cache_reuse=True, kv_cache_type="contiguous", policy="max_utilization")
    assert (config.enable_kv_cache_reuse, config.kv_cache_type) == (False, "contiguous")
    assert "--type v1 turns --enable_kv_cache_reuse off." in caplog.messages


@pytest.mark.parametrize("settings", [{"type": "v1"}, {"streaming": True, "enable_trt_overlap": True}])
def test_no_warning_where_nothing_is_forced(settings, caplog):
    config = resolved(**settings)
    assert all(getattr(config, name) == value for name, value in settings.items())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("settings", "is_chunked"),
    [
        ({}, True),
        ({"max_num_tokens": 32}, True),
        ({"max_num_tokens": 31}, False),
        ({"max_num_tokens": 31, "context_chunk_unit": 16, "tokens_per_block": 16}, True),
        ({"max_num_tokens": "none"}, True),
        ({"type": "v1"}, False),
        ({"kv_cache_type": "contiguous"}, False),
    ],
)
def test_the_command_line_chunks_prompts_where_that_is_possible(settings, is_chunked, caplog):
    config = resolve_limits(from_mapping(settings, command_line=True), 256, on_cpu=True)
    assert config.enable_chunked_context is is_chunked
    assert config.max_input_len == (255 if is_chunked else min(255, config.max_num_tokens or 255))
    assert caplog.messages == []


def test_the_library_chunks_prompts_only_when_asked():
    assert from_mapping({}).enable_chunked_context is False
    assert resolved().enable_chunked_context is False


def test_the_engine_gets_every_limit():
    config = resolved(type="UIFB", beam_width=3, tokens_per_block=16, policy="MAX_UTILIZATION", max_batch_size=2)
    limits = limits_of(config, vocab_size=512)
    assert (limits.batching_type, limits.policy) == (BatchingType.INFLIGHT, "max_utilization")
    assert (limits.max_beam_width, limits.overlap, limits.vocab_size) == (3, None, 512)
    assert limits.num_blocks == 2 * 3 * 256 // 16
    assert limits_of(resolved(enable_trt_overlap=True)).overlap == "partitioned"
    assert limits_of(resolved(enable_trt_overlap=True, overlap="async")).overlap == "async"
    assert limits_of(resolved(overlap="async")).overlap == "async"
    assert limits_of(resolved(max_num_tokens=None)).max_num_tokens is None


@pytest.mark.parametrize("name", ["eos_id", "pad_id"])
def test_token_ids_beyond_the_vocabulary(name):
    config = resolved(**{name: 512})
    with pytest.raises(InputError, match=f"--{name}: 512 is not a token id of model tiny; expected at most 511"):
        limits_of(config, vocab_size=512)
    assert limits_of(config).vocab_size is None
