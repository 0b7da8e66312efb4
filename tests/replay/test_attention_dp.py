"""Runs in which parts of the devices have requests of their own: their work, and iterations advanced together."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ifbbench.engine.batch import Batch
from ifbbench.engine.drafts import DraftInputs
from ifbbench.kv.sequence import ReuseRules
from ifbbench.models.named_models import load_model_config
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.schedulers.tensorrt_llm.balance import RanksBalance
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.modes import Overlap
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import StepWork, mtp_passes
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.trace import Trace, TraceRequest
from tests.replay.test_fast_forward import COST_MODELS, FILES, config_of, run
from tests.simulated.batches import batch_of

PARTS = 4
COST = CostModel(
    Shard(load_model_config("tiny"), "bf16", "bf16", tp_size=PARTS, attention_dp_size=PARTS), load_hardware("h100-sxm")
)


def trace_of(seed: int) -> Trace:
    draw = np.random.default_rng(seed)
    rows = []
    for index in range(16):
        prompt_len, output_len = int(draw.integers(1, 50)), int(draw.integers(1, 30))
        rows.append(TraceRequest(index, 4e-5 * index, prompt_len, output_len, output_len))
    return Trace("random", rows, "0" * 64, "test")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("window", [None, 16])
def test_iterations_advanced_together_leave_the_same_files(tmp_path: Path, seed: int, engine: str, window: int | None):
    of_engine: dict[str, dict[str, Any]]
    of_engine = {"vllm": {"vllm": VllmRules()}, "sglang": {"sglang": SglangRules(chunk_size=64)}}
    rules = of_engine.get(engine)
    changes: dict[str, Any]
    changes = {"chunk_unit": 4} if rules is None else {"chunk_unit": 1, "overlap": Overlap.ASYNC, **rules}
    config = config_of(engine=engine, attention_dp_size=PARTS, max_batch_size=8, num_blocks=100, **changes)
    windows = [(None, 1.0)] if window is None else [(None, 0.5), (window, 0.5)]
    with mock.patch.dict(COST_MODELS, {1: COST}):
        together = run(trace_of(seed), config, tmp_path / "together", True, windows=windows)
        single = run(trace_of(seed), config, tmp_path / "single", False, windows=windows)

    assert single.together == 0 < together.together
    for name in FILES:
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "single" / name).read_bytes()


def check_ranks_that_pause_and_reuse(tmp_path: Path, seed: int, engine: str, count: int) -> None:
    draw = np.random.default_rng(seed)
    rules: dict[str, Any] = {"policy": "max_utilization", "chunk_unit": 4}
    if engine == "vllm":
        rules = {"vllm": VllmRules(is_priority=seed % 2 == 0), "chunk_unit": 1}
    elif engine == "sglang":
        rules = {"sglang": SglangRules(chunk_size=64, receive_interval=1 + 2 * (seed % 2)), "chunk_unit": 1}
    config = config_of(
        engine=engine,
        attention_dp_size=2,
        max_batch_size=int(draw.integers(4, 12)),
        num_blocks=2 * int(draw.integers(24, 34)),
        overlap=Overlap.ASYNC if seed != 1 else None,
        reuse=ReuseRules(seed < 3, False, False),
        reads_block_tables=False,
        **rules,
    )
    rows = []
    for index in range(count):
        prompt_len, output_len = int(draw.integers(1, 60)), int(draw.integers(1, 30))
        reserved = output_len + int(draw.integers(0, 4))
        rows.append(TraceRequest(index, 2e-4 * index, prompt_len, output_len, reserved, priority=float(index % 3)))
    trace = Trace("random", rows, "0" * 64, "test")
    cost = CostModel(replace(COST.shard, tp_size=2, attention_dp_size=2), load_hardware("h100-sxm"))
    concurrency = None if seed % 2 else 7
    with mock.patch.dict(COST_MODELS, {1: cost}):
        together = run(trace, config, tmp_path / "together", True, concurrency=concurrency)
        run(trace, config, tmp_path / "single", False, concurrency=concurrency)

    # With overlap, what TensorRT-LLM's scheduler stores depends on what was collected.
    assert together.together > 0 or (engine == "trtllm" and config.reuse.enabled and config.overlap is not None)
    for name in FILES:
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "single" / name).read_bytes()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_ranks_that_pause_and_reuse_leave_the_same_files(tmp_path: Path, seed: int, engine: str):
    check_ranks_that_pause_and_reuse(tmp_path, seed, engine, 16)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2, 42, 10))
@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_more_ranks_that_pause_and_reuse_leave_the_same_files(tmp_path: Path, first: int, engine: str):
    for seed in range(first, first + 10):
        check_ranks_that_pause_and_reuse(tmp_path / str(seed), seed, engine, 40)


OF_ALL = {"num_blocks": 100, "max_num_tokens": 4 * 64}
BALANCED = {**OF_ALL, "balances_ranks": True, "chunk_unit": None, "max_input_len": 60}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("policy", "overlap"),
    [(policy, overlap) for policy in ("guaranteed_no_evict", "max_utilization") for overlap in (None, Overlap.ASYNC)],
)
@pytest.mark.parametrize(("time_out", "batching"), [(12, 0), (3, 5), (0, 0)])
def test_balanced_iterations_advanced_together_leave_the_same_files(
    tmp_path: Path, seed: int, policy: str, overlap: Overlap | None, time_out: int, batching: int
):
    config = config_of(
        attention_dp_size=PARTS,
        max_batch_size=8,
        policy=policy,
        overlap=overlap,
        attention_dp_time_out_iters=time_out,
        attention_dp_batching_wait_iters=batching,
        **BALANCED,
    )
    with mock.patch.dict(COST_MODELS, {1: COST}):
        together = run(trace_of(seed), config, tmp_path / "together", True)
        single = run(trace_of(seed), config, tmp_path / "single", False)

    assert single.together == 0 < together.together
    for name in FILES:
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "single" / name).read_bytes()


def test_prompts_that_wait_for_other_parts_are_recorded(tmp_path: Path):
    # All four of the first prompts run at once; the next one arrives alone, and waits while all parts generate.
    rows = [TraceRequest(index, 0.0 if index < 4 else 1e-4, 10, 20, 20) for index in range(5)]
    rules = BALANCED | {"attention_dp_time_out_iters": 8, "attention_dp_batching_wait_iters": 0}
    config = config_of(attention_dp_size=PARTS, max_batch_size=8, **rules | {"num_blocks": 200})
    with mock.patch.dict(COST_MODELS, {1: COST}):
        run(Trace("one more", rows, "0" * 64, "test"), config, tmp_path, True)
    lines = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]

    assert [line["Iteration Counter"] for line in lines if line["Context Requests"]] == [0, 8]
    held = [line["ifbbench"] for line in lines if line["ifbbench"]["bound_by"] == "attention_dp"]
    assert len(held) == 7
    assert {one["first_left_out"]["request_id"] for one in held} == {4}
    waited = json.loads((tmp_path / "requests.jsonl").read_text().splitlines()[-1])["attribution_s"]
    assert waited["waiting_attention_dp"] > 0


class PyExecutorBalance:
    """`PyExecutor._balance_adp_requests` of TensorRT-LLM, from its description: counts of all ranks, two counters."""

    def __init__(self, slots: int, time_out: int, batching: int) -> None:
        self.slots, self.time_out, self.batching = slots, time_out, batching
        self.waiting_iters = self.batching_iters = 0

    def runs(self, num_context: list[int], num_generation: list[int]) -> bool:
        if all(count < self.slots for count in num_generation) and all(count > 0 for count in num_context):
            self.waiting_iters = 0
            if all(count > 0 for count in num_generation):
                if self.batching_iters < self.batching:
                    self.batching_iters += 1
                    return False
                self.batching_iters = 0
            return True
        self.waiting_iters += 1
        if self.waiting_iters >= self.time_out or not all(count > 0 for count in num_generation):
            self.waiting_iters = 0
            return True
        return False


@pytest.mark.parametrize("seed", range(30))
def test_prompts_run_as_pyexecutor_lets_them(seed: int):
    draw = np.random.default_rng(seed)
    time_out, batching = int(draw.integers(0, 9)), int(draw.integers(0, 4))
    limits = {"attention_dp_time_out_iters": time_out, "attention_dp_batching_wait_iters": batching}
    balance = RanksBalance(config_of(attention_dp_size=PARTS, max_batch_size=12, **BALANCED | limits).of_rank(0))
    oracle = PyExecutorBalance(3, time_out, batching)
    for _ in range(200):
        generation = draw.integers(0, 4, PARTS) * (draw.random(PARTS) < draw.choice([0.3, 0.8, 1.0]))
        context = draw.integers(1, 3, PARTS) * (draw.random(PARTS) < draw.choice([0.0, 0.3, 0.9]))
        counts = context.tolist(), generation.tolist()
        expected = oracle.runs(*counts)
        assert balance.lets_run(*counts) == expected
        # As long as the same prompts are held back, or there are none, iterations are skipped.
        more = min(int(draw.integers(0, 5)), balance.certain - 1) if not (context.any() and expected) else 0
        assert all(oracle.runs(*counts) == expected or not context.any() for _ in range(more))
        balance.skip(more)


def test_each_part_has_its_share_of_the_tokens():
    # Two prompts of 40 tokens do not fit in the 64 of a part, but each part runs one.
    trace = Trace("equal", [TraceRequest(index, 0.0, 40, 4, 4) for index in range(8)], "0" * 64, "test")
    config = config_of(attention_dp_size=PARTS, max_batch_size=8, **BALANCED | {"num_blocks": 200})
    with TemporaryDirectory() as directory, mock.patch.dict(COST_MODELS, {1: COST}):
        run(trace, config, Path(directory), True)
        lines = [json.loads(line) for line in (Path(directory) / "iterations.jsonl").read_text().splitlines()]
    assert [line["Context Requests"] for line in lines if line["Context Requests"]] == [4, 4]


def parts_of(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """The requests of `batch` in each part of the devices, as batches of their own."""
    of_slot = batch.slots % num_parts
    drafts = None if batch.drafts is None else batch.drafts.counts[len(batch.drafts.counts) - len(batch.slots) :]
    for part in range(num_parts):
        rows = np.flatnonzero(of_slot == part)
        of_part = None
        if drafts is not None:
            of_part = DraftInputs(drafts[rows], np.zeros(int(drafts[rows].sum()), np.int32))
        yield batch._replace(
            context=tuple(chunk for chunk in batch.context if chunk.request.slot % num_parts == part),
            slots=batch.slots[rows],
            positions=batch.positions[rows],
            drafts=of_part,
        )


@pytest.mark.parametrize("seed", range(40))
def test_the_largest_work_is_that_of_parts_as_batches_of_their_own(seed: int):
    draw = np.random.default_rng(seed)
    windows = [((None, 1.0),), ((None, 0.25), (30, 0.75))][seed % 2]
    positions = draw.integers(1, 60, draw.integers(0, 12)).tolist()
    chunks = [(int(draw.integers(0, 40)), int(draw.integers(1, 60)), bool(draw.integers(2))) for _ in range(seed % 5)]
    batch = batch_of(chunks, positions)
    slots = draw.permutation(40)[: len(chunks) + len(positions)]
    batch = batch._replace(slots=slots[: len(positions)].astype(np.int64))
    for chunk, slot in zip(batch.context, slots[len(positions) :].tolist(), strict=True):
        chunk.request.slot = slot
    if seed % 3 == 0:
        counts = np.concatenate([np.zeros(len(chunks), np.int32), draw.integers(0, 4, len(positions))])
        batch = batch._replace(drafts=DraftInputs(counts, np.zeros(int(counts.sum()), np.int32)))
    executor = SimulatedExecutor(COST, VirtualClock(), windows)
    parts = list(parts_of(batch, PARTS))
    requests, work = executor._largest_of_batch(batch)

    assert requests == max(len(part.context) + len(part.slots) for part in parts)
    assert work == COST.of_largest([StepWork.of_windows(part, windows) for part in parts])
    executor = SimulatedExecutor(COST, VirtualClock(), windows, draft_model=COST, draft_mtp=3)
    passes = zip_longest(*[mtp_passes(part, 3) for part in parts], fillvalue=StepWork())
    assert executor._largest_mtp_passes(COST, batch) == [COST.of_largest(works) for works in passes]


def test_the_passes_of_a_draft_layer():
    batch = batch_of([(0, 10, True)], [3, 7])
    first, second, third = mtp_passes(batch, 3)

    assert (first.context_tokens, first.generation_tokens, first.outputs) == (10, 2 * 4, 3)
    assert (second.generation_tokens, second.generation_kv_tokens) == (2, 3 + 7 + 2 * 1)
    assert (third.generation_tokens, third.generation_kv_tokens) == (2, 3 + 7 + 2 * 2)
    assert len(list(mtp_passes(batch_of([(0, 10, True)], []), 3))) == 1
