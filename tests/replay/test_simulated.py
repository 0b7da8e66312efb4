"""Runs on simulated devices: the schedule of the real executor, the same bytes each time, and no tensors."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ifbbench.errors import InputError
from ifbbench.kv.manager import KvCacheManager
from ifbbench.replay.run import run_trace
from ifbbench.schedulers.sglang.cache import SglangCache
from ifbbench.schedulers.vllm.cache import VllmCache
from ifbbench.settings.config import RunConfig

SETTINGS: dict[str, Any] = {
    "time_scale": 0,
    "max_num_samples": 14,
    "max_batch_size": 6,
    "max_num_tokens": 512,
    "quiet": True,
    "max_tokens_in_paged_kvcache": 640,
}
SIMULATED_FILES = ("iterations.jsonl", "spans.jsonl", "requests.jsonl", "trace.jsonl", "summary.json")


def run(directory: Path, trace: str | None = None, **changes: Any) -> dict[str, Any]:
    return run_trace(trace, RunConfig(**{**SETTINGS, "output": str(directory), **changes})).summary


@pytest.fixture(scope="module")
def repeating_trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts of token ids that begin alike, longer outputs reserved than made."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {
            "arrival_s": 0.0,
            "prompt_tokens": [*range(10, 10 + 16 * (index % 4)), *range(index, index + 40)],
            "output_len": 20 + 7 * (index % 3),
            "max_new_tokens": 40,
        }
        for index in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_the_schedule_is_that_of_the_real_executor(
    policy: str, chunked: bool, reuse: bool, repeating_trace: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "policy": policy,
        "enable_chunked_context": chunked,
        "enable_kv_cache_reuse": reuse,
        "tokens_per_block": 16,
        "max_num_tokens": 128,
        "max_tokens_in_paged_kvcache": 288,
    }
    real = run(tmp_path / "real", repeating_trace, device="cpu", **changes)
    simulated = run(tmp_path / "simulated", repeating_trace, device="sim:h100-sxm", **changes)
    assert simulated["schedule_digest"] == real["schedule_digest"]
    assert simulated["iterations"] == real["iterations"]
    assert (real["pauses"] > 0) == (policy == "max_utilization")
    assert (real["prefix_hit_rate"] > 0) == reuse


def test_a_simulated_run_is_the_same_to_the_last_byte(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "device": "sim:a100-80gb-sxm",
        "model": "llama-3.1-8b",
        "time_scale": 1.0,
        "max_num_samples": None,
    }
    first, second = run(tmp_path / "first", **changes), run(tmp_path / "second", **changes)
    assert first == second
    assert first["duration_s"] > 0
    for name in SIMULATED_FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_more_gpus_are_faster_and_have_room_for_more(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "device": "sim:h100-sxm",
        "model": "llama-3.1-8b",
        "max_batch_size": 64,
        "max_num_samples": None,
        "max_tokens_in_paged_kvcache": None,
    }
    one = run(tmp_path / "one", **changes)
    tensor = run(tmp_path / "tensor", tp_size=2, **changes)
    pipeline = run(tmp_path / "pipeline", pp_size=2, **changes)
    assert tensor["duration_s"] < one["duration_s"]
    assert pipeline["duration_s"] < one["duration_s"]
    assert one["requests"]["completed"] == tensor["requests"]["completed"] == pipeline["requests"]["completed"]


def test_overlap_hides_the_hosts_time(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"device": "sim:h100-sxm", "model": "llama-3.1-8b", "max_num_samples": None}
    apart = run(tmp_path / "apart", **changes)
    overlapped = run(tmp_path / "overlapped", overlap="async", **changes)
    assert overlapped["duration_s"] < apart["duration_s"]
    assert overlapped["output_tokens"] == apart["output_tokens"]


@pytest.mark.parametrize("arguments", [["--device", "sim:h100-sxm", "--model", "llama-3.1-8b"]])
def test_nothing_heavy_is_imported(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from ifbbench.cli.main import main\n"
        f"main(['run', *{arguments!r}, '--json', '--output', {str(tmp_path / 'run')!r}], standalone_mode=False)\n"
        "print([name for name in ('torch', 'triton', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "sim:h100-sx"}, ["h100-sx", "h100-sxm"]),
        ({"device": "sim:l4", "model": "llama-3.3-70b", "max_tokens_in_paged_kvcache": None}, ["tp_size"]),
        ({"device": "null", "tp_size": 2}, ["--tp_size", "nothing is computed"]),
        ({"device": "cpu", "dtype": "fp8"}, ["--dtype", "GPUs and simulated"]),
        ({"device": "cpu", "dtype": "int4"}, ["--dtype", "on simulated"]),
        ({"device": "sim:a100-40gb", "dtype": "fp8"}, ["fp8"]),
        ({"device": "sim:h100-sxm", "responses_json": "r.json"}, ["--responses_json", "sim:h100-sxm"]),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_written(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        run(tmp_path / "run", **changes)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_the_cache_of_a_run_is_freed_with_its_end(tmp_path: Path, engine: str) -> None:
    """Searches make hundreds of runs in a process: a large cache cannot wait for a collection of cycles."""

    def alive() -> int:
        return sum(isinstance(one, KvCacheManager | VllmCache | SglangCache) for one in gc.get_objects())

    reuse: dict[str, Any] = {"enable_kv_cache_reuse": True, "enable_chunked_context": True}
    gc.collect()
    before = alive()
    gc.disable()
    try:
        run(tmp_path / "run", device="sim:h100-sxm", model="llama-3.1-8b", engine=engine, **reuse)
        assert alive() == before
    finally:
        gc.enable()
