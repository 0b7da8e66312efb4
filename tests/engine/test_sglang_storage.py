"""Storage behind SGLang's host memory: recorded operations on SGLang's own tree, and reads in turn."""

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from ifbbench.kv.store import KvStore
from tests.conformance.sglang import replay_decisions

# Operations on the `UnifiedRadixCache` of SGLang 0.5.23 with a store behind it, and its answers: `python -m
# benchmarks.sglang_oracle --storage-operations 5000 --seed 300 --write FILE`.
CASES = json.loads(gzip.decompress(Path(__file__).with_name("sglang_storage_cases.json.gz").read_bytes()))["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_operations_answer_as_sglang_did(case):
    replay_decisions(case)


def test_the_cases_prefetch_under_each_policy():
    answers = [operation for case in CASES for operation in case["operations"] if operation[0] == "try"]
    assert sum(found[1] > 0 for _, _, found, *_ in answers) > 40
    assert sum(not found[0] for _, _, found, *_ in answers) >= 30
    assert {case["write_policy"] for case in CASES} == {"write_through", "write_through_selective", "write_back"}
    assert {case["prefetch_policy"] for case in CASES} == {"best_effort", "wait_complete"}


def test_reads_in_turn_begin_when_the_one_before_has_arrived():
    """Against times that are added up: some reads are dropped, one at a time is on its way."""
    for seed in range(50):
        draw = Random(seed)
        store = KvStore("remote", capacity=10_000, block_bytes=10.0, bandwidth=100.0, latency_s=0.5)
        store.write(1, list(range(100)), (), 0.0)
        store.advance(100.0)
        now_s, free_s, expected = 100.0, 100.0, list[float]()
        transfers = []
        for _ in range(8):
            now_s += draw.choice((0.0, 0.3, 2.0, 9.0))
            store.advance(now_s)
            begin_s = max(now_s, free_s)
            sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
            new = store.load_in_turn(1, [list(range(size)) for size in sizes], now_s)
            if draw.random() < 0.3:
                store.drop(new)
                sizes = sizes[:1] if begin_s == now_s else []
            for size in sizes:
                begin_s += size * 0.1 + 0.5
                expected.append(begin_s)
            free_s = begin_s
            transfers += new[: len(sizes)]
        store.advance(1000.0)
        assert [transfer.arrived_s for transfer in transfers] == pytest.approx(expected, abs=1e-6)
        assert store.counters.loaded == sum(round(transfer.size / 10) for transfer in transfers)
