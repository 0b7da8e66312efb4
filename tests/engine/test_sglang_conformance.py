"""SGLang's scheduler against SGLang's own: recorded workloads and decisions, and proof that each rule matters to one.

`sglang_cases.json.gz` has the answers of the `Scheduler` of SGLang 0.5.23 to workloads that `benchmarks.sglang_oracle`
drew, in the format that `python -m tests.conformance` replays.
"""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.mutation import changed, fails
from tests.conformance.outcome import Case
from tests.conformance.sglang import replay_run

CASES = Path(__file__).with_name("sglang_cases.json.gz")
# In the order of their imports; the replay imports the scheduler.
NAMES = (
    "radix_tree",
    "cache",
    "admission",
    "order",
    "ratio",
    "in_flight",
    "running",
    "state",
    "slots",
    "retraction",
    "decode",
    "preemption",
    "prefill",
    "repetition",
    "scheduler",
)
MODULES = [
    *(f"ifbbench.schedulers.sglang.{name}" for name in NAMES),
    "ifbbench.schedulers.engines",
    "tests.conformance.sglang",
]

# Each rule, and edits that change it: the module, what its source has once, and what stands there instead.
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "a prefill batch has precedence": [
        (
            "scheduler",
            "if not decide_prefill(state, decision):",
            "if len(state.running) or not decide_prefill(state, decision):",
        ),
    ],
    "a full engine tries no request": [
        (
            "prefill",
            "if (state.is_full or not state.queue) and state.chunked is None:",
            "if not state.queue and state.chunked is None:",
        ),
    ],
    "the engine is not full when a request has left": [
        ("scheduler", "if state.has_left or not len(state.running):", "if not len(state.running):"),
    ],
    "the first batch of an empty engine leaves it open": [
        ("scheduler", "if state.has_left or not len(state.running):", "if state.has_left:"),
    ],
    "a chunk is published before the next one": [
        ("scheduler", "            self.kv_cache.publish(state.chunked, state.chunked.position)\n", ""),
    ],
    "running requests count by the ratio": [
        ("admission", "shares = expected * ratio\n", "shares = expected * 1.0\n"),
    ],
    "certain outputs count in full": [
        ("admission", "np.where(running.ignores_eos, expected, shares)", "shares"),
    ],
    "a new request counts with a page": [
        ("admission", "MAX_EXPECTED) + self._page_size >= self.left", "MAX_EXPECTED) >= self.left"),
    ],
    "chosen requests are charged their outputs": [
        ("admission", "self._total += paged + self._page_size + expected", "self._total += paged + self._page_size"),
    ],
    "prompts of a batch are limited": [
        ("admission", "self.num_chosen >= self._rules.prefill_max_requests", "False"),
    ],
    "without chunks, tokens of a batch are limited": [
        ("admission", "self.num_chosen and self._paged(tokens) >= self._input", "False"),
    ],
    "what is reused is not available": [
        ("prefill", "    state.kv_cache.lock(match)\n", ""),
    ],
    "the ratio falls with each decode batch": [
        ("decode", "        state.ratio.decay()\n", "        pass\n"),
    ],
    "the ratio rises after a retraction": [
        ("ratio", "self.current = min(1.0, expected", "self.current = self.current + 0 * min(1.0, expected"),
    ],
    "the fewest outputs are retracted first": [
        (
            "retraction",
            "sorted(state.running, key=lambda request: _keeping(state, request), reverse=True)",
            "list(state.running)",
        ),
    ],
    "of equal ones the longest prompt is retracted": [
        (
            "retraction",
            "by_length = request.num_outputs, -request.original_prompt_len",
            "by_length = request.num_outputs, 0",
        ),
    ],
    "a retracted request goes to the end of the queue": [
        (
            "state",
            "        self.queue.append(request)\n",
            "        self.queue.insert(0 if request.pauses else len(self.queue), request)\n",
        ),
    ],
    "room is made for the steps after a retraction": [
        ("retraction", "    state.kv_cache.make_room(remaining * RETRACT_STEPS)\n", ""),
    ],
    "a request whose last output is in flight does not decode": [
        ("scheduler", "            request.finish_scheduling()\n", "            pass\n"),
    ],
    "outputs enter the tree at the end": [
        (
            "state",
            "min(computed, request.original_prompt_len + request.num_outputs)",
            "request.original_prompt_len",
        ),
    ],
    "prompts enter the tree when they are computed": [
        (
            "scheduler",
            "                self.kv_cache.publish(chunk.request, chunk.start + chunk.length)\n",
            "                pass\n",
        ),
    ],
    "the leaf is split where the prompt ends": [
        ("cache", "if 0 < prompt < length:", "if False:"),
    ],
    "copies of what the tree has become free": [
        (
            "cache",
            "        self.free.give_up(pages[held.tokens // self.page_size : found.length // self.page_size])\n",
            "",
        ),
    ],
    "a lookup is a use": [
        ("radix_tree", "            child.used = now\n", ""),
    ],
    "the least recently used leaf is evicted": [
        ("radix_tree", '"lru": lambda node: (node.used,)', '"lru": lambda node: (node.created,)'),
    ],
    "hits of one request count once": [
        (
            "radix_tree",
            "node.hits += length > inserted\n            self._offer(child)",
            "node.hits += 1\n            self._offer(child)",
        ),
    ],
    "prefixes of waiting requests count as used": [
        ("order", "if self._passes % REFRESH_INTERVAL == 1:", "if False:"),
    ],
    "lpm: requests that share with earlier ones wait": [
        (
            "order",
            "queue.sort(key=lambda request: (request in later, 0 if request in later else -matched[request]))",
            "queue.sort(key=lambda request: -matched[request])",
        ),
    ],
    "lof: the longest output is first": [
        ("order", "(request.order[0], -max_outputs(request))", "(request.order[0], max_outputs(request))"),
    ],
    "hrrn: requests age": [
        ("order", "waited = self._computed() - self._arrived_at[request]", "waited = 1"),
    ],
    "shortest-prefill-first: a chunk leaves room": [
        ("order", "return (budget - reserved) // page * page if reserved else None", "return None"),
    ],
    "mixed batches decode": [
        ("prefill", "if state.rules.mixes_chunks and len(state.running):", "if False:"),
    ],
    "priorities order the queue": [
        (
            "state",
            "request.order = (-request.priority if self.rules.is_priority else 0.0, self._num_queued)",
            "request.order = (0.0, self._num_queued)",
        ),
    ],
    "a higher priority takes the place of a lower one": [
        ("preemption", "if not victims or missing > 0:", "if True:"),
    ],
}


@cache
def cases() -> list[Case]:
    recorded: list[Case] = json.loads(gzip.decompress(CASES.read_bytes()))["cases"]
    return recorded


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_each_batch_is_that_of_sglang(case):
    replay_run(case)


def test_all_recorded_decisions(shared_dir, capsys):
    assert main([str(shared_dir / "golden" / "sglang_decisions.json.gz")]) == 0
    assert capsys.readouterr().out.endswith("600 passed, 0 failed, 0 skipped\n")


@pytest.mark.slow
def test_the_copied_modules_pass_unchanged():
    with changed(MODULES, [], "replay_run") as copied:
        assert copied is not replay_run
        assert not [case["name"] for case in cases() if fails(copied, case)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_changed_rule_fails_a_case(rule):
    with changed(MODULES, MUTATIONS[rule], "replay_run") as mutated:
        assert any(fails(mutated, case) for case in cases())
