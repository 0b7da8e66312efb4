"""Service level objectives: what is accepted, and what they do to a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.settings.objectives import parse_objectives


def test_units_and_statistics() -> None:
    found = parse_objectives("ttft=1s,tpot=50ms,e2el = 2.5 s,queue-time=300us,TTFT.p99.9=1500ms,itl.max=80µs")
    assert [(one.name, one.latency, one.statistic) for one in found] == [
        ("ttft", "ttft_s", None),
        ("tpot", "tpot_s", None),
        ("e2e", "e2e_s", None),
        ("queue_time", "queue_time_s", None),
        ("ttft.p99_9", "ttft_s", "p99_9"),
        ("itl.max", "itl_s", "max"),
    ]
    assert [one.target_s for one in found] == pytest.approx([1.0, 0.05, 2.5, 0.0003, 1.5, 0.00008])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft", "expected NAME=TIME"),
        ("ttft=1", "expected a time with its unit"),
        ("ttft=", "expected a time with its unit"),
        ("ttft=-1s", "above 0"),
        ("ttft=nans", "above 0"),
        ("ttft=1s,", "expected NAME=TIME"),
        ("ttf=1s", "Did you mean ttft?"),
        ("itl=1s", "expected one of ttft, tpot, e2e, queue_time"),
        ("ttft.p98=1s", "expected one of mean, p50"),
        ("ttft.=1s", "expected NAME=TIME"),
        ("ttft_p99=1s", "write ttft.p99"),
        ("queue-time-max=1s", "write queue_time.max"),
        ("ttft=1s,ttft=2s", "gives ttft twice"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match="--slo") as error:
        RunConfig(slo=text)
    assert message in str(error.value)


def test_several_texts_are_one_setting() -> None:
    assert RunConfig(slo=["ttft=1s", "tpot=5ms,e2e=3s"]).slo == "ttft=1s,tpot=5ms,e2e=3s"  # type: ignore[arg-type]


def summary_of(tmp_path: Path, slo: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Three requests that run one after another, 10 output tokens each but the last, which has one; a fourth fails."""
    rows = [
        {"request_id": index, "arrival_s": 0.0, "prompt_len": prompt, "output_len": output}
        for index, (prompt, output) in enumerate([(50, 10), (50, 10), (50, 1), (9_999, 1)])
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        device="sim:h100-sxm",
        model="llama-3.1-8b",
        max_batch_size=1,
        max_seq_len=500,
        slo=slo,
        output=str(tmp_path / "run"),
    )
    lines = (run_trace(str(trace), config).directory / "requests.jsonl").read_text().splitlines()
    return json.loads((tmp_path / "run" / "summary.json").read_text()), [json.loads(line) for line in lines]


def test_goodput_counts_the_requests_that_meet_every_objective(tmp_path: Path) -> None:
    summary, requests = summary_of(tmp_path, "ttft=100ms,tpot=1s")
    assert {row["request_id"]: row["slo_met"] for row in requests} == {0: True, 1: True, 2: False, 3: False}
    assert summary["goodput_share"] == pytest.approx(2 / 4)  # the refused request was not served well
    assert summary["goodput_requests_per_s"] == pytest.approx(2 / summary["duration_s"])
    assert summary["slo"]["ttft"] == {
        "target": 0.1,
        "value": summary["ttft_s"]["max"],
        "met": False,
        "share": pytest.approx(2 / 3),
    }
    assert summary["slo"]["tpot"]["met"] is True
    assert summary["slo"]["tpot"]["share"] == 1.0  # an answer of one token has no TPOT to miss


def test_an_objective_of_the_run_is_none_of_each_request(tmp_path: Path) -> None:
    summary, requests = summary_of(tmp_path, "ttft.p50=1ms")
    assert all("slo_met" not in row for row in requests)
    assert summary["goodput_share"] is None
    assert summary["slo"] == {"ttft.p50": {"target": 0.001, "value": summary["ttft_s"]["p50"], "met": False}}


def test_without_objectives_nothing_is_said(tmp_path: Path) -> None:
    summary, requests = summary_of(tmp_path, None)
    assert not {"slo", "goodput_share", "goodput_requests_per_s"} & set(summary)
    assert "slo_met" not in requests[0]
