"""The size of the KV cache from memory and settings, and the device that has the memory."""

import random
import subprocess
import sys
from typing import Any

import pytest

from ifbbench.build.engine import build_engine
from ifbbench.build.resolve import resolve_limits
from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.models.layers import LayerKind
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.settings.dtypes import DTYPE_BYTES, KV_CACHE_DTYPES
from ifbbench.studies.capacity import Device, find_device, make_pool, study
from ifbbench.torch import build, device, host
from ifbbench.workload.trace import Trace, TraceRequest

TINY = ModelConfig.tiny()
GIB = 1024**3


def resolved(**settings) -> RunConfig:
    config = RunConfig(**settings)
    return resolve_limits(config, TINY.max_position_embeddings, on_cpu=config.device == "cpu")


def test_weights_and_the_free_fraction_come_first():
    config = resolved(kv_cache_free_gpu_mem_fraction=0.5)
    pool = make_pool(config, TINY, Device("here", free_bytes=GIB))
    (window,) = pool.windows
    assert pool.weight_bytes == TINY.num_parameters * 4
    assert pool.budget_bytes == (GIB - pool.weight_bytes) // 2
    assert pool.bytes_per_token == 2 * 4 * 128 * 4
    assert pool.bytes_per_block(window) == 32 * 4096
    assert window.num_blocks == -(-(pool.budget_bytes // 4096) // 32)


def test_fp8_weights_leave_embeddings_and_output_layer_in_16_bits():
    pool = make_pool(resolved(device="cuda", dtype="fp8"), TINY, Device("cuda", GIB))
    matrices = TINY.num_layers * TINY.matrix_parameters(LayerKind())
    assert pool.weight_bytes == matrices + 2 * (TINY.num_parameters - matrices)


def test_a_device_may_give_the_cache_only_so_much():
    pool = make_pool(resolved(device="cpu"), TINY, Device("cpu", 100 * GIB, max_kv_bytes=2 * GIB, is_cpu=True))
    assert pool.kv_bytes == 2 * GIB


def test_a_run_takes_no_more_than_a_full_batch_can_fill():
    config = resolved(device="cpu", max_batch_size=2)
    pool = make_pool(config, TINY, Device("cpu", 100 * GIB, 2 * GIB, is_cpu=True))
    assert pool.layout.windows[0].num_blocks == 2 * 512
    assert pool.windows[0].num_blocks == 2 * GIB // (4096 * 32)


@pytest.mark.parametrize("free_bytes", [60_000_000, 7 * GIB])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_size": 3},
        {"tokens_per_block": 64, "dtype": "bf16", "max_seq_len": 500},
        {"kv_cache_dtype": "fp8", "kv_cache_free_gpu_mem_fraction": 0.37},
        {"max_attention_window": "100,700", "sink_token_len": 5, "max_seq_len": 3000},
        {"max_attention_window": "100", "window_mode": "linear", "max_seq_len": 3000},
        {"kv_host_cache_bytes": 10_000_000, "enable_kv_cache_reuse": True, "max_seq_len": 3000},
        {"max_tokens_in_paged_kvcache": 333, "max_attention_window": "100,700"},
        {"max_tokens_in_paged_kvcache": 99_999},
        {"beam_width": 3, "max_seq_len": 1000},
    ],
)
def test_a_run_has_these_very_windows_and_blocks(free_bytes, settings, monkeypatch):
    """A run measures free memory after the weights are loaded; `capacity` subtracts their size."""
    config = RunConfig(device="cpu", **settings)
    taken = dict.fromkeys(("loaded", "layout"))
    weight_bytes = TINY.num_parameters * DTYPE_BYTES["float32"]
    monkeypatch.setattr(device, "available_host_bytes", lambda: free_bytes - weight_bytes)
    loaded = build.load_model(RunConfig(device="cpu"))
    monkeypatch.setattr(build, "load_model", lambda config, _: loaded)
    monkeypatch.setattr(build, "make_executor", lambda *_, **options: taken.update(options))
    limits = build_engine(config).limits
    pool = make_pool(resolved(device="cpu", **settings), TINY, find_device(config, free_bytes))
    assert pool.layout == taken["layout"]
    assert limits.num_blocks == pool.layout.windows[0].num_blocks


def test_a_size_in_tokens_needs_no_memory_and_yields_to_memory_that_is_given():
    config = resolved(max_tokens_in_paged_kvcache=1000)
    assert make_pool(config, TINY, Device("here")).windows[0].num_blocks == 32
    assert make_pool(config, TINY, Device("here", GIB)).windows[0].num_blocks == 32
    assert make_pool(config, TINY, Device("here", 22_000_000)).windows[0].num_blocks == 14


def test_without_memory_or_a_size_a_full_batch_fits():
    pool = make_pool(resolved(device="null", max_batch_size=5), TINY, Device("null"))
    assert pool.windows[0].num_blocks == 5 * 512


def test_windows_of_layers_share_the_memory():
    windows = "1024,99999"
    config = resolved(max_attention_window=windows, max_batch_size=4096)
    pool = make_pool(config, TINY, Device("here", GIB))
    long, short = pool.windows
    assert (long.attention_window.size, short.attention_window.size) == (16_384, 1024)
    assert (long.layers, short.layers) == ((1, 3), (0, 2))
    assert pool.bytes_per_block(long) == pool.bytes_per_block(short) == 32 * 2048
    assert long.num_blocks / short.num_blocks == pytest.approx(16, rel=0.01)
    config = resolved(max_tokens_in_paged_kvcache=1000, max_attention_window=windows)
    assert [window.num_blocks for window in make_pool(config, TINY, Device("here")).windows] == [32, 32]


def test_a_smaller_data_type_makes_room_for_more():
    plain, small = (
        make_pool(resolved(kv_cache_dtype=dtype), TINY, Device("here", GIB)) for dtype in ("float32", "fp8")
    )
    assert (plain.bytes_per_token, small.bytes_per_token) == (4096, 1024)
    assert small.windows[0].num_blocks == pytest.approx(4 * plain.windows[0].num_blocks, abs=4)


@pytest.mark.parametrize(
    ("free_bytes", "words"),
    [(1000, ["weights of model tiny", "19.1 MiB", "1,000 bytes free"]), (20_000_000, ["single KV cache block"])],
)
def test_too_little_memory_is_refused(free_bytes, words):
    with pytest.raises(InputError) as error:
        make_pool(resolved(), TINY, Device("here", free_bytes))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(8, 1), (2, 4), (16, 1)])
def test_each_gpu_has_its_share_of_the_weights_and_all_of_them_one_cache(tp_size, pp_size):
    """Memory is given for each GPU, so the cache is the same number of times larger."""
    config = RunConfig(model="llama-3.3-70b", device="sim:h100-sxm", tp_size=tp_size, pp_size=pp_size)
    model = load_model_config(config.model)
    pool = make_pool(resolve_limits(config, 8192, on_cpu=False), model, find_device(config, 70 * GIB))
    devices = tp_size * pp_size
    assert pool.weight_bytes == pytest.approx(2 * model.num_parameters / devices, rel=0.05)
    # With more GPUs than the 8 KV heads, some keep the same keys, which count once.
    distinct = min(tp_size, 8) * pp_size
    assert pool.budget_bytes == pytest.approx(0.9 * (70 * GIB - pool.weight_bytes) * distinct, rel=1e-6)
    plain = make_pool(resolve_limits(config, 8192, on_cpu=False), model, find_device(config))
    assert plain.weight_bytes == pool.weight_bytes


@pytest.mark.parametrize("device", ["cuda", "sim:h100-sxm"])
def test_quantised_weights_have_embeddings_and_output_layer_in_16_bits(device):
    config = RunConfig(model="llama-3.1-8b", device=device, dtype="fp8")
    model = load_model_config(config.model)
    tables = 2 * model.vocab_size * model.hidden_size
    norms = (2 * model.num_layers + 1) * model.hidden_size
    pool = make_pool(resolve_limits(config, 8192, on_cpu=False), model, find_device(config, 70 * GIB))
    assert pool.weight_bytes == model.num_parameters + tables + norms


def test_a_simulated_cpu_keeps_the_limits_of_a_cpu_with_other_memory():
    assert find_device(RunConfig(device="sim:cpu"), GIB).is_cpu
    with pytest.raises(InputError, match="no hardware profile 'h1000'"):
        find_device(RunConfig(device="sim:h1000"), GIB)


def test_given_memory_asks_no_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    given = find_device(RunConfig(), GIB)
    assert (given.free_bytes, given.max_kv_bytes, given.is_cpu) == (GIB, None, False)
    assert find_device(RunConfig(device="cuda"), GIB) == Device("cuda", GIB)
    assert find_device(RunConfig(device="cuda", max_tokens_in_paged_kvcache=9)) == Device("cuda")
    assert find_device(RunConfig(device="null")) == Device("null")


def test_a_cpu_is_asked_without_torch_and_gives_the_cache_two_gib(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 7 * GIB)
    # The tests' own process has smaller caches (conftest.py).
    printed = "from ifbbench.torch import host; print(host.MAX_CPU_KV_BYTES)"
    of_a_user = int(subprocess.run([sys.executable, "-c", printed], capture_output=True, text=True, check=True).stdout)
    monkeypatch.setattr(host, "MAX_CPU_KV_BYTES", of_a_user)
    assert find_device(RunConfig(device="cpu")) == Device("cpu", 7 * GIB, 2 * GIB, is_cpu=True)
    assert find_device(RunConfig(device="cpu"), GIB) == Device("cpu", GIB, 2 * GIB, is_cpu=True)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert find_device(RunConfig()).name == "cpu"
    assert find_device(RunConfig(max_tokens_in_paged_kvcache=9)).free_bytes
    with pytest.raises(InputError, match="no CUDA device"):
        find_device(RunConfig(device="cuda"))


def test_free_memory_of_a_gpu_is_asked_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    assert find_device(RunConfig()) == Device("cuda", 5 * GIB)
    assert find_device(RunConfig(max_tokens_in_paged_kvcache=9)) == Device("cuda", 5 * GIB), "a size yields to it"


def test_sizes_of_data_types_are_those_of_torch():
    assert {name: dtype.itemsize for name, dtype in build.KV_CACHE_DTYPES.items()} == {
        name: size for name, size in DTYPE_BYTES.items() if name in KV_CACHE_DTYPES
    }


# How many requests run at once, held to runs.


def most_at_once(settings: dict[str, Any], request: TraceRequest, count: int) -> int:
    """The maximum number of requests in an iteration of a run of so many equal ones, none of which is paused."""
    requests = [
        TraceRequest(index, 0.0, request.prompt_len, request.max_new_tokens, request.output_len)
        for index in range(count)
    ]
    summary = summarise_run(Trace("equal", requests, "0" * 64, "test"), RunConfig(**settings))
    assert summary["pauses"] == 0
    return int(summary["peak_scheduled_requests"])


@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(80, 1_000), marks=pytest.mark.slow)])
def test_a_run_has_as_many_requests_at_once(seeds):
    """MAX_UTILIZATION runs as many to their end without a pause; under GUARANTEED_NO_EVICT more may wait."""
    for seed in seeds:
        draw = random.Random(seed)
        block, is_chunked, output_len = draw.choice([4, 8, 16]), draw.random() < 0.5, draw.choice([1, 1, 2, 3, 9, 70])
        request = TraceRequest(0, 0.0, draw.randint(1, 60), output_len + draw.choice([0, 0, 20]), output_len)
        settings: dict[str, Any] = {
            "device": "sim:h100-sxm",
            "policy": draw.choice(["guaranteed_no_evict", "max_utilization"]),
            "max_batch_size": draw.choice([4, 30, 500]),
            "max_num_tokens": draw.randint(60, 300),
            "time_scale": 0,
            "tokens_per_block": block,
            "enable_chunked_context": is_chunked,
            "max_seq_len": 256,
            "max_tokens_in_paged_kvcache": draw.choice([200, 1000, 100_000]),
            "max_attention_window": draw.choice([None, None, "32"]),
        }
        found = study(RunConfig(**settings), [request]).fit_of_policy
        assert found is not None
        waits = 2 * found.at_once + 40 if settings["policy"] == "guaranteed_no_evict" else 0
        at_once = most_at_once(settings, request, waits or found.at_once)
        # A prompt that was cut may still run when others have ended.
        assert at_once in ((found.at_once, found.at_once + 1) if is_chunked and output_len < 4 else (found.at_once,))


def test_answers_of_one_token_end_with_their_prompts():
    config = RunConfig(device="null", max_num_tokens=8192, max_batch_size=64, enable_chunked_context=False)
    found = study(config, [TraceRequest(0, 0.0, 248, 1, 1)] * 64).fit_of_policy
    assert found is not None
    assert (found.at_once, found.first, found.bound_by.value) == (33, 33, "num_tokens")
