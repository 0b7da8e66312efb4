"""Iterations advanced together leave the same files as iterations advanced one by one, to the last byte."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import event
from hypothesis import strategies as st
from msgspec import structs

from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request, ReuseIdentity
from ifbbench.engine.retention import DEFAULT_PRIORITY, Retention, RetentionRange
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.engine.stretch import Stretch
from ifbbench.kv.adapters import LoraConfig
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sequence import ReuseRules
from ifbbench.kv.sizing import WindowLayout
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.client import MakeRequest, ReplayClient
from ifbbench.rundir.recorder import Recorder
from ifbbench.rundir.statistics import IterationStatistics
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm import dynamic_limits
from ifbbench.settings.modes import BatchingType, Overlap
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.lora_cost import LoraCost
from ifbbench.simulated.shard import Shard
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.trace import Trace, TraceRequest
from tests.drawing import holds
from tests.engine.engine import scheduler_of
from tests.engine.test_lora import FakeSource

COST_MODELS = {
    stages: CostModel(Shard(load_model_config("tiny"), "bf16", "bf16", pp_size=stages), load_hardware("h100-sxm"))
    for stages in (1, 2, 3, 4)
}
COST_MODEL = COST_MODELS[1]
OVERLAPS = st.sampled_from([None, None, Overlap.ASYNC, Overlap.PARTITIONED])
FILES = ("iterations.jsonl", "spans.jsonl", "requests.jsonl", "summary.json")


class CountingRecorder(Recorder):
    """Counts the iterations that were advanced together with others."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.together = 0

    def stretch(self, stretch: Stretch) -> None:
        super().stretch(stretch)
        self.together += stretch.length - 1


def config_of(**changes: Any) -> BatchingConfig:
    values: dict[str, Any] = {
        "policy": "guaranteed_no_evict",
        "max_batch_size": 6,
        "max_num_tokens": 64,
        "max_seq_len": 96,
        "max_input_len": 60,
        "tokens_per_block": 4,
        "num_blocks": 60,
    }
    return BatchingConfig(**(values | changes))


def run(
    trace: Trace,
    config: BatchingConfig,
    directory: Path,
    together: bool,
    window: int | None = None,
    concurrency: int | None = None,
    every: int = 1,
    windows: Sequence[tuple[int | None, float]] = (),
    make: MakeRequest | None = None,
    **client_options: Any,
) -> CountingRecorder:
    """Replay `trace` on a virtual clock, with fast-forward if `together`."""
    clock = VirtualClock()
    client = ReplayClient(trace, clock, make or make_request, concurrency=concurrency, **client_options)
    directory.mkdir(parents=True, exist_ok=True)
    recorder = CountingRecorder(
        directory,
        {},
        len(trace),
        config.batching_type,
        config.max_batch_size,
        client.arrival_s,
        "jsonl",
        every,
    )
    manager = make_loop(
        config,
        SimulatedExecutor(
            COST_MODELS[config.pp_size],
            clock,
            windows or [(window, 1.0)],
            None if config.lora is None else LoraCost(COST_MODELS[config.pp_size], config.lora),
        ),
        clock,
        client.get_requests,
        client.send_response,
        recorder,
        client.queued,
        next_change=client.next_arrival_s if together else None,
        next_priority=client.next_priority,
        is_open_loop=client.is_open_loop,
    )
    while not client.done:
        if not manager.step():
            client.wait()
        for scheduler in getattr(manager.scheduler, "ranks", [manager.scheduler]):
            scheduler.kv_cache.check_consistency()
    recorder.close(partial=False)
    if config.lora is not None and (adapters := scheduler_of(manager).adapters) is not None:
        (directory / "adapters").write_text(str(adapters.figures()))
    return recorder


def make_request(index: int, row: TraceRequest) -> Request:
    # Prompts begin alike and outputs are equal, so that there is something to reuse, and blocks are stored twice.
    shared = min(row.prompt_len, 4 * (index % 5))
    runs = [(0, shared), (10_000 * (index % 3 + 1), row.prompt_len - shared)]
    return Request(
        row.request_id,
        row.prompt_len,
        row.max_new_tokens,
        output_len=row.output_len,
        index=index,
        priority=row.priority,
        reuse=ReuseIdentity(runs=runs, output_symbol=1_000_000),
    )


def without_tokens(index: int, row: TraceRequest, **more: Any) -> Request:
    """A request that shares no blocks with others."""
    return Request(
        row.request_id,
        row.prompt_len,
        row.max_new_tokens,
        output_len=row.output_len,
        index=index,
        priority=row.priority,
        **more,
    )


def handing_out(waiting: list[Request]) -> Callable[[int], list[Request]]:
    def get_requests(count: int) -> list[Request]:
        taken = waiting[:count]
        del waiting[:count]
        return taken

    return get_requests


def files(directory: Path) -> dict[str, str]:
    return {name: (directory / name).read_text() for name in FILES}


requests = st.lists(
    st.tuples(
        st.integers(0, 400_000),  # arrival, microseconds
        st.integers(1, 59),
        st.integers(1, 40),
        st.integers(0, 20),
        st.sampled_from([0.5, 0.5, 0.5, 0.9]),
    ),
    min_size=1,
    max_size=16,
)
configs = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
        "chunk_unit": st.sampled_from([None, 4, 8]),
        "overlap": OVERLAPS,
        "pp_size": st.sampled_from([1, 1, 1, 2, 3, 4]),
        "max_batch_size": st.integers(1, 8),
        "max_num_tokens": st.integers(60, 90),
        "num_blocks": st.integers(25, 80),
        "tokens_per_block": st.sampled_from([4, 8]),
        "reuse": st.sampled_from([ReuseRules(), ReuseRules(enabled=True), ReuseRules(enabled=True, partial=False)]),
    }
)
# Contexts wait for tokens, which generation takes first, or for blocks, of which there are hardly enough for one.
tight_configs = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["guaranteed_no_evict", "max_utilization", "max_utilization"]),
        "chunk_unit": st.sampled_from([4, 8]),
        "overlap": OVERLAPS,
        "chunking_policy": st.sampled_from(["first_come_first_served", "equal_progress"]),
        "max_batch_size": st.integers(2, 8),
        "max_num_tokens": st.integers(8, 14),
        "num_blocks": st.integers(7, 26),
        "tokens_per_block": st.just(8),
        "reuse": st.sampled_from([ReuseRules(), ReuseRules(), ReuseRules(enabled=True)]),
    }
)


def trace_of(rows: list[tuple[int, int, int, int, float]]) -> Trace:
    ordered = sorted(rows, key=lambda row: row[0])
    return Trace(
        "random",
        [
            TraceRequest(index, arrival / 1e6, prompt, min(output + more, 96 - prompt), output, priority=priority)
            for index, (arrival, prompt, output, more, priority) in enumerate(ordered)
        ],
        "0" * 64,
        "test",
    )


@holds(20, 500, rows=requests, changes=configs, concurrency=st.sampled_from([None, None, 3]))
def test_together_is_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], changes: dict[str, Any], concurrency: int | None
) -> None:
    config, trace, folder = config_of(**changes), trace_of(rows), tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, concurrency=concurrency)
    recorder = run(trace, config, folder / "together", together=True, concurrency=concurrency)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


@holds(
    20,
    500,
    rows=requests,
    changes=st.one_of(configs, tight_configs),
    parts=st.sampled_from([("partitioned", 1), (None, 2), (None, 3), (None, 4)]),
    concurrency=st.sampled_from([None, None, 3]),
    every=st.sampled_from([1, 4]),
)
def test_micro_batches_are_advanced_together(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    parts: tuple[str | None, int],
    concurrency: int | None,
    every: int,
) -> None:
    """With overlap and pipeline stages, where turns may have no requests, or more than their share."""
    overlap = None if parts[0] is None else Overlap(parts[0])
    config = config_of(**changes | {"overlap": overlap, "pp_size": parts[1]}, max_input_len=95)
    trace, folder = trace_of(rows), tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, concurrency=concurrency, every=every)
    recorder = run(trace, config, folder / "together", together=True, concurrency=concurrency, every=every)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


turns = st.lists(
    st.tuples(
        st.integers(0, 3_000),
        st.integers(1, 59),
        st.integers(1, 40),
        st.integers(0, 20),
        st.sampled_from([0.5, 0.5, 0.5, 0.9]),
        st.one_of(st.none(), st.integers(0, 15)),
        st.integers(0, 2_000),
    ),
    min_size=2,
    max_size=16,
)


@holds(
    20,
    500,
    rows=turns,
    changes=configs,
    concurrency=st.sampled_from([None, None, 2]),
    keeps_arrivals=st.booleans(),
    duration_s=st.sampled_from([None, None, 0.002]),
)
def test_sessions_together_are_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    concurrency: int | None,
    keeps_arrivals: bool,
    duration_s: float | None,
) -> None:
    """Turns arrive after the answer to the turn before, with a limit of outstanding requests and without."""
    trace = trace_of([row[:5] for row in rows])
    requests = [
        structs.replace(request, after=after if after is not None and after < index else None, think_s=think / 1e6)
        for index, (request, (*_, after, think)) in enumerate(zip(trace, rows, strict=True))
    ]
    trace = replace(trace, requests=requests)
    options: dict[str, Any] = {"concurrency": concurrency, "keeps_arrivals": keeps_arrivals, "duration_s": duration_s}
    config, folder = config_of(**changes), tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, **options)
    recorder = run(trace, config, folder / "together", together=True, **options)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")
    lines = {line["request_id"]: line for line in map(json.loads, files(folder / "apart")["requests.jsonl"].split())}
    for request in requests:
        line, before = lines.get(request.request_id), lines.get(-1 if request.after is None else request.after)
        assert duration_s is not None or line is not None
        if line and before and before["end_s"] is not None:
            assert line["arrival_s"] == before["end_s"] + request.think_s
        assert line is None or duration_s is None or line["arrival_s"] <= duration_s


@holds(
    20,
    500,
    rows=turns,
    changes=configs,
    priority=st.sampled_from([0, 20, 36, 90]),
    duration_s=st.sampled_from([None, 0.0, 0.0002, 0.001, 0.01]),
)
def test_retention_together_is_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    priority: int,
    duration_s: float | None,
) -> None:
    """Priorities expire between iterations that run together, and blocks of others are taken meanwhile."""
    kept = Retention([RetentionRange(0, None, priority, duration_s)], priority, duration_s)

    def make(index: int, row: TraceRequest) -> Request:
        request = make_request(index, row)
        request.retention = kept if index % 3 else Retention([RetentionRange(0, None, DEFAULT_PRIORITY)])
        return request

    config = config_of(**changes | {"reuse": ReuseRules(enabled=True)})
    trace, folder = trace_of([row[:5] for row in rows]), tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False, make=make)
    recorder = run(trace, config, folder / "together", together=True, make=make)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


crowded_requests = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 40]),
        st.integers(1, 40),
        st.integers(1, 20),
        st.integers(0, 3),
        st.sampled_from([0.5, 0.5, 0.5, 0.9]),
    ),
    min_size=2,
    max_size=8,
)


@holds(40, 500, rows=crowded_requests, changes=tight_configs)
def test_together_is_as_one_by_one_while_contexts_wait(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], changes: dict[str, Any]
) -> None:
    config, trace, folder = config_of(max_input_len=95, **changes), trace_of(rows), tmp_path_factory.mktemp("runs")
    run(trace, config, folder / "apart", together=False)
    recorder = run(trace, config, folder / "together", together=True)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


def test_a_context_that_waits_for_tokens_keeps_its_claim_on_blocks(tmp_path: Path) -> None:
    """Request 1 fits the KV cache but not the token budget. When request 2 starts a block, request 1's claim and its
    need exceed the free blocks: request 2 is paused, and request 1 gets the tokens."""
    rows = [(2, 9), (25, 1), (1, 9)]
    trace = Trace("t", [TraceRequest(i, 0.0, prompt, new, new) for i, (prompt, new) in enumerate(rows)], "0" * 64, "")
    config = config_of(
        policy="max_utilization", tokens_per_block=8, chunk_unit=8, num_blocks=7, max_num_tokens=9, max_input_len=95
    )
    run(trace, config, tmp_path / "apart", together=False)
    run(trace, config, tmp_path / "together", together=True)
    assert files(tmp_path / "together") == files(tmp_path / "apart")
    lines = [json.loads(line) for line in files(tmp_path / "together")["iterations.jsonl"].splitlines()]
    assert [entry["request_id"] for entry in lines[8]["ifbbench"]["paused"]] == [2]
    assert lines[8]["Total Context Tokens"] == 8


def test_requests_of_a_priority_that_arrive_together_are_fetched_at_once(tmp_path: Path) -> None:
    """The look-ahead has room for one of requests 14 and 15, and both enter before those that wait. If the other were
    fetched an iteration later, iterations between arrivals would not repeat."""
    outputs = [1, 1, 5, 1, 4, 3, *[1] * 7]
    trace = trace_of([(0, 1, length, 0, 0.5) for length in outputs] + [(1368, 1, 1, 0, one) for one in (0.5, 0.9, 0.9)])
    config = config_of(max_batch_size=3, max_num_tokens=60, num_blocks=25)
    run(trace, config, tmp_path / "apart", together=False)
    recorder = run(trace, config, tmp_path / "together", together=True)
    assert recorder.together > 0
    assert files(tmp_path / "together") == files(tmp_path / "apart")


def test_a_request_that_ends_while_an_iteration_is_decided_leaves_its_slot_to_the_next(tmp_path: Path) -> None:
    """A request to pause has a token in flight, which is collected before the decision is made again. That completes
    another request, whose batch slot a waiting one gets with the next iteration."""
    lengths = [
        (42, 19),
        (26, 8),
        (16, 2),
        (4, 1),
        (9, 24),
        (32, 27),
        (25, 18),
        (48, 22),
        (31, 16),
        (28, 28),
        (14, 24),
        (33, 1),
        (20, 25),
        (28, 1),
        (38, 22),
        (42, 6),
    ]
    arrivals = [TraceRequest(i, 4e-5 * i, prompt, new, new) for i, (prompt, new) in enumerate(lengths)]
    config = config_of(
        max_batch_size=8,
        policy="max_utilization",
        overlap=Overlap.ASYNC,
        chunk_unit=None,
        max_num_tokens=256,
        max_input_len=60,
    )
    run(Trace("t", arrivals, "0" * 64, ""), config, tmp_path / "apart", together=False)
    recorder = run(Trace("t", arrivals, "0" * 64, ""), config, tmp_path / "together", together=True)
    assert recorder.together > 0
    assert files(tmp_path / "together") == files(tmp_path / "apart")


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("every", [1, 7])
def test_long_stretches_while_others_wait(tmp_path: Path, policy: str, every: int) -> None:
    """Head-of-line blocking, the end of the pool and arrivals in the middle of a stretch."""
    rows = [(0.0, 8, 80), (0.0, 40, 30), (0.0, 50, 40), (0.002, 30, 20), (0.01, 3, 60), (1.0, 5, 90)]
    trace = Trace(
        "long", [TraceRequest(index, s, prompt, out, out) for index, (s, prompt, out) in enumerate(rows)], "0" * 64, ""
    )
    config = config_of(policy=policy, num_blocks=30)
    run(trace, config, tmp_path / "apart", together=False, every=every)
    recorder = run(trace, config, tmp_path / "together", together=True, every=every)
    assert recorder.together > 100
    assert files(tmp_path / "together") == files(tmp_path / "apart")


@holds(
    20,
    500,
    rows=requests,
    sizes=st.sampled_from([(12,), (20,), (33,), (16, 96), (13, 40), (96, 24)]),
    changes=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
            "chunk_unit": st.sampled_from([None, 4]),
            "overlap": OVERLAPS,
            "max_batch_size": st.integers(1, 8),
        }
    ),
    reuses=st.booleans(),
)
def test_sequences_that_wrap_are_advanced_together(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    sizes: tuple[int, ...],
    changes: dict[str, Any],
    reuses: bool,
) -> None:
    """Also with several attention windows, and with sequences on both sides of the end of a window; or with one
    window and reuse, where batches overwrite the blocks."""
    layouts = tuple(WindowLayout((number,), AttentionWindow(4, size, 96), 60) for number, size in enumerate(sizes))
    reuse, folder = ReuseRules(enabled=reuses and len(sizes) == 1), tmp_path_factory.mktemp("runs")
    config = config_of(windows=layouts, reuse=reuse, **changes)
    shares = [(size if size < 96 else None, 1 / len(sizes)) for size in sizes]
    run(trace_of(rows), config, folder / "apart", together=False, windows=shares)
    recorder = run(trace_of(rows), config, folder / "together", together=True, windows=shares)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


@holds(10, 200, rows=requests, streaming=st.lists(st.booleans(), min_size=16, max_size=16))
def test_streaming_requests_are_advanced_together(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], streaming: list[bool]
) -> None:
    folder, config = tmp_path_factory.mktemp("runs"), config_of(chunk_unit=4)

    def make(index: int, row: TraceRequest) -> Request:
        return Request(
            row.request_id,
            row.prompt_len,
            row.max_new_tokens,
            output_len=row.output_len,
            index=index,
            options=OutputOptions(streaming=streaming[index]),
        )

    run(trace_of(rows), config, folder / "apart", together=False, make=make)
    run(trace_of(rows), config, folder / "together", together=True, make=make)
    assert files(folder / "together") == files(folder / "apart")


@holds(
    20,
    500,
    rows=requests,
    changes=configs,
    tasks=st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=16, max_size=16),
    device_pages=st.integers(2, 6),
    host_pages=st.integers(0, 7),
)
def test_adapters_are_loaded_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    tasks: list[int | None],
    device_pages: int,
    host_pages: int,
) -> None:
    """With fewer pages than adapters, so that prompts evict adapters and wait for pages."""
    source = FakeSource({0: 1, 1: 2, 2: 1, 3: 2})
    lora = LoraConfig(source, device_pages, host_pages, page_bytes=40, value_bytes=4)
    config, trace, folder = config_of(**changes, lora=lora), trace_of(rows), tmp_path_factory.mktemp("runs")

    def make(index: int, row: TraceRequest) -> Request:
        return without_tokens(index, row, lora_task_id=tasks[index])

    run(trace, config, folder / "apart", together=False, make=make)
    recorder = run(trace, config, folder / "together", together=True, make=make)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")
    assert (folder / "together/adapters").read_text() == (folder / "apart/adapters").read_text()


@holds(
    20,
    500,
    rows=requests,
    changes=st.one_of(configs, tight_configs),
    widths=st.sampled_from([(2,), (3,), (1, 2), (3, 3, 3, 1)]),
    is_static=st.booleans(),
)
def test_beams_are_advanced_together(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    widths: tuple[int, ...],
    is_static: bool,
) -> None:
    """Also of requests that differ in beam width, which do not run beside each other."""
    more: dict[str, Any] = {"max_beam_width": 3, "overlap": None, "pp_size": 1, "reuse": ReuseRules()}
    if is_static:
        more |= {"batching_type": BatchingType.V1, "chunk_unit": None, "max_num_tokens": 90}
    config = config_of(**changes | more | {"num_blocks": 3 * changes["num_blocks"]}, max_input_len=95)
    trace, folder = trace_of(rows), tmp_path_factory.mktemp("runs")

    def make(index: int, row: TraceRequest) -> Request:
        return without_tokens(index, row, beam_width=widths[index % len(widths)])

    run(trace, config, folder / "apart", together=False, make=make)
    recorder = run(trace, config, folder / "together", together=True, make=make)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


@holds(
    20,
    500,
    rows=requests,
    changes=configs,
    concurrency=st.sampled_from([None, None, 3]),
    every=st.sampled_from([1, 4]),
    window=st.sampled_from([None, None, 16]),
)
def test_static_batches_are_advanced_together(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    concurrency: int | None,
    every: int,
    window: int | None,
) -> None:
    """Members that are complete pad the batch until the last one is."""
    static = {"batching_type": BatchingType.V1, "chunk_unit": None, "overlap": None}
    config, trace, folder = config_of(**changes | static), trace_of(rows), tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"concurrency": concurrency, "every": every, "window": window}
    run(trace, config, folder / "apart", together=False, **options)
    recorder = run(trace, config, folder / "together", together=True, **options)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")
    assert (folder / "together/steps.jsonl").read_text() == (folder / "apart/steps.jsonl").read_text()


@holds(
    20,
    500,
    rows=requests,
    changes=st.one_of(configs, tight_configs),
    window=st.integers(1, 40),
    tunes=st.sampled_from([(True, False), (False, True), (True, True)]),
)
def test_tuned_limits_are_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    changes: dict[str, Any],
    window: int,
    tunes: tuple[bool, bool],
) -> None:
    """With tables in which such small batches matter, so that the limits change again and again."""
    config = config_of(
        **changes | {"max_input_len": 95, "tunes_batch_size": tunes[0], "tunes_num_tokens": tunes[1]},
        tuning_window=window,
    )
    folder = tmp_path_factory.mktemp("runs")
    with (
        mock.patch.object(dynamic_limits, "BATCH_SIZES", ((2, 1), (3, 2), (4, 3), (5, 4), (7, 5), (8, 6))),
        mock.patch.object(dynamic_limits, "GRANULARITY", 1),
        mock.patch.object(dynamic_limits, "LEAST_TOKENS", ((2.0, 64), (0.5, 16), (0.0, 8))),
    ):
        run(trace_of(rows), config, folder / "apart", together=False)
        recorder = run(trace_of(rows), config, folder / "together", together=True)
    event(f"advanced together: {recorder.together > 0}")
    assert files(folder / "together") == files(folder / "apart")


@pytest.mark.parametrize(("policy", "together"), [("guaranteed_no_evict", 8), ("max_utilization", 0)])
def test_chunks_of_one_prompt_are_advanced_together(tmp_path: Path, policy: str, together: int) -> None:
    """Ten chunks of eight tokens, of which the last is not like the others. A policy that may pause decides each."""
    trace = Trace("chunks", [TraceRequest(0, 0.0, 80, 1, 1)], "0" * 64, "")
    config = config_of(policy=policy, chunk_unit=4, max_num_tokens=8, max_input_len=95)
    run(trace, config, tmp_path / "apart", together=False)
    recorder = run(trace, config, tmp_path / "together", together=True)
    assert recorder.together == together
    assert files(tmp_path / "together") == files(tmp_path / "apart")
    spans = [json.loads(line) for line in files(tmp_path / "together")["spans.jsonl"].splitlines()]
    assert [span["chunks"] for span in spans if span["phase"] == "context"] == [[8] * 10]


def test_an_attention_window_costs_what_it_costs_one_by_one(tmp_path: Path) -> None:
    trace = Trace("window", [TraceRequest(i, 0.0, 5 + i, 60, 60) for i in range(4)], "0" * 64, "")
    run(trace, config_of(), tmp_path / "apart", together=False, window=16)
    recorder = run(trace, config_of(), tmp_path / "together", together=True, window=16)
    assert recorder.together > 40
    assert files(tmp_path / "together") == files(tmp_path / "apart")


def test_the_records_of_a_stretch_are_those_of_its_iterations(tmp_path: Path) -> None:
    """What is printed or passed to callbacks, one iteration at a time."""
    apart: list[IterationRecord] = []
    together: list[IterationRecord] = []

    class Listener:
        def __init__(self, records: list[IterationRecord]) -> None:
            self.records = records

        def iteration(self, record: IterationRecord) -> None:
            self.records.append(record)

        def stretch(self, stretch: Stretch) -> None:
            self.records.extend(stretch.records())

        def left(self, request: Request, error: str | None) -> None:
            raise AssertionError(error)

    def never(now_s: float) -> float | None:
        return None

    for records, change in ((apart, None), (together, never)):
        waiting = [Request(i, 5 + i, 40, index=i) for i in range(3)]
        clock = VirtualClock()
        manager = make_loop(
            config_of(),
            SimulatedExecutor(COST_MODEL, clock),
            clock,
            handing_out(waiting),
            lambda response: None,
            Listener(records),
            next_change=change,
        )
        while manager.step():
            pass
    statistics = IterationStatistics(config_of().batching_type, 6)
    assert [statistics.fields(record) for record in together] == [statistics.fields(record) for record in apart]
    assert [(record.start_s, record.submit_s, record.end_s) for record in together] == [
        (record.start_s, record.submit_s, record.end_s) for record in apart
    ]
    assert [[r.request_id for r in record.finished] for record in together] == [
        [r.request_id for r in record.finished] for record in apart
    ]
