"""The KV cache of a run: which layers share a window, how many blocks each gets, and the limits made of it."""

import dataclasses

import pytest

from ifbbench.build.resolve import batching_config, cache_layout, kv_value_bytes, parse_windows, resolve_limits
from ifbbench.errors import InputError
from ifbbench.kv.contiguous import ContiguousCache
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sizing import CacheLayout
from ifbbench.kv.variable_window import VariableWindowCache
from ifbbench.models.config import ModelConfig
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig

TINY = ModelConfig.tiny()
BYTES_PER_TOKEN = 4096  # float32, all four layers


def layout_of(memory_bytes: int | None = None, model: ModelConfig = TINY, **settings) -> CacheLayout:
    config = RunConfig(**{"max_seq_len": 256, "max_batch_size": 3, **settings})
    return cache_layout(resolve_limits(config, 256, on_cpu=True), model, memory_bytes)


def limits_of(**settings) -> BatchingConfig:
    config = resolve_limits(RunConfig(**{"max_seq_len": 256, "max_batch_size": 3, **settings}), 256, on_cpu=True)
    return batching_config(config, cache_layout(config, TINY, None), vocab_size=512)


# Windows.


def layers_of(layout: CacheLayout) -> dict[int, tuple[int, ...]]:
    return {window.attention_window.size: window.layers for window in layout.windows}


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        (None, {256: (0, 1, 2, 3)}),
        ("100", {100: (0, 1, 2, 3)}),
        ("100,20", {100: (0, 2), 20: (1, 3)}),
        ("20,100", {100: (1, 3), 20: (0, 2)}),
        ("20,100,20", {100: (1,), 20: (0, 2, 3)}),
        ("20,20", {20: (0, 1, 2, 3)}),
        ("9,8,7,6,5", {9: (0,), 8: (1,), 7: (2,), 6: (3,)}),
        ("256", {256: (0, 1, 2, 3)}),
        ("999,777", {256: (0, 1, 2, 3)}),
        ("999,10", {256: (0, 2), 10: (1, 3)}),
    ],
)
def test_windows_go_round_the_layers_longest_first(text, layers):
    found = layers_of(layout_of(max_attention_window=text))
    assert found == layers
    assert list(found) == sorted(found, reverse=True)


def test_the_models_own_window_where_none_is_asked_for():
    mistral = dataclasses.replace(TINY, sliding_window=60)
    assert list(layers_of(layout_of(model=mistral))) == [60]
    assert list(layers_of(layout_of(model=mistral, max_attention_window="50"))) == [50]


def test_neither_windows_nor_sequences_exceed_the_model():
    mistral = dataclasses.replace(TINY, sliding_window=60)
    with pytest.raises(InputError, match=r"61 is more than the sliding window of model tiny; expected at most 60"):
        layout_of(model=mistral, max_attention_window="61")
    with pytest.raises(InputError, match=r"--max_seq_len: 257 is more than the 256 positions of model tiny"):
        layout_of(max_seq_len=257)


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        (None, ()),
        ("512", (512,)),
        ("512,1024", (512, 1024)),
        (" 512, 1024 ", (512, 1024)),
        ("[512, 8]", (512, 8)),
        ("(7,)", None),
        ("", None),
        ("0", None),
        ("-1", None),
        ("1.5", None),
        ("512;8", None),
        ("many", None),
        ("512,", None),
        ("9" * 10, None),
    ],
)
def test_windows_as_texts(text, windows):
    if windows is not None:
        assert parse_windows(text) == windows
        return
    with pytest.raises(InputError, match=r"--max_attention_window(: | is ).*; expected a (number of tokens|text)"):
        layout_of(max_attention_window=text)


def test_sink_tokens_only_where_the_window_is_shorter_than_a_sequence():
    long, short = layout_of(max_attention_window="999,20", sink_token_len=5).windows
    assert (long.attention_window.sink, short.attention_window.sink) == (0, 5)


@pytest.mark.parametrize(("windows", "sink"), [("20", 20), ("20,100", 20), (None, 256)])
def test_sink_tokens_leave_room_in_every_window(windows, sink):
    with pytest.raises(InputError, match=f"--sink_token_len: {sink} first tokens fill the attention window of"):
        layout_of(max_attention_window=windows, sink_token_len=sink)
    assert layout_of(max_attention_window=windows, sink_token_len=sink - 1)


@pytest.mark.parametrize(("mode", "blocks"), [("cyclic", 2), ("linear", 16)])
def test_a_linear_window_keeps_places_for_all_tokens(mode, blocks):
    (window,) = layout_of(max_attention_window="20", window_mode=mode, tokens_per_block=16).windows
    assert window.attention_window.is_cyclic == (mode == "cyclic")
    assert window.attention_window.max_blocks_per_sequence == blocks
    assert window.num_blocks == 3 * blocks, "a full batch"


# Blocks. 32 tokens each, 4096 bytes a token.


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({}, 3 * 8),
        ({"max_seq_len": 225}, 3 * 8),
        ({"max_seq_len": 224}, 3 * 7),
        ({"max_batch_size": 5, "beam_width": 2}, 5 * 2 * 8),
        ({"max_tokens_in_paged_kvcache": 64}, 2),
        ({"max_tokens_in_paged_kvcache": 65}, 3),
        ({"max_tokens_in_paged_kvcache": 10**6}, 31_250),
    ],
)
def test_without_memory_a_full_batch_fits_or_what_was_asked_for_rounded_up(settings, blocks, caplog):
    assert layout_of(**settings).windows[0].num_blocks == blocks
    assert caplog.messages == []


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (64, 2), (768, 24), (10**6, 24)])
def test_the_last_block_counts_though_memory_ends_within_it(tokens, blocks):
    assert layout_of(tokens * BYTES_PER_TOKEN).windows[0].num_blocks == blocks


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_a_simulated_device_has_the_blocks_of_all_its_memory(engine):
    """As a server has: blocks of prefixes, and of prompts on their way to a decode replica, outlive a full batch."""
    settings = {"device": "sim:h100-sxm", "engine": engine, "tokens_per_block": 32}
    null_block = engine == "vllm"
    memory_bytes = (1000 + null_block) * 32 * BYTES_PER_TOKEN
    assert layout_of(memory_bytes, **settings).windows[0].num_blocks == 1000
    assert layout_of(memory_bytes, **settings, max_tokens_in_paged_kvcache=640).windows[0].num_blocks == 20


def test_what_was_asked_for_yields_to_memory_with_a_warning(caplog):
    assert layout_of(100 * BYTES_PER_TOKEN, max_tokens_in_paged_kvcache=128).windows[0].num_blocks == 4
    assert caplog.messages == []
    assert layout_of(100 * BYTES_PER_TOKEN, max_tokens_in_paged_kvcache=129).windows[0].num_blocks == 4
    assert caplog.messages == ["--max_tokens_in_paged_kvcache 129: memory has room for 4 blocks of 32 tokens only."]


def test_no_warning_where_a_default_yields_to_memory(caplog):
    layout_of(100 * BYTES_PER_TOKEN)
    assert caplog.messages == []


@pytest.mark.parametrize(("num_bytes", "blocks"), [(0, 0), (32 * 4096 - 1, 0), (32 * 4096, 1), (10**6, 7)])
def test_host_blocks_are_whole(num_bytes, blocks):
    (window,) = layout_of(kv_host_cache_bytes=num_bytes).windows
    assert (window.num_blocks, window.num_host_blocks) == (24, blocks)


@pytest.mark.parametrize(
    ("tokens", "long", "short"), [(100, 160, 40), (240, 384, 96), (480, 3 * 256, 3 * 64), (9999, 3 * 256, 3 * 64)]
)
def test_windows_share_memory_by_what_a_full_one_takes(tokens, long, short):
    """Half of the layers each, so a token of a window takes half of `BYTES_PER_TOKEN`."""
    layout = layout_of(tokens * BYTES_PER_TOKEN, max_attention_window="64,256", tokens_per_block=1)
    assert [window.num_blocks for window in layout.windows] == [long, short]


def test_a_size_in_tokens_is_that_of_each_window():
    long, short = layout_of(max_attention_window="64,256", max_tokens_in_paged_kvcache=100).windows
    assert (long.num_blocks, short.num_blocks) == (4, 4)


@pytest.mark.parametrize(
    ("settings", "size"),
    [({}, 4), ({"dtype": "bf16"}, 2), ({"kv_cache_dtype": "fp16"}, 2), ({"dtype": "bf16", "kv_cache_dtype": "fp8"}, 1)],
)
def test_smaller_values_make_more_blocks(settings, size):
    assert kv_value_bytes(RunConfig(**settings)) == size
    assert layout_of(32 * BYTES_PER_TOKEN, **settings).windows[0].num_blocks == 4 // size


def test_no_room_for_a_block_is_told():
    with pytest.raises(InputError, match="no memory for a single KV cache block of 32 tokens; raise"):
        layout_of(0)


# The engine's limits.


def test_a_cache_without_windows():
    limits = limits_of(enable_kv_cache_reuse=True, copy_on_partial_reuse=False, kv_host_cache_bytes=10**6)
    assert (limits.num_blocks, limits.num_host_blocks, limits.windows) == (24, 7, ())
    assert (limits.reuse.enabled, limits.reuse.partial, limits.reuse.copy_partial) == (True, True, False)
    assert limits.pools == ((limits.attention_window, 24),)
    assert isinstance(limits.make_cache(), KvCacheManager)


def test_one_window():
    limits = limits_of(max_attention_window="40", sink_token_len=4, kv_host_cache_bytes=10**6)
    (window,) = limits.windows
    assert limits.attention_window == window.attention_window
    assert limits.pools == ((window.attention_window, 3 * 3),)
    cache = limits.make_cache()
    assert isinstance(cache, KvCacheManager)
    assert (cache.num_blocks, limits.num_host_blocks) == (9, 7)


def test_several_windows():
    limits = limits_of(max_attention_window="40,100")
    assert [window.attention_window.size for window in limits.windows] == [100, 40]
    assert [number for _, number in limits.pools] == [3 * 4, 3 * 2]
    cache = limits.make_cache()
    assert isinstance(cache, VariableWindowCache)
    assert cache.num_blocks == 18


def test_windows_as_long_as_a_sequence_are_none():
    assert limits_of(max_attention_window="256").windows == ()
    assert limits_of(max_attention_window="999,400").windows == ()


def test_a_contiguous_cache():
    limits = limits_of(kv_cache_type="contiguous", beam_width=2)
    assert limits.is_contiguous
    assert limits.pools == ()
    cache = limits.make_cache()
    assert isinstance(cache, ContiguousCache)
    assert (limits.num_slots, cache.num_blocks, cache.num_positions) == (3, 0, 3 * 2 * 256)
