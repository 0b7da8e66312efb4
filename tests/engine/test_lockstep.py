"""The ranks of attention data parallelism decide as engines of their own do that are stepped together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ifbbench.engine.drafts import DraftSettings
from ifbbench.engine.interfaces import Observer, Scheduler
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request, ReuseIdentity
from ifbbench.kv.sequence import ReuseRules
from ifbbench.schedulers.engines import find_scheduler, make_scheduler
from ifbbench.schedulers.limits import BatchingConfig, share_of
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.schedulers.vllm.rules import VllmRules
from ifbbench.settings.modes import Overlap
from ifbbench.virtual_clock import VirtualClock
from tests.replay.test_fast_forward import config_of

ENGINES = ("trtllm", "vllm", "sglang")


def limits_of(engine: str, draw: np.random.Generator, ranks: int) -> BatchingConfig:
    """Random limits of all ranks, in which prompts are cut and blocks run out."""
    rules: dict[str, Any] = {}
    overlaps = bool(draw.integers(2))
    if engine == "vllm":
        rules = {"vllm": VllmRules(max_active=ranks * 3 if draw.integers(2) else None), "chunk_unit": 1}
    elif engine == "sglang":
        rules = {"sglang": SglangRules(chunk_size=ranks * 16, mixes_chunks=bool(draw.integers(2))), "chunk_unit": 1}
    else:
        pauses = bool(draw.integers(2))  # a pause collects what is in flight, of all ranks
        overlaps &= not pauses
        rules = {"policy": "max_utilization" if pauses else "guaranteed_no_evict", "chunk_unit": 4}
        if draw.integers(3) == 0 and not overlaps:
            rules |= {"drafts": DraftSettings(2, acceptance=(0.6,))}
    return config_of(
        engine=engine,
        attention_dp_size=ranks,
        max_batch_size=ranks * int(draw.integers(2, 6)) + int(draw.integers(ranks)),
        max_num_tokens=ranks * 16 + int(draw.integers(ranks)),
        num_blocks=ranks * int(draw.integers(24, 40)),
        overlap=Overlap.ASYNC if overlaps else None,
        reuse=ReuseRules(bool(draw.integers(2)), False, False),
        reads_block_tables=False,
        **rules,
    )


def requests_of(draw: np.random.Generator, count: int) -> list[tuple[int, Callable[[], Request]]]:
    """Requests, each with the step in which it arrives; a third of them begin like others."""
    found, step = list[tuple[int, Callable[[], Request]]](), 0
    for index in range(count):
        step += int(draw.choice([0, 0, 1, 4, 40], p=[0.4, 0.2, 0.2, 0.15, 0.05]))
        prompt_len, output_len = int(draw.integers(1, 60)), int(draw.integers(1, 30))
        reserved = output_len + int(draw.integers(0, 6))
        runs = [(0, 8), (1000 * (index + 1), 100)] if draw.integers(3) == 0 else [(1000 * (index + 1), 108)]
        identity = ReuseIdentity(runs=runs, output_symbol=1000 * (index + 1) + 500)

        def make(
            at: tuple[int, int, int, int, ReuseIdentity] = (index, prompt_len, reserved, output_len, identity),
        ) -> Request:
            return Request(at[0], at[1], at[2], output_len=at[3], index=at[0], reuse=at[4])

        found.append((step, make))
    return found


@dataclass
class Stepped(Observer):
    """A loop on a device that does nothing, and what it completes in each step."""

    scheduler: Scheduler
    arrived: list[Request] = field(default_factory=list)
    records: list[IterationRecord] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = TokenGenerationLoop(
            self.scheduler, NullExecutor(), VirtualClock(), self._get, lambda response: None, self
        )

    def _get(self, number: int) -> list[Request]:
        count = len(self.arrived) if number < 0 else number
        taken, self.arrived = self.arrived[:count], self.arrived[count:]
        return taken

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def left(self, request: Request, error: str | None) -> None:
        self.ended.append(request.request_id)

    def step(self) -> None:
        self.records, self.ended = [], []
        self.loop.step()
        for record in self.records:
            self.ended += [request.request_id for request in record.finished]


def seen(loops: list[Stepped]) -> dict[str, Any]:
    """What these loops did in their latest step, and what they hold."""
    records = [record for loop in loops for record in loop.records]
    states = [loop.scheduler.cache_state() for loop in loops]
    return {
        "context": sorted((one.request.index, one.start, one.length) for record in records for one in record.context),
        "generation": sum(record.num_generation for record in records),
        "tokens": sum(record.num_generation_tokens for record in records),
        "paused": sorted(pause.victim.index for record in records for pause in record.paused),
        "left out": {(one.request.index, str(one.limit)) for record in records for one in record.blocked},
        "ended": sorted(index for loop in loops for index in loop.ended),
        "blocks": sum(state.used_blocks or 0 for state in states),
        "taken": sum(state.allocated_total or 0 for state in states),
        "reused": sum(state.reused or 0 for state in states),
        "filled": sum(state.filled_tokens for state in states),
        "waiting": sorted(request.index for loop in loops for request in loop.scheduler.waiting),
    }


class Router:
    """Which rank gets a request, by the words of each engine's code, from what the single engines hold."""

    def __init__(self, engine: str, loops: list[Stepped], limits: BatchingConfig) -> None:
        self.engine, self.loops, self.limits, self.count = engine, loops, limits, 0
        self.queue: list[Request] = []

    def route(self, arrived: list[Request]) -> None:
        if self.engine == "trtllm":
            self.queue += arrived
            self._divide()
            return
        for request in arrived:
            loads = [self._load(loop) for loop in self.loops]
            turns = [(self.count + after) % len(loads) for after in range(len(loads))]
            self.count += 1
            rank = turns[0] if self.engine == "sglang" else min(turns, key=lambda turn: loads[turn])
            self.loops[rank].arrived.append(request)
            if self.engine == "vllm":  # the next one is sent when this one waits
                self.loops[rank].scheduler.admit(self._source_of(self.loops[rank]))

    def _source_of(self, loop: Stepped) -> Any:
        return loop.loop._source

    def _load(self, loop: Stepped) -> float:
        if self.engine != "vllm":
            return 0.0
        scheduler: Any = loop.scheduler
        waiting, state = len(scheduler.queue), scheduler.cache_state()
        return len(scheduler.running) + waiting * (1 + 6 * max(0.0, state.used_blocks / state.max_blocks - 0.5))

    def _divide(self) -> None:
        actives: list[Any] = [loop.scheduler.active for loop in self.loops]  # type: ignore[attr-defined]
        counts, most = [len(one) for one in actives], self.limits.of_rank(0).max_batch_size
        tokens = [sum(request.original_prompt_len for request in one.by_slot.values()) for one in actives]
        entering = self.queue[: sum(most - count for count in counts)]
        self.queue = self.queue[len(entering) :]
        even = max(-(-(sum(counts) + len(entering)) // len(counts)), *counts)
        for request in sorted(entering, key=lambda one: one.original_prompt_len, reverse=True):
            rank = min((tokens[rank], counts[rank], rank) for rank in range(len(counts)) if counts[rank] < even)[2]
            self.loops[rank].arrived.append(request)
            tokens[rank] += request.original_prompt_len
            counts[rank] += 1


def check_against_single_engines(engine: str, seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 5))
    limits = limits_of(engine, draw, ranks)
    requests = requests_of(draw, count)
    together = Stepped(make_scheduler(limits, VirtualClock()))
    singles = [Stepped(find_scheduler(engine)(limits.of_rank(rank), VirtualClock())) for rank in range(ranks)]
    router, step = Router(engine, singles, limits), 0
    while requests or together.loop._has_work or together.loop.num_in_flight:
        arrived = []
        while requests and requests[0][0] <= step:
            arrived.append(requests.pop(0)[1])
        together.arrived += [make() for make in arrived]
        is_idle = not any(one.loop._has_work for one in singles)
        if engine == "sglang" and arrived and is_idle:
            for one in singles:
                one.scheduler.begin()  # type: ignore[attr-defined]
        router.route([make() for make in arrived])
        together.step()
        for one in singles:
            one.step()
        expected, found = seen(singles), seen([together])
        expected["waiting"] = sorted(expected["waiting"] + [request.index for request in router.queue])
        found["waiting"] = sorted(found["waiting"] + [request.index for request in together.arrived])
        assert found.pop("left out") >= expected.pop("left out")  # a rank that runs nothing alone has no record
        assert found == expected, f"step {step}"
        of_rank = limits.of_rank(0)
        for record in together.records:
            lengths = [0] * ranks
            for chunk in record.context:
                lengths[chunk.request.slot % ranks] += chunk.length if chunk.request.slot >= 0 else 0
            assert max(lengths) <= of_rank.token_budget
        step += 1
    assert found["blocks"] == 0 or limits.reuse.enabled
    assert not together.scheduler.table.requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_decide_as_single_engines_that_are_stepped_together(engine: str, seed: int) -> None:
    check_against_single_engines(engine, seed, 20)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3, 63, 10))
@pytest.mark.parametrize("engine", ENGINES)
def test_more_ranks_decide_as_single_engines_that_are_stepped_together(engine: str, first: int) -> None:
    for seed in range(first, first + 10):
        check_against_single_engines(engine, seed, 60)


def stepped(limits: BatchingConfig, requests: list[Request]) -> Stepped:
    loop = Stepped(make_scheduler(limits, VirtualClock()))
    loop.arrived = requests
    return loop


def ranks_of(loop: Stepped, ranks: int) -> dict[int, list[int]]:
    """The requests that run in each rank, in the order of their arrival."""
    found: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for row, request in loop.scheduler.table.requests.items():
        found[row % ranks].append(request.index)
    return {rank: sorted(indices) for rank, indices in found.items()}


def test_a_prompt_longer_than_the_budget_of_a_rank_takes_several_iterations() -> None:
    for engine in ENGINES:
        rules: dict[str, Any] = {"vllm": VllmRules()} if engine == "vllm" else {"sglang": SglangRules(chunk_size=64)}
        limits = config_of(
            engine=engine,
            attention_dp_size=4,
            max_batch_size=8,
            chunk_unit=4,
            num_blocks=100,
            **{} if engine == "trtllm" else rules,
        )
        loop = stepped(limits, [Request(0, 40, 2, index=0)])
        lengths = []
        for _ in range(3):
            loop.step()
            lengths += [chunk.length for record in loop.records for chunk in record.context]
        assert lengths == [16, 16, 8], engine


def test_vllm_gives_a_request_to_the_rank_with_the_fewest() -> None:
    limits = config_of(engine="vllm", vllm=VllmRules(), attention_dp_size=3, max_num_tokens=300, chunk_unit=1)
    loop = stepped(limits, [Request(index, 4, 20, index=index) for index in range(4)])
    loop.step()
    # The fourth finds equal loads; the turn is that of rank 0 again.
    assert ranks_of(loop, 3) == {0: [0, 3], 1: [1], 2: [2]}
    loop.loop.stop(1)
    loop.arrived = [Request(index, 4, 20, index=index) for index in (5, 6)]
    loop.step()
    # Rank 1 has none, then ranks 1 and 2 have one each, and it is the turn of rank 2.
    assert ranks_of(loop, 3) == {0: [0, 3], 1: [5], 2: [2, 6]}


def test_a_queue_counts_more_where_most_of_the_cache_is_used() -> None:
    limits = config_of(
        engine="vllm",
        vllm=VllmRules(max_active=2),
        attention_dp_size=2,
        max_num_tokens=300,
        num_blocks=40,
        chunk_unit=1,
    )
    loop = stepped(limits, [Request(0, 56, 20, index=0), Request(1, 4, 20, index=1), Request(2, 4, 20, index=2)])
    loop.step()
    loop.step()
    # Each rank may run one: request 2 waits in rank 0, of which 15 of 20 blocks are in use.
    assert [one.index for one in loop.scheduler.waiting] == [2]
    loop.arrived = [Request(index, 4, 20, index=index) for index in (3, 4)]
    loop.step()
    assert [[one.index for one in rank.waiting] for rank in loop.scheduler.ranks] == [[2], [3, 4]]  # type: ignore[attr-defined]


def test_sglang_gives_requests_to_ranks_in_turn() -> None:
    limits = config_of(engine="sglang", sglang=SglangRules(chunk_size=300), attention_dp_size=3, max_num_tokens=300)
    loop = stepped(limits, [Request(index, 4, 20, index=index) for index in range(4)])
    loop.step()
    loop.loop.stop(1)
    loop.arrived = [Request(5, 4, 20, index=5)]
    loop.step()
    assert ranks_of(loop, 3) == {0: [0, 3], 1: [5], 2: [2]}


def test_tensorrt_llm_divides_requests_that_enter_together() -> None:
    limits = config_of(attention_dp_size=3, max_batch_size=9, max_num_tokens=300, num_blocks=90)
    prompts = [50, 20, 9, 40, 5, 5]
    loop = stepped(limits, [Request(index, length, 20, index=index) for index, length in enumerate(prompts)])
    loop.step()
    # 50, 40 and 20 go to ranks 0 to 2; 9 joins the 20, and the others the next ones with less than two.
    assert ranks_of(loop, 3) == {0: [0, 5], 1: [3, 4], 2: [1, 2]}
    # One queue: what no rank has room for waits for the first that has.
    loop.arrived = [Request(10 + index, 4, 20, index=10 + index) for index in range(5)]
    loop.step()
    assert [len(one) for one in ranks_of(loop, 3).values()] == [3, 3, 3]
    assert [one.index for one in loop.scheduler.waiting] == [13, 14]
    loop.loop.stop(3)
    loop.step()
    assert 13 in ranks_of(loop, 3)[1]


def test_a_limit_smaller_than_the_number_of_ranks_is_one_for_each() -> None:
    limits = config_of(attention_dp_size=4, max_batch_size=3, max_num_tokens=2, num_blocks=18, num_host_blocks=9)
    of_rank = limits.of_rank(1)
    assert (of_rank.max_batch_size, of_rank.max_num_tokens, of_rank.max_input_len) == (1, 1, 1)
    assert (of_rank.num_blocks, of_rank.num_host_blocks, of_rank.rank) == (4, 2, 1)
    assert (share_of(None, 4), share_of(0, 4)) == (None, 0)
    assert share_of(65, 4, 8) == 16
    assert limits.num_slots == of_rank.num_slots == 4 * (1 + 8)
    assert of_rank.make_table().free_rows[-2:] == [5, 1]


def test_a_request_that_fits_in_no_rank_is_refused() -> None:
    limits = config_of(attention_dp_size=4, num_blocks=4 * 5, chunk_unit=4)
    loop = stepped(limits, [Request(0, 30, 4, index=0), Request(1, 12, 4, index=1)])
    loop.step()
    assert loop.ended == [0]
    assert loop.scheduler.find(1) is not None


@pytest.mark.parametrize("seed", range(4))
def test_no_rank_of_sglang_decodes_while_another_has_prompts_to_run_and_drafts(seed: int) -> None:
    draw = np.random.default_rng(seed)
    limits = config_of(
        engine="sglang",
        sglang=SglangRules(chunk_size=64),
        drafts=DraftSettings(2, acceptance=(0.6, 0.4)),
        attention_dp_size=4,
        max_batch_size=12,
        num_blocks=120,
    )
    loop, requests, step = stepped(limits, []), requests_of(draw, 30), 0
    ended, both = set[int](), 0
    while requests or loop.loop._has_work:
        while requests and requests[0][0] <= step:
            loop.arrived.append(requests.pop(0)[1]())
        loop.step()
        ended.update(loop.ended)
        for record in loop.records:
            assert not (record.context and record.num_generation)
            both += bool(record.context and record.held)
            if record.num_generation:
                assert record.drafts is not None
                assert record.drafts.requests <= record.num_generation
        step += 1
    assert both > 0
    assert ended == set(range(30))
