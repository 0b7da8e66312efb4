"""The conformance command: what it prints, how it exits, and the golden files where they are at hand."""

import json

import pytest

from tests.conformance import capacity, kvcache
from tests.conformance.__main__ import judge, main


def insertion_case(order, versions=("v1.0",), features=("priority",)):
    insertions = [{"id": 0, "priority": 0.5}, {"id": 1, "priority": 0.9}, {"id": 2, "priority": 0.5}]
    return {
        "name": "Insertions",
        "kind": "insertion_order",
        "versions": list(versions),
        "features": list(features),
        "insertions": insertions,
        "expected": {"order": order},
    }


@pytest.mark.parametrize(
    ("case", "status", "output"),
    [
        (insertion_case([1, 0, 2]), 0, "PASS Insertions\n1 passed, 0 failed, 0 skipped\n"),
        (
            insertion_case([0, 1, 2]),
            1,
            "FAIL Insertions order: [1, 0, 2], expected [0, 1, 2]\n0 passed, 1 failed, 0 skipped\n",
        ),
        (
            insertion_case([0, 1, 2], versions=["v0.17"]),
            0,
            "SKIP Insertions rule set v0.17\n0 passed, 0 failed, 1 skipped\n",
        ),
        (
            insertion_case([0, 1, 2], features=["disagg"]),
            0,
            "SKIP Insertions disagg\n0 passed, 0 failed, 1 skipped\n",
        ),
    ],
)
def test_verdicts(tmp_path, capsys, case, status, output):
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"schema": "trtllm-golden/capacity/1", "num_cases": 1, "cases": [case]}))
    assert main([str(path)]) == status
    assert capsys.readouterr().out == output


def test_an_unknown_schema_is_refused(tmp_path, capsys):
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"schema": "other/1", "cases": []}))
    assert main([str(path)]) == 2
    assert "schema 'other/1'; expected one of" in capsys.readouterr().err


UNSUPPORTED_CAPACITY = {"reuse", "cross_attention", "disagg"}


@pytest.mark.parametrize(
    ("name", "may_skip"), [("capacity", UNSUPPORTED_CAPACITY), ("microbatch", set()), ("kvcache", None)]
)
def test_golden_files(shared_dir, capsys, name, may_skip):
    """All pass but those that need a feature from `may_skip` (None: any)."""
    path = shared_dir / "golden" / f"{name}.json"
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    cases = json.loads(path.read_text())["cases"]
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines, strict=True):
        if may_skip is not None and not may_skip & set(case["features"]):
            assert line == f"PASS {case['name']}"


def test_a_changed_golden_fact_fails(shared_dir, tmp_path, capsys):
    golden = json.loads((shared_dir / "golden" / "capacity.json").read_text())
    case = next(case for case in golden["cases"] if case["name"].startswith("SimpleDoesntFitMaxUtilizationInChunk"))
    case["expected"]["windows"][-1]["scheduled"][0]["prompt_len"] += 1
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**golden, "cases": [case]}))
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"FAIL {case['name']} iteration 61, request:")


def cache_case(config, steps):
    defaults = {
        "secondary_blocks": 0,
        "attention_window": None,
        "window_mode": "cyclic",
        "sink_token_length": 0,
        "max_beam_width": 1,
        "enable_block_reuse": False,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
    }
    return {
        "name": "Sequences",
        "kind": "ops",
        "versions": ["v1.0"],
        "features": [],
        "config": {**defaults, **config},
        "steps": steps,
    }


def added(request_id, length, beam_width, free_blocks):
    return {
        "op": "add_sequence",
        "id": request_id,
        "tokens": None,
        "length": length,
        "beam_width": beam_width,
        "expect": {"free_blocks": free_blocks},
    }


def estimate_case(**values):
    arguments = {
        "function": "remaining_blocks_to_completion",
        "prompt_len": 100,
        "max_new_tokens": 60,
        "beam_width": 1,
        "tokens_per_block": 16,
        "attention_window": 64,
        "sink_token_length": 0,
        **values,
    }
    return {"name": "Estimate", "kind": "blocks_estimate", "versions": ["v1.0"], "features": [], "input": arguments}


# A window of 8 tokens in blocks of 4. Blocks are used in turn beyond 8 tokens, with beams beyond 12.
WINDOWED = {"tokens_per_block": 4, "primary_blocks": 16, "attention_window": 8}


@pytest.mark.parametrize("absent", [{}, {"max_seq_len": None}])
@pytest.mark.parametrize(
    ("beam_width", "blocks"), [(1, (15, 14, 14)), (2, (15, 13, 11))], ids=["one beam", "two beams"]
)
def test_a_case_without_the_longest_sequence_is_replayed_with_its_own(absent, beam_width, blocks):
    steps = [
        added(0, 4, beam_width, blocks[0]),
        {"op": "kv_add_token", "id": 0, "count": 4, "expect": {"free_blocks": blocks[1]}},
        {"op": "kv_add_token", "id": 0, "count": 4, "expect": {"free_blocks": blocks[2]}},
    ]
    case = cache_case({**WINDOWED, "max_beam_width": beam_width, **absent}, steps)
    assert judge(kvcache.replay, case) == ("PASS", "")
    steps.append({"op": "check", "expect": {"free_blocks": 0}})
    assert judge(kvcache.replay, case)[0] == "FAIL"


@pytest.mark.parametrize("absent", [{}, {"max_seq_len": None}])
def test_estimates_and_capacity_cases_do_without_the_longest_sequence(absent, shared_dir):
    assert judge(kvcache.replay, {**estimate_case(**absent), "expected": 4}) == ("PASS", "")
    unlimited = estimate_case(attention_window=None, **absent)
    assert judge(kvcache.replay, {**unlimited, "expected": 10}) == ("PASS", "")
    golden = json.loads((shared_dir / "golden/capacity.json").read_text())
    for case in golden["cases"]:
        if case["kind"] == "scheduler_loop":
            del case["config"]["kv_cache"]["max_seq_len"]
            case["config"]["kv_cache"].update(absent)
            assert judge(capacity.replay, case)[0] != "FAIL", case["name"]
