"""What the manager is made from: model, batching type, policy, beams and the optional parameters."""

import pytest

from ifbbench import BatchManager
from ifbbench.engine.passes import NullExecutor
from ifbbench.errors import InputError
from ifbbench.kv.sequence import ReuseRules
from ifbbench.settings.modes import BatchingType
from tests.library.client import Client
from tests.library.managers import prompt_of, request_of

SIZES = {"max_seq_len": 40, "max_tokens": 160}


def manager_with(
    executor_or_model=None,
    model_type="InflightFusedBatching",
    max_beam_width=1,
    policy="guaranteed_no_evict",
    client=None,
    **options,
) -> BatchManager:
    client = client or Client()
    return BatchManager(
        executor_or_model or NullExecutor(),
        model_type,
        max_beam_width,
        policy,
        client.get_inference_requests,
        client.send_response,
        optional_params=options,
        start=False,
    )


@pytest.mark.parametrize(
    ("spelling", "batching_type"),
    [
        ("V1", BatchingType.V1),
        ("v1", BatchingType.V1),
        ("InflightBatching", BatchingType.INFLIGHT),
        ("UIFB", BatchingType.INFLIGHT),
        ("uifb", BatchingType.INFLIGHT),
        ("inflight", BatchingType.INFLIGHT_FUSED),
        ("InflightFusedBatching", BatchingType.INFLIGHT_FUSED),
        ("IFB", BatchingType.INFLIGHT_FUSED),
        ("ifb", BatchingType.INFLIGHT_FUSED),
        ("inflight-fused", BatchingType.INFLIGHT_FUSED),
    ],
)
def test_the_batching_type_has_many_names(spelling, batching_type):
    assert manager_with(model_type=spelling, **SIZES).config.batching_type is batching_type


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model_type": "V2"}, "--type is 'V2'; expected one of v1, inflight_unfused, inflight_fused"),
        ({"policy": "first_come"}, "first_come"),
        ({"policy": "no.such.module:Policy"}, "no.such.module"),
        ({"max_beam_width": 0}, "--max_beam_width is 0; expected"),
        ({"max_beam_width": 2, "enable_trt_overlap": True}, "--enable_trt_overlap: refused with beam width above 1"),
        ({"max_batch_size": 0}, "--max_batch_size is 0; expected"),
        ({"max_tokns": 100}, "'max_tokns' is not a setting. Did you mean"),
        ({"kv_cache_config": {"free_gpu_mem": 0.5}}, "Did you mean kv_cache_free_gpu_mem_fraction"),
        ({"kv_cache_config": {"max_tokens": "many"}}, "--max_tokens_in_paged_kvcache is 'many'; expected"),
        ({"kv_cache_config": 160}, "kv_cache_config: expected a mapping of its settings, not int"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "--kv_cache_free_gpu_mem_fraction is 1.5; expected"),
        (
            {"kv_cache_config": {"max_attention_window": "12 tokens"}},
            "--max_attention_window: '12 tokens' is not valid",
        ),
        ({"kv_cache_config": {"sink_token_length": 40}}, "40 first tokens fill the attention window of 40"),
        (
            {"kv_cache_config": {"enable_block_reuse": True, "max_attention_window": (16, 32)}},
            "--enable_kv_cache_reuse: works with a paged cache and one attention window",
        ),
        (
            {"kv_cache_config": {"host_cache_size": 2**30}, "kv_cache_type": "contiguous"},
            "--kv_host_cache_bytes: works with a paged cache and one attention window",
        ),
        ({"kv_cache_type": "contiguous", "policy": "max_utilization"}, "max_utilization pauses for blocks"),
        ({"enable_chunked_context": True, "max_num_tokens": 8}, "--max_num_tokens: 8 is less than one context chunk"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(arguments, words):
    with pytest.raises(InputError) as refused:
        manager_with(**{**SIZES, **arguments})
    assert words in str(refused.value)


def test_the_cache_is_what_its_settings_say():
    rules = {"enable_block_reuse": True, "enable_partial_reuse": False, "host_cache_size": 600_000}
    config = manager_with(max_seq_len=40, kv_cache_config={"max_tokens": 160, **rules}).config
    assert config.reuse == ReuseRules(enabled=True, partial=False, copy_partial=True)
    assert (config.num_blocks, config.num_host_blocks) == (5, 600_000 // (4096 * 32))
    config = manager_with(
        max_seq_len=40,
        max_tokens=160,
        max_attention_window="8,99",
        sink_token_len=2,
        window_mode="linear",
        tokens_per_block=4,
    ).config
    long, short = config.windows
    assert (long.attention_window.size, long.attention_window.sink, long.num_blocks) == (40, 0, 40)
    assert (short.attention_window.size, short.attention_window.sink, short.num_blocks) == (8, 2, 40)
    assert not short.attention_window.is_cyclic
    assert manager_with(kv_cache_type="contiguous", **SIZES).config.is_contiguous


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_block_reuse": True, "host_cache_size": 2**24},
        {"max_attention_window": 12, "sink_token_len": 3, "tokens_per_block": 4},
        {"max_attention_window": "12,20", "tokens_per_block": 4},
        {"kv_cache_type": "contiguous"},
        {"kv_cache_type": "contiguous", "model_type": "V1"},
    ],
)
def test_each_kind_of_cache_serves(settings):
    client = Client([request_of(1), request_of(2)])
    manager_with(client=client, **SIZES, **settings).close()
    assert [answer.error for answer in client.answers] == ["", ""]


def test_what_caches_can_do_may_be_switched_off():
    off = {"enable_block_reuse": False, "max_attention_window": None, "sink_token_length": 0, "host_cache_size": 0}
    assert manager_with(max_seq_len=40, kv_cache_config={"max_tokens": 160, **off}).config.num_blocks == 5


@pytest.mark.parametrize("missing", ["max_seq_len", "max_tokens"])
def test_an_executor_without_sizes_is_refused(missing):
    sizes = {name: value for name, value in SIZES.items() if name != missing}
    with pytest.raises(InputError, match=f"{missing}.*: expected among the optional parameters"):
        manager_with(**sizes)


def test_optional_parameters_reach_the_engine_under_all_their_names():
    config = manager_with(
        max_seq_len=64,
        max_batch_size=7,
        max_num_tokens=48,
        tokens_per_block=8,
        enable_chunked_context=True,
        context_chunk_unit=16,
        enable_trt_overlap=True,
        context_chunking_policy="equal_progress",
        kv_cache_config={"max_tokens": 100, "free_gpu_memory_fraction": 0.5},
    ).config
    assert (config.max_seq_len, config.max_batch_size, config.max_num_tokens) == (64, 7, 48)
    assert (config.tokens_per_block, config.num_blocks, config.chunk_unit) == (8, 13, 16)
    assert (config.overlap, config.chunking_policy) == ("partitioned", "equal_progress")


def test_camel_case_and_snake_case_are_one_name():
    documented = manager_with(
        maxSeqLen=64,
        maxNumRequests=7,
        maxNumTokens=48,
        enableTrtOverlap=True,
        enableChunkedContext=True,
        tokensPerBlock=8,
        contextChunkUnit=16,
        maxQueueSize=3,
        normalizeLogProbs=True,
        kvCacheConfig={"maxTokens": 100, "freeGpuMemoryFraction": 0.5, "maxAttentionWindow": 40, "sinkTokenLength": 2},
    ).config
    ours = manager_with(
        max_seq_len=64,
        max_batch_size=7,
        max_num_tokens=48,
        enable_trt_overlap=True,
        enable_chunked_context=True,
        tokens_per_block=8,
        context_chunk_unit=16,
        max_queue_size=3,
        normalize_log_probs=True,
        max_tokens=100,
        free_gpu_memory_fraction=0.5,
        max_attention_window="40",
        sink_token_len=2,
    ).config
    assert documented == ours
    assert (ours.max_batch_size, ours.max_queue_size, ours.num_blocks) == (7, 3, 13)
    assert manager_with(maxSeqLen=40, kvCacheConfig={"maxTokens": 160, "enableBlockReuse": True}).config.reuse.enabled
    assert manager_with(max_seq_len=40, max_num_requests=3, maxTokens=160).config.max_batch_size == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxTokns": 1}, "'maxTokns' is not a setting. Did you mean max_tokens_in_paged_kvcache"),
        ({"maxNumRequests": 3, "max_batch_size": 4}, "max_batch_size: maxNumRequests is the same setting"),
        ({"kvCacheConfig": {"maxTokens": 5, "max_tokens": 6}}, "max_tokens: maxTokens is the same setting"),
        ({"kvCacheConfig": 5}, "kvCacheConfig: expected a mapping of its settings, not int"),
        ({"maxQueueSize": -1}, "--max_queue_size is -1; expected an integer of at least 0"),
    ],
)
def test_parameters_in_camel_case_are_checked(options, words):
    with pytest.raises(InputError) as refused:
        manager_with(**{**SIZES, **options})
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["max_tokens", "max_tokens_in_paged_kvcache", "maxTokens"])
@pytest.mark.parametrize("nested", [True, False])
def test_the_size_of_the_cache_may_be_given_inside_and_outside_of_its_mapping(name, nested):
    size = {name: 320}
    manager = manager_with(max_seq_len=40, **({"kv_cache_config": size} if nested else size))
    assert (manager.config.num_blocks, manager.kv_cache.num_blocks) == (10, 10)


def test_the_arguments_go_before_optional_parameters_of_their_names():
    config = manager_with(**SIZES, type="v1", scheduler_policy="max_utilization").config
    assert (config.batching_type, config.policy) == (BatchingType.INFLIGHT_FUSED, "guaranteed_no_evict")


def test_static_batches_turn_off_what_they_cannot_do(caplog):
    config = manager_with(
        model_type="V1", policy="max_utilization", enable_trt_overlap=True, enable_chunked_context=True, **SIZES
    ).config
    assert (config.policy, config.overlap, config.chunk_unit) == ("guaranteed_no_evict", None, None)
    for name in ("max_utilization", "enable_trt_overlap", "enable_chunked_context"):
        assert name in caplog.text


@pytest.mark.parametrize(
    "policy",
    [
        "guaranteed_no_evict",
        "MAX_UTILIZATION",
        "static-batch",
        "ifbbench.schedulers.tensorrt_llm.policies.max_utilization:MaxUtilization",
    ],
)
def test_each_policy_runs(policy):
    client = Client([request_of(1), request_of(2)])
    manager_with(client=client, policy=policy, **SIZES).close()
    assert [answer.error for answer in client.answers] == ["", ""]


def test_a_model_says_its_own_sizes():
    manager = manager_with("tiny", device="cpu", max_tokens=256)
    assert (manager.config.vocab_size, manager.config.max_batch_size) == (4096, 16)
    with pytest.raises(InputError, match=r"--max_seq_len: .* is more than the \d+ positions of model tiny"):
        manager_with("tiny", device="cpu", max_tokens=256, max_seq_len=10**6)
    manager.close()


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        manager_with(tmp_path / "nothing", device="cpu", max_tokens=256)


def test_an_executor_without_tokens_gives_the_prompt_back():
    client = Client([request_of(1), request_of(2, exclude_input_from_output=True)])
    manager_with(client=client, **SIZES).close()
    first, second = (answer.responses[0]["output_ids"].tolist() for answer in client.answers)
    assert (first, second) == ([[prompt_of(1, 5)]], [[[]]])
