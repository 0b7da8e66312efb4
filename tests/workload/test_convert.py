"""Traces written in the formats of other tools."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ifbbench.workload.convert import FORMATS, Losses, Tokens, format_of
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.formats import write_lines
from ifbbench.workload.prompts import prompt_tokens, with_prefix
from ifbbench.workload.reading import read_trace
from ifbbench.workload.reuse import tokens_seen_before
from ifbbench.workload.spec import parse_spec
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest, num_blocks

TOKENS = Tokens(vocab_size=1000, seed=7)
SPEC = {
    "num_requests": 60,
    "prompt_len": {"distribution": "uniform", "min": 5, "max": 2500},
    "output_len": {"distribution": "uniform", "min": 1, "max": 40},
    "arrival": {"process": "poisson", "rate": 30},
}
SHARED = SPEC | {"shared_prefix": {"pools": 3, "len": 1024, "share": 0.7}}


def drawn(document=SPEC):
    return list(draw_trace(parse_spec(document, "some"), 1, ""))


def text(name, requests):
    return "".join(FORMATS[name].lines(requests, TOKENS))


def written(name, requests, tmp_path):
    path = tmp_path / f"trace{FORMATS[name].suffix}"
    write_lines(FORMATS[name].lines(requests, TOKENS), path)
    return path


def test_gpt_manager(tmp_path):
    requests = [structs.replace(row, lora_task_id=3) if row.request_id % 2 else row for row in drawn(SHARED)]
    path = written("gpt-manager", requests, tmp_path)
    document = json.loads(path.read_text())
    assert set(document) == {"metadata", "samples"}
    assert list(document["samples"][0]) == ["input_len", "input_ids", "output_len", "task_id", "delay"]
    assert [sample["task_id"] for sample in document["samples"]] == [3 if r.lora_task_id else -1 for r in requests]
    read = list(read_trace(path))
    assert [r.prompt_tokens for r in read] == [tuple(prompt_tokens(r, 1000, 7).tolist()) for r in requests]
    assert [r.output_len for r in read] == [r.output_len for r in requests]
    assert [r.arrival_s for r in read] == pytest.approx([r.arrival_s for r in requests], abs=1e-9)


def test_trtllm_bench():
    requests = drawn()
    rows = [json.loads(line) for line in text("trtllm-bench", requests).splitlines()]
    assert [list(row) for row in rows] == [["task_id", "input_ids", "output_tokens"]] * len(requests)
    assert [(row["task_id"], len(row["input_ids"]), row["output_tokens"]) for row in rows] == [
        (r.request_id, r.prompt_len, r.output_len) for r in requests
    ]


def test_lengths():
    requests = drawn()
    rows = list(csv.DictReader(text("lengths", requests).splitlines()))
    assert [(int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]), float(r["arrived_at"])) for r in rows] == [
        (r.prompt_len, r.output_len, r.arrival_s) for r in requests
    ]


def test_mooncake_keeps_lengths_arrivals_and_shared_blocks(tmp_path):
    requests = drawn(SHARED)
    read = list(read_trace(written("mooncake", requests, tmp_path)))
    for request, again in zip(requests, read, strict=True):
        assert (again.prompt_len, again.output_len) == (request.prompt_len, request.output_len)
        assert again.arrival_s == pytest.approx(request.arrival_s, abs=1e-6)
        assert len(again.prefix_ids or ()) == num_blocks(request.prompt_len)
    assert tokens_seen_before(read) == tokens_seen_before(requests)


def test_mooncake_again_is_equal_but_for_the_numbers_of_blocks(tmp_path):
    requests = [
        with_prefix(TraceRequest(i, i / 8, 1300, 5, 5), [(40, 512), (9 + i % 2, 512), (70 + i, 276)]) for i in range(6)
    ]
    first = text("mooncake", requests)
    (tmp_path / "a.jsonl").write_text(first)
    assert text("mooncake", read_trace(tmp_path / "a.jsonl")) == first
    assert json.loads(first.splitlines()[0]) == {
        "timestamp": 0,
        "input_length": 1300,
        "output_length": 5,
        "hash_ids": [0, 1, 2],
    }


blocks = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 300, PREFIX_BLOCK])), max_size=4)


@given(st.lists(st.tuples(blocks, st.integers(1, 700)), min_size=1, max_size=6))
def test_mooncake_blocks_are_equal_only_where_tokens_are(prompts):
    requests = []
    for index, (runs, own) in enumerate(prompts):
        request = TraceRequest(index, 0.0, sum(length for _, length in runs) + own, 1, 1)
        requests.append(with_prefix(request, runs) if runs else request)
    rows = [json.loads(line) for line in text("mooncake", requests).splitlines()]
    content: dict[int, list[int]] = {}
    for request, row in zip(requests, rows, strict=True):
        tokens = prompt_tokens(request, 10**6, 0).tolist()
        for place, hash_id in enumerate(row["hash_ids"]):
            block = tokens[place * PREFIX_BLOCK : (place + 1) * PREFIX_BLOCK]
            other = content.setdefault(hash_id, block)
            shorter = min(len(block), len(other))
            assert block[:shorter] == other[:shorter]  # the last block of a prompt may be cut off


def test_mooncake_of_recorded_tokens():
    same = tuple(range(600))
    prompts = (same, same, (5, *same[1:]), same[:520])
    requests = [TraceRequest(i, 0.0, len(prompt), 1, 1, prompt) for i, prompt in enumerate(prompts)]
    ids = [json.loads(line)["hash_ids"] for line in text("mooncake", requests).splitlines()]
    assert ids == [[0, 1], [0, 1], [2, 3], [0, 4]]


def test_recorded_tokens_are_kept():
    request = TraceRequest(0, 0.0, 3, 2, 2, (7, 8, 9))
    assert json.loads(text("trtllm-bench", [request]))["input_ids"] == [7, 8, 9]


def test_what_a_format_cannot_express_is_counted():
    requests = [
        TraceRequest(0, 0.0, 3, 9, 2, priority=0.9, request_class="chat"),
        TraceRequest(1, 1.5, 3, 2, 2, after=0, think_s=1.0, stop_ids=(3,), request_class="chat"),
    ]
    losses = {}
    for name, one in FORMATS.items():
        counting = Losses(requests, one.carries)
        assert list(counting) == requests
        losses[name] = counting.counts
    assert losses["ifbbench"] == {}
    assert losses["lengths"] == {"max_new_tokens": 1, "priority": 1, "request_class": 2, "stop_ids": 1, "after": 1}
    assert losses["trtllm-bench"] == losses["lengths"] | {"arrival_s": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.jsonl", "ifbbench"), ("a.JSON.gz", "gpt-manager"), ("a.csv", "lengths"), ("a.txt", None), ("a", None)],
)
def test_format_by_suffix(tmp_path, name, expected):
    assert format_of(tmp_path / name) == expected
