"""The conformance command: what it prints, how it exits, and the golden files where they are at hand."""

import json

import pytest

from tests.conformance.__main__ import main


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
