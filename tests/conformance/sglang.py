"""Replays of SGLang's decisions: admission passes, operations on the radix tree, and whole workloads."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.plan import Plan
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.engine.sampling_params import StopConditions
from ifbbench.engine.tokens import KnownTokens, SymbolicTokens, TokenIds
from ifbbench.kv.sequence import ReuseRules
from ifbbench.kv.store import KvStore
from ifbbench.kv.tiers import KvTiers
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.sglang.admission import Need, PrefillPass, Running, Verdict
from ifbbench.schedulers.sglang.cache import SglangCache
from ifbbench.schedulers.sglang.free_pages import FreePages
from ifbbench.schedulers.sglang.host_pages import HostPages
from ifbbench.schedulers.sglang.prefill import MIN_LOADED
from ifbbench.schedulers.sglang.radix_tree import Match, RadixTree
from ifbbench.schedulers.sglang.rules import SglangRules
from ifbbench.schedulers.sglang.scheduler import SglangScheduler
from ifbbench.schedulers.sglang.storage import Storage
from ifbbench.settings.modes import Overlap
from ifbbench.virtual_clock import VirtualClock
from tests.conformance.outcome import Case, Mismatch, expect_equal

END_TOKEN = 1
MAX_LEN = 4096
# Rounds after which a workload that has not ended never will.
MAX_ROUNDS = 100_000


def decisions(golden: Mapping[str, Any]) -> Iterator[Case]:
    """The cases of a file of decisions."""
    for index, case in enumerate(golden["admission"]):
        yield {"name": f"admission-{index}", "kind": "admission", **case}
    for index, case in enumerate(golden["radix_cache"]):
        yield {"name": f"radix_cache-{index}", "kind": "radix_cache", **case}


def replay_decisions(case: Case) -> None:
    """Replay an admission pass, or operations on a tree."""
    kinds = {
        "admission": _replay_admission,
        "radix_cache": _replay_tree,
        "host_cache": _replay_host,
        "storage": _replay_storage,
    }
    kinds[case["kind"]](case)


def _replay_admission(case: Case) -> None:
    rules = SglangRules(
        chunk_size=case["chunked_prefill_size"],
        max_prefill_tokens=case["max_prefill_tokens"],
        prefill_max_requests=case["prefill_max_requests"],
    )
    names = ("prompt_len", "outputs", "max_new_tokens", "ignore_eos")
    locked = 0
    batch = PrefillPass(
        rules,
        case["page_size"],
        lambda: case["free_tokens"] + case["evictable_tokens"] - locked,
        Running(*[[one[name] for one in case["running"]] for name in names]),
        case["new_token_ratio"],
        case["mixed_decode_tokens"],
        not case.get("disable_radix_cache", False),
    )
    if (given := case["continuing"]) is not None:
        need = Need(given["prompt_len"] - given["computed"], given["computed"], given["max_new_tokens"])
        expect_equal("continuing", batch.continuing(need), given["tokens"])
    for index, given in enumerate(case["waiting"]):
        if batch.state() is Verdict.OTHER:
            expect_equal(
                f"request {index}", "not judged", "not judged" if case.get("budget_spent") else given["result"]
            )
            return
        locked += given["cached"]
        need = Need(
            given["prompt_len"] - given["cached"],
            given["cached"],
            given["max_new_tokens"],
            given.get("outputs", 0),
            given["ignore_eos"],
        )
        verdict, tokens = batch.judge(need)
        expect_equal(f"request {index}", (verdict.value, tokens or None), (given["result"], given["tokens"]))
        locked -= 0 if tokens else given["cached"]
        if verdict is not Verdict.CONTINUE:
            return


class _Freed:
    """Takes the pages that a tree gives up."""

    def __init__(self) -> None:
        self.pages: list[int] = []

    def add(self, pages: IntArray) -> None:
        self.pages += pages.tolist()


def _replay_tree(case: Case) -> None:
    """With token ids, and with symbolic tokens. Each operation says what it found and what could be evicted after it;
    newer cases also what could not, and which pages it gave up."""
    for kind in (lambda ids: TokenIds(np.array(ids, np.int32)), lambda ids: SymbolicTokens([(one, 1) for one in ids])):
        size, freed, locks = case["page_size"], _Freed(), dict[int, Match]()
        tree = RadixTree(size, freed.add, case.get("eviction_policy", "lru"))
        for index, (operation, given, *expected) in enumerate(case["operations"]):
            found = 0
            if operation == "evict":
                found = tree.evict(given)
            elif operation == "insert":
                one = given if isinstance(given, dict) else {"tokens": given}
                pages = np.arange(len(one["tokens"]) // size, dtype=np.int32) + one.get("first_page", 0)
                known = KnownTokens(kind(one["tokens"]))
                found = tree.insert(known, pages, one.get("inserted", 0), one.get("priority", 0)).length
            elif operation == "unlock":
                tree.unlock(locks.pop(given).node)
            else:
                match = tree.match(KnownTokens(kind(given)), len(given))
                found = match.length
                if operation == "lock":
                    locks[index] = match
                    tree.lock(match.node)
            answers = [found, tree.evictable, tree.protected, list(freed.pages)]
            expect_equal(f"operation {index}", answers[: len(expected)], expected)
            freed.pages.clear()


def _replay_host(case: Case) -> None:
    """A tree with host memory. Each operation says what it found, how many tokens could be evicted from the device,
    how many not, and how many were free in both memories, after it."""
    size, locks = case["page_size"], dict[int, Match]()
    host = HostPages(case["num_host_pages"], size, case["write_policy"], keeps_copies=False)
    free = FreePages(case["num_pages"])
    tree = RadixTree(size, free.give_up, case["eviction_policy"], host)

    def take(tokens: int) -> IntArray | None:
        if tokens > free.count * size:
            tree.evict(tokens - free.count * size)
        return None if tokens > free.count * size else free.take(tokens // size).copy()

    for index, (operation, given, *expected) in enumerate(case["operations"]):
        found: Any = None
        if operation == "evict":
            found = tree.evict(given)
        elif operation == "insert":
            known, length = KnownTokens(TokenIds(np.array(given["tokens"], np.int32))), len(given["tokens"])
            pages = take(length - length % size)
            assert pages is not None
            before = tree.insert(known, pages, given["inserted"], given["priority"]).length
            free.give_up(pages[: before // size])
        elif operation == "unlock":
            tree.unlock(locks.pop(given).node)
        else:
            match = tree.match(KnownTokens(TokenIds(np.array(given, np.int32))), len(given))
            found = [match.length, match.host_length]
            if operation == "lock":
                locks[index] = match
                tree.lock(match.node)
            elif operation == "load":
                found.append(_load(tree, match, take))
        answers = [found, tree.evictable, tree.protected, free.count * size, host.free.count * size]
        expect_equal(f"operation {index}, {operation}", answers, expected)


def _load(tree: RadixTree, match: Match, take: Callable[[int], IntArray | None]) -> int:
    """Load what the host has of a match, if there is room; returns how many tokens."""
    if match.host_length < MIN_LOADED:
        return 0
    tree.lock(match.host_node)
    if (pages := take(match.host_length)) is not None:
        tree.load(match, pages)
    tree.unlock(match.host_node)
    return 0 if pages is None else match.host_length


def _replay_storage(case: Case) -> None:
    """A cache with host memory and storage behind it, of which each transfer takes a second. Each operation says what
    it found, how many tokens could be evicted from the device, how many were free in both memories, and how many
    prefetches hold, after it."""
    size, longest = case["page_size"], max(len(tokens) for tokens in _prompts(case))
    host = HostPages(case["num_host_pages"], size, case["write_policy"], keeps_copies=False)
    cache = SglangCache(case["num_pages"], size, 1, longest, True, case["eviction_policy"], host)
    clock = VirtualClock()
    clock.wait_until(1.0)  # the bytes of a transfer take no time beside the latency, but at 0 s a nanosecond
    tiers = KvTiers([KvStore("remote", 10**9, 1.0, 1e30, 1.0)], size, clock, False)
    policy, threshold = case["prefetch_policy"], case["prefetch_threshold"]
    storage = Storage(tiers, cache, SglangRules(prefetch_policy=policy, prefetch_threshold=threshold))
    cache.held_by_storage = storage.held_pages
    requests, tree = dict[int, Request](), cache.tree
    assert tree is not None
    for index, (operation, given, *expected) in enumerate(case["operations"]):
        found: Any = None
        if operation == "look_up":
            request = requests[index] = Request(index, len(given), 1, prompt_tokens=np.array(given, np.int32))
            storage.look_up(request)
            found = storage.waiting[request].matched
        elif operation == "insert":
            prompt = Request(index, len(given["tokens"]), 1, prompt_tokens=np.array(given["tokens"], np.int32))
            known, count = prompt.known_tokens(), len(given["tokens"]) // size
            assert known is not None
            assert cache.make_room(count * size)
            pages = cache.free.take(count).copy()
            before = tree.insert(known, pages).length
            cache.free.give_up(pages[: before // size])
        elif operation == "evict":
            found = tree.evict(given)
        elif operation == "evict_host":
            found = tree.evict_host(given)
        elif operation == "io":
            clock.wait_until(clock.now() + 1.0)
        elif operation == "check":
            storage.check()
        elif operation == "leave":
            storage.leave(requests.pop(given))
        else:
            request = requests[given]
            found = [storage.may_try(request), 0]
            if found[0]:
                first, end = storage.waiting.pop(requests.pop(given)).span
                found[1] = end - first
        answers = [found, tree.evictable, cache.free.count * size, host.free.count * size, storage.occupied]
        expect_equal(f"operation {index}, {operation}", answers, expected)
        cache.check_consistency()


def _prompts(case: Case) -> Iterator[list[int]]:
    for operation, given, *_more in case["operations"]:
        if operation in ("look_up", "insert"):
            yield given if operation == "look_up" else given["tokens"]


def limits_of(settings: Mapping[str, Any]) -> BatchingConfig:
    """The limits of a workload's settings, which have SGLang's names."""
    chunk = settings["chunked_prefill_size"]
    return BatchingConfig(
        policy="guaranteed_no_evict",
        max_batch_size=settings["max_running_requests"],
        max_num_tokens=None,
        max_seq_len=MAX_LEN,
        max_input_len=MAX_LEN - 1,
        tokens_per_block=settings["page_size"],
        num_blocks=settings["num_pages"],
        num_host_blocks=settings.get("num_host_pages", 0),
        reuse=ReuseRules(not settings["disable_radix_cache"]),
        overlap=None if settings["disable_overlap_schedule"] else Overlap.ASYNC,
        engine="sglang",
        sglang=SglangRules(
            schedule_policy=settings["schedule_policy"],
            conservativeness=settings["schedule_conservativeness"],
            chunk_size=chunk,
            max_prefill_tokens=settings["max_prefill_tokens"],
            prefill_max_requests=settings["prefill_max_requests"],
            mixes_chunks=settings["enable_mixed_chunk"] and chunk is not None,
            eviction_policy=settings["radix_eviction_policy"],
            write_policy=settings.get("hicache_write_policy", "write_through"),
            retracts_by_priority=settings["retraction_policy"] == "priority",
            is_priority=settings["enable_priority_scheduling"],
            preempts=settings["enable_priority_scheduling"] and not settings["disable_priority_preemption"],
            preemption_threshold=settings["priority_scheduling_preemption_threshold"],
            ignores_eos=settings["ignore_eos"],
        ),
    )


def token_of(given: Mapping[str, Any], index: int) -> int:
    """Output token `index` of a request of a workload: an end token where it ends early."""
    is_end = index == given["output_len"] - 1 and given["output_len"] < given["max_new_tokens"]
    return END_TOKEN if is_end else 10 + (given["id"] * 7 + index * 13) % 50


class _Executor:
    """Returns the tokens of a workload."""

    def __init__(self, requests: Mapping[int, Mapping[str, Any]]) -> None:
        self.scheduler: SglangScheduler | None = None
        self._given, self._answers = requests, deque[list[int]]()

    def submit(self, batch: Batch) -> None:
        assert self.scheduler is not None
        ends = [(chunk.request, chunk.start + chunk.length) for chunk in batch.context if chunk.is_last]
        for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
            ends.append((self.scheduler.table.requests[slot], position + 1))
        answer = [token_of(self._given[one.request_id], end - one.original_prompt_len) for one, end in ends]
        self._answers.append(answer)

    def collect(self) -> StepOutputs:
        return StepOutputs(np.array(self._answers.popleft(), np.int32))

    def close(self) -> None:
        return None


class _Noting:
    """A scheduler that notes each batch it decides, in the form of the cases, when it is decided."""

    def __init__(self, scheduler: SglangScheduler) -> None:
        self._scheduler = scheduler
        self.batches: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self, *arguments: Any) -> Plan:
        scheduler = self._scheduler
        plan = scheduler.schedule(*arguments)
        if not plan.does_nothing:
            cache = scheduler.kv_cache
            self.batches.append(
                {
                    "prefill": [[chunk.request.request_id, chunk.start, chunk.length] for chunk in plan.chunks],
                    "decode": [scheduler.table.requests[row].request_id for row in plan.rows.tolist()],
                    "queue": [request.request_id for request in scheduler.state.queue],
                    "free": cache.free_tokens,
                    "evictable": 0 if cache.tree is None else cache.tree.evictable,
                    "new_token_ratio": scheduler.state.ratio.current,
                }
            )
        return plan


def replay_run(case: Case) -> None:
    """Replay a workload; Mismatch names the first batch that differs."""
    settings, given = case["settings"], {one["id"]: one for one in case["requests"]}
    to_come = deque(sorted(case["requests"], key=lambda one: (one["round"], one["id"])))
    turn, done, executor = 0, set[int](), _Executor(given)

    def arrived(_count: int) -> list[Request]:
        found = []
        while to_come and to_come[0]["round"] <= turn:
            one = to_come.popleft()
            priority = float(one["priority"]) if settings["enable_priority_scheduling"] else 0.0
            found.append(
                Request(
                    one["id"],
                    len(one["prompt"]),
                    one["max_new_tokens"],
                    prompt_tokens=np.array(one["prompt"], np.int32),
                    priority=priority,
                    stop=StopConditions((END_TOKEN,)),
                )
            )
        return found

    def answered(response: Response) -> None:
        if response.error is not None:
            raise Mismatch(f"request {response.request.request_id} failed: {response.error}")
        if response.is_final:
            done.add(response.request.request_id)

    loop = make_loop(limits_of(settings), executor, VirtualClock(), arrived, answered)
    scheduler = loop.scheduler
    assert isinstance(scheduler, SglangScheduler)
    executor.scheduler = scheduler
    noting = _Noting(scheduler)
    loop.scheduler = noting
    while len(done) < len(given) and turn < MAX_ROUNDS:
        loop.step()
        turn += 1
    for index, (found, expected) in enumerate(zip(noting.batches, case["batches"], strict=False)):
        expect_equal(f"batch {index}", found, expected)
    expect_equal("number of batches", len(noting.batches), len(case["batches"]))
    scheduler.kv_cache.check_consistency()
