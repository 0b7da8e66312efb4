"""Real runs with every kind of KV cache: the same greedy tokens, and what each kind promises."""

import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ifbbench.engine.batch import Batch, CopyKind
from ifbbench.rundir.line_types import CACHE_FIELDS
from ifbbench.torch.model_executor import ModelExecutor
from tests.replay.caches import BLOCK, BYTES_PER_BLOCK, NAMES, OUTPUT_LENGTHS, Found, prompts, run, write

pytestmark = pytest.mark.usefixtures("small_model")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace") / "trace.jsonl", [{"prompt_tokens": prompt} for prompt in prompts()])


@pytest.fixture(scope="module")
def named_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal prefixes by name; the model's tokens are drawn."""
    rows = [{"prompt_len": length, "prefix_ids": [name], "prefix_lens": [shared]} for name, shared, length in NAMES]
    return write(tmp_path_factory.mktemp("trace") / "named.jsonl", rows)


@pytest.fixture(scope="module")
def plain(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = run(trace, tmp_path_factory.mktemp("plain") / "plain")
    assert [len(tokens) for tokens in found.tokens.values()] == OUTPUT_LENGTHS
    assert len({tuple(tokens) for tokens in found.tokens.values()}) > 5, "tokens that depend on the prompts"
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Counter[CopyKind]:
    """How many blocks of each kind executors had to copy."""
    seen: Counter[CopyKind] = Counter()
    submit = ModelExecutor.submit

    def spy(self: ModelExecutor, batch: Batch) -> None:
        seen.update(copy.kind for copy in batch.copies)
        submit(self, batch)

    monkeypatch.setattr(ModelExecutor, "submit", spy)
    return seen


# Contiguous.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"type": "inflight_unfused"},
        {"type": "v1"},
        {"enable_trt_overlap": True},
        {"policy": "static_batch"},
        {"kv_cache_dtype": "float32"},
        {"max_attention_window": "999"},
    ],
)
def test_a_contiguous_cache_makes_the_same_tokens(settings: dict[str, Any], trace: Path, plain: Found, tmp_path: Path):
    found = run(trace, tmp_path / "run", kv_cache_type="contiguous", **settings)
    assert found.tokens == plain.tokens
    assert found.summary["kv_blocks"] == {"max": None, "peak_used": None, "tokens_per_block": None}
    assert all(row[name] is None for row in found.iterations for name in CACHE_FIELDS)
    assert found.summary["kv_tokens"]["max"] == 4 * 128


@pytest.mark.parametrize("kind", ["inflight_fused", "v1"])
def test_paging_holds_less_memory_for_the_same_tokens(kind: str, trace: Path, tmp_path: Path):
    paged = run(trace, tmp_path / "paged", type=kind)
    contiguous = run(trace, tmp_path / "contiguous", type=kind, kv_cache_type="contiguous")
    assert paged.tokens == contiguous.tokens
    assert paged.digest == contiguous.digest, "where blocks are never short, the number of requests binds in both"
    ours, theirs = paged.summary["kv_tokens"], contiguous.summary["kv_tokens"]
    assert ours["peak_filled"] == theirs["peak_filled"] <= ours["peak_held"] < theirs["peak_held"] == 4 * 128
    assert paged.summary["peak_scheduled_requests"] == contiguous.summary["peak_scheduled_requests"] == 4


def test_the_same_memory_runs_more_requests_when_it_is_paged(trace: Path, tmp_path: Path):
    contiguous = run(trace, tmp_path / "contiguous", kv_cache_type="contiguous", max_batch_size=2)
    paged = run(trace, tmp_path / "paged", max_tokens_in_paged_kvcache=2 * 128, max_batch_size=10)
    assert paged.summary["kv_tokens"]["max"] == contiguous.summary["kv_tokens"]["max"] == 256
    assert contiguous.summary["peak_scheduled_requests"] == 2 < paged.summary["peak_scheduled_requests"]
    assert paged.tokens == contiguous.tokens


# Reuse. 88 tokens are 22 blocks; the longest request needs 19.

POLICIES = ("guaranteed_no_evict", "max_utilization")
POOLS = {"ample": 640, "tight": 88}
PARTIAL: dict[str, dict[str, Any]] = {
    "full blocks": {"enable_partial_reuse": False},
    "unused parts": {"copy_on_partial_reuse": False},
    "parts": {},
}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"enable_chunked_context": True, "max_num_tokens": 16},
    "overlap": {"enable_trt_overlap": True},
    "two passes": {"type": "inflight_unfused"},
}


def every_second(*values: Iterable[str]) -> list[Any]:
    """All combinations, of which every second one is slow: any two values of different kinds meet in the others."""
    return [
        pytest.param(*(one for _, one in numbered), marks=[pytest.mark.slow] * (sum(n for n, _ in numbered) % 2))
        for numbered in itertools.product(*map(enumerate, values))
    ]


COMBINATIONS = [
    *(pytest.param(*each.values, "whole", marks=each.marks) for each in every_second(POLICIES, POOLS, PARTIAL)),
    *itertools.product(POLICIES, ["tight"], ["parts"], ["chunked", "overlap", "two passes"]),
]


@pytest.mark.parametrize(("policy", "pool", "partial", "mode"), COMBINATIONS)
def test_reuse_makes_the_same_tokens(
    policy: str, pool: str, partial: str, mode: str, trace: Path, plain: Found, tmp_path: Path
):
    settings = {**PARTIAL[partial], **MODES[mode], "policy": policy, "max_tokens_in_paged_kvcache": POOLS[pool]}
    found = run(trace, tmp_path / "run", enable_kv_cache_reuse=True, **settings)
    assert found.tokens == plain.tokens
    assert found.summary["prefix_hit_rate"] > 0
    assert (found.summary["pauses"] > 0) == (policy == "max_utilization" and pool == "tight")


@pytest.mark.parametrize(
    ("host_blocks", "mode"), [(1, "whole"), (3, "whole"), (30, "whole"), (30, "chunked"), (30, "overlap")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_come_back_from_the_host_as_they_were(
    policy: str, host_blocks: int, mode: str, trace: Path, plain: Found, tmp_path: Path, copies: Counter[CopyKind]
):
    found = run(
        trace,
        tmp_path / "run",
        enable_kv_cache_reuse=True,
        policy=policy,
        max_tokens_in_paged_kvcache=88,
        kv_host_cache_bytes=host_blocks * BYTES_PER_BLOCK,
        **MODES[mode],
    )
    assert found.tokens == plain.tokens
    assert copies[CopyKind.OFFLOAD] > 0
    if host_blocks == 30:
        assert copies[CopyKind.ONBOARD] > 0


def test_more_is_reused_with_parts_and_with_a_host_cache(trace: Path, tmp_path: Path, copies: Counter[CopyKind]):
    def hit_rate(name: str, **settings: Any) -> float:
        found = run(trace, tmp_path / name, enable_kv_cache_reuse=True, max_batch_size=1, **settings)
        return float(found.summary["prefix_hit_rate"])

    full = hit_rate("full", enable_partial_reuse=False)
    assert not copies, "there is room for all, and full blocks are shared where they are"
    parts = hit_rate("parts")
    assert copies.keys() == {CopyKind.DEVICE}
    tight = hit_rate("tight", max_tokens_in_paged_kvcache=88)
    on_host = hit_rate("host", max_tokens_in_paged_kvcache=88, kv_host_cache_bytes=100 * BYTES_PER_BLOCK)
    assert 0 < full < parts
    assert tight < on_host == parts


def test_nothing_is_reused_unless_asked_for(trace: Path, plain: Found, tmp_path: Path):
    assert plain.summary["prefix_hit_rate"] == 0
    assert all(row["Reused KV cache blocks"] == 0 for row in plain.iterations)
    reused = run(trace, tmp_path / "run", enable_kv_cache_reuse=True)
    assert reused.iterations[-1]["Reused KV cache blocks"] > 0
    name = "Allocated new KV cache blocks"
    assert reused.iterations[-1][name] < plain.iterations[-1][name]


# The schedule. A null device makes no tokens; where prefixes have names its output has names too, where prompts are
# recorded its output is unknown.


def digests(trace: Path, folder: Path, policy: str, pool: str, partial: str, mode: str) -> tuple[str, str]:
    """Of a real run and of one without a model."""
    settings = {
        **PARTIAL[partial],
        **MODES[mode],
        "policy": policy,
        "max_tokens_in_paged_kvcache": POOLS[pool],
        "enable_kv_cache_reuse": True,
        "kv_host_cache_bytes": 6 * BYTES_PER_BLOCK,
    }
    real = run(trace, folder / "real", **settings)
    null = run(trace, folder / "null", device="null", **settings)
    assert real.summary["prefix_hit_rate"] > 0
    return real.digest, null.digest


@pytest.mark.parametrize(("policy", "pool", "partial", "mode"), COMBINATIONS)
def test_the_schedule_with_reuse_is_that_without_a_model(
    policy: str, pool: str, partial: str, mode: str, named_trace: Path, tmp_path: Path
):
    real, null = digests(named_trace, tmp_path, policy, pool, partial, mode)
    assert real == null


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["whole", "chunked"])
@pytest.mark.parametrize("pool", ["ample", "tight"])
def test_the_same_with_recorded_prompts(policy: str, pool: str, mode: str, trace: Path, tmp_path: Path):
    real, null = digests(trace, tmp_path, policy, pool, "parts", mode)
    assert real == null


# Attention windows.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_attention_window": "12"},
        {"max_attention_window": "13"},
        {"max_attention_window": "13", "sink_token_len": 2},
        {"max_attention_window": "14", "sink_token_len": 5},
        {"max_attention_window": "12,999"},
        {"max_attention_window": "12,31,17", "sink_token_len": 3},
        {"max_attention_window": "14", "sink_token_len": 5, "beam_width": 3, "max_tokens_in_paged_kvcache": 480},
        {"max_attention_window": "12,31,17", "sink_token_len": 3, "beam_width": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_cyclic_window_sees_what_a_linear_one_does(
    settings: dict[str, Any], policy: str, trace: Path, plain: Found, tmp_path: Path
):
    linear, cyclic = (
        run(trace, tmp_path / mode, window_mode=mode, policy=policy, **settings) for mode in ("linear", "cyclic")
    )
    assert cyclic.tokens == linear.tokens != plain.tokens
    assert cyclic.summary["kv_tokens"]["peak_held"] < linear.summary["kv_tokens"]["peak_held"]


@pytest.mark.parametrize(
    ("windows", "sink"),
    [
        ("13", 0),
        ("12,31", 3),
        ("13", BLOCK),
        *(
            pytest.param(windows, sink, marks=pytest.mark.slow)
            for windows, sink in (("12,31", 0), ("13", 3), ("12,31", BLOCK))
        ),
    ],
)
def test_windows_make_the_same_tokens_however_they_are_run(windows: str, sink: int, trace: Path, tmp_path: Path):
    settings: dict[str, Any] = {"max_attention_window": windows, "sink_token_len": sink}
    expected = run(trace, tmp_path / "expected", max_batch_size=1, **settings).tokens
    modes: list[dict[str, Any]] = [
        MODES["chunked"],
        MODES["overlap"],
        {"type": "v1"},
        {"max_tokens_in_paged_kvcache": 48, "policy": "max_utilization"},
    ]
    for number, mode in enumerate(modes):
        assert run(trace, tmp_path / str(number), **settings, **mode).tokens == expected, mode


@pytest.mark.parametrize("windows", ["13", "12,31"])
@pytest.mark.parametrize("sink", [0, 3, BLOCK])
def test_windows_of_a_contiguous_cache(windows: str, sink: int, trace: Path, tmp_path: Path):
    settings: dict[str, Any] = {"max_attention_window": windows, "sink_token_len": sink}
    expected = run(trace, tmp_path / "paged", **settings).tokens
    for kind in ("inflight_fused", "v1"):
        found = run(trace, tmp_path / kind, type=kind, kv_cache_type="contiguous", **settings)
        assert found.tokens == expected, kind


@pytest.mark.parametrize("mode", ["cyclic", "linear"])
def test_reuse_with_a_window_makes_the_same_tokens(mode: str, trace: Path, tmp_path: Path):
    """The window of some sequences wraps, others share blocks."""
    settings: dict[str, Any] = {"max_attention_window": "50", "window_mode": mode}
    expected = run(trace, tmp_path / "expected", **settings)
    for name in ("tight", *PARTIAL, *MODES):
        more = {"max_tokens_in_paged_kvcache": 88} if name == "tight" else PARTIAL.get(name, MODES.get(name, {}))
        found = run(trace, tmp_path / name, enable_kv_cache_reuse=True, **settings, **more)
        assert found.tokens == expected.tokens, name
        assert name == "tight" or found.summary["prefix_hit_rate"] > 0, name


# Data types.


def test_a_full_data_type_changes_nothing(trace: Path, plain: Found, tmp_path: Path):
    same = run(trace, tmp_path / "same", kv_cache_dtype="float32")
    assert (same.tokens, same.digest) == (plain.tokens, plain.digest)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_smaller_data_types_keep_the_schedule(dtype: str, trace: Path, plain: Found, tmp_path: Path):
    found = run(trace, tmp_path / dtype, kv_cache_dtype=dtype)
    assert found.digest == plain.digest
    assert [len(tokens) for tokens in found.tokens.values()] == OUTPUT_LENGTHS
