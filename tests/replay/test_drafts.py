"""Draft tokens through the user's settings: what is refused, what a run records, what the simulated device charges."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifbbench.analysis.token_times import TokenGaps
from ifbbench.build.resolve import batching_config, cache_layout, resolve_limits
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions
from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.report.compat.gpt_manager_benchmark import benchmark_figures
from ifbbench.report.compat.trtllm_bench import report, write_iterations
from ifbbench.report.compat.trtllm_text import report_text
from ifbbench.rundir.drafts import steps_of, stretches_of
from ifbbench.rundir.reader import load_run
from ifbbench.settings.config import RunConfig
from tests.engine.engine import Loop
from tests.engine.executors import SpyExecutor

pytestmark = pytest.mark.usefixtures("small_model")

SIMULATED: dict[str, Any] = {"device": "sim:h200-sxm", "model": "qwen3-32b", "max_batch_size": 8}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = ({"request_id": row, "arrival_s": 0.0, "prompt_len": 40 + row, "output_len": 60} for row in range(16))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"draft_len": 3}, "nothing proposes draft tokens"),
        ({"draft_ngram": 3, "device": "null"}, "add --acceptance_rate"),
        ({"draft_ngram": 3, "acceptance_rate": "0.5", "device": "cpu"}, "computes tokens"),
        ({"draft_ngram": 3, "draft_model": "tiny", "device": "cpu"}, "leave out one"),
        ({"acceptance_rate": "0.5,2", "device": "null"}, "expected a probability from 0 to 1"),
        ({"acceptance_rate": "often", "device": "null"}, "expected a probability from 0 to 1"),
        ({"draft_ngram": 3, "device": "cpu", "type": "v1"}, "choose another --type"),
        ({"draft_ngram": 3, "device": "cpu", "beam_width": 2}, "--draft_len: refused with beam width above 1"),
        ({"draft_ngram": 3, "device": "cpu", "max_num_tokens": 4, "enable_chunked_context": False}, "less than the 5"),
        ({"draft_ngram": 3, "device": "cpu", "max_attention_window": "30"}, "--window_mode linear"),
        ({"draft_model": "qwen3-0.6b", "device": "cpu"}, "vocabulary of 151936 tokens"),
    ],
)
def test_settings_that_contradict_drafts_are_refused(trace, tmp_path, values, error):
    with pytest.raises(InputError, match=error):
        run_trace(trace, RunConfig(**{"output": str(tmp_path / "run"), **values}))
    assert not (tmp_path / "run").exists()


def test_drafts_turn_overlap_off_and_say_so(trace, caplog):
    config = RunConfig(device="null", enable_trt_overlap=True, acceptance_rate="0.5")
    summarise_run(trace, config)
    assert "turns --enable_trt_overlap off" in caplog.text


def test_the_linear_window_takes_drafts(trace):
    config = RunConfig(device="null", acceptance_rate="0.5", max_attention_window="30", window_mode="linear")
    assert summarise_run(trace, config)["requests"]["completed"] == 16


def test_a_run_records_what_drafts_did(trace, tmp_path):
    config = RunConfig(
        **SIMULATED,
        draft_model="qwen3-0.6b",
        draft_len=3,
        acceptance_rate="0.8,0.6",
        output=str(tmp_path / "run"),
        streaming=True,
    )
    summary = run_trace(trace, config).summary
    run = load_run(tmp_path / "run")
    speculative = summary["speculative_decoding"]
    requests = run.requests
    assert speculative["draft_tokens"] == requests["draft_tokens"].sum()
    assert speculative["accepted_tokens"] == requests["accepted_draft_tokens"].sum()
    assert speculative["acceptance_length"] == pytest.approx(1 + 0.8 + 0.48 + 0.288, abs=0.2)
    assert speculative["draft_s"] > 0

    # Every token once, at the end of its iteration: those that come together have gaps of 0.
    gaps = TokenGaps.of(run)
    assert gaps.count.sum() == 16 * 59
    assert gaps.count[gaps.seconds == 0].sum() == speculative["accepted_tokens"]
    assert np.average(gaps.seconds, weights=gaps.count) == pytest.approx(summary["itl_s"]["mean"])
    assert summary["itl_s"]["min"] == 0.0
    for line in (tmp_path / "run" / "spans.jsonl").read_text().splitlines():
        span = json.loads(line)
        if span["phase"] == "generation":
            assert sum(span["steps"]) == span["tokens"] == span["produced"]
            assert len(span["steps"]) == span["last_iteration"] - span["first_iteration"] + 1

    iterations = run.iterations
    assert iterations["spec_decoding.numDraftTokens"].sum() == speculative["draft_tokens"]
    assert iterations["spec_decoding.numAcceptedTokens"].sum() == speculative["accepted_tokens"]
    assert iterations["spec_decoding.numRequestsWithDraftTokens"].max() == 8
    steps = 16 * 60 - speculative["accepted_tokens"]
    assert benchmark_figures(run)["avg_acceptance_rate(tokens/decoding steps)"] == pytest.approx(16 * 60 / steps)
    decoding = report(run)["decoding_stats"]
    assert decoding["num_draft_tokens_percentiles"]["average"] == pytest.approx(speculative["draft_tokens"] / 16)
    assert decoding["acceptance_length_percentiles"]["minimum"] > 1
    text = report_text(report(run))
    assert "= DECODING STATISTICS (DraftTarget)" in text
    assert "[AL] AVERAGE" in text
    write_iterations(run, tmp_path / "iterations.log")
    lines = [json.loads(line) for line in (tmp_path / "iterations.log").read_text().splitlines()]
    assert any(line["specDecodingStats"]["numAcceptedTokens"] for line in lines if "specDecodingStats" in line)
    assert max(line["inflightBatchingStats"]["avgNumDecodedTokensPerIter"] for line in lines) > 1


def test_runs_without_drafts_record_nothing_about_them(trace, tmp_path):
    summary = run_trace(trace, RunConfig(**SIMULATED, output=str(tmp_path / "run"))).summary
    assert "speculative_decoding" not in summary
    for name in ("spans", "iterations", "requests"):
        text = (tmp_path / "run" / f"{name}.jsonl").read_text()
        assert not any(key in text for key in ("draft", "spec_decoding", "steps"))


def test_the_simulated_device_charges_for_verification_and_for_the_draft_model(trace):
    def duration_s(**values: Any) -> float:
        return float(summarise_run(trace, RunConfig(**SIMULATED, **values))["duration_s"])

    plain = duration_s()
    rejected, free = duration_s(acceptance_rate="0"), duration_s(acceptance_rate="0.8")
    by_model = duration_s(acceptance_rate="0.8", draft_model="qwen3-0.6b")
    assert plain < rejected < 1.2 * plain, "verification costs a little where weights are read anyway"
    assert free < by_model < plain
    assert plain / free > 2


def test_equal_settings_give_equal_runs(trace):
    config = RunConfig(**SIMULATED, acceptance_rate="0.7")
    assert summarise_run(trace, config) == summarise_run(trace, config)
    assert summarise_run(trace, config) != summarise_run(trace, config.with_values(seed=1))


# The published cases about draft tokens, with what they expect of each iteration, through settings and requests.


def schedule(values: dict[str, Any], requests: list[tuple[int, int, int]]) -> tuple[list[list[int]], SpyExecutor]:
    """The requests (prompt, new and draft tokens of each) that ran in each iteration; no draft is ever accepted."""
    config = RunConfig(device="null", acceptance_rate="0", max_seq_len=8_192, **values)
    config = resolve_limits(config, 8_192, on_cpu=False)
    model = load_model_config("tiny")
    limits = batching_config(config, cache_layout(config, model, None), None)
    made = [
        Request(index, prompt, new, options=OutputOptions(draft_input_ids=np.ones(drafts, np.int32)))
        for index, (prompt, new, drafts) in enumerate(requests)
    ]
    spy = SpyExecutor(NullExecutor())
    run = Loop(limits, [(0, request) for request in made], spy).run()
    ran = []
    generating: set[int] = set()
    for record in run.records:
        context = {chunk.request.request_id for chunk in record.context}
        ran.append(sorted(context | (generating - {request.request_id for request in record.held})))
        generating |= {chunk.request.request_id for chunk in record.context if chunk.is_last}
        generating -= {request.request_id for request in record.finished}
    return ran, spy


def test_drafts_take_room_for_prompts_in_the_token_budget():
    """Three prompts of 1,024 tokens with 17 drafts each fit 4,096 tokens; the fourth starts an iteration later."""
    values = {"max_batch_size": 64, "max_num_tokens": 4_096, "enable_chunked_context": False, "draft_len": 17}
    ran, _ = schedule(values, [(1_024, 10, 17)] * 4)
    assert ran[0] == [0, 1, 2]
    assert ran[1:10] == [[0, 1, 2, 3]] * 9
    assert ran[10:] == [[3]]


@pytest.mark.parametrize(
    ("budget", "unit", "requests", "drafts"),
    [
        (8_192, 64, [(2_041, 9, 8)] * 4, [7, 7, 7, 7]),  # to the end of the last unit
        (40, 16, [(3, 21, 17)] * 3, [13, 13, 5]),  # and the rest of the budget
        (50, 5, [(25, 9, 5)] * 2, [0, 0]),  # a chunk that fills its unit leaves no room
    ],
)
@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
def test_drafts_are_cut_to_the_room_that_chunks_leave(budget, unit, requests, drafts, policy):
    values = {
        "max_batch_size": 64,
        "max_num_tokens": budget,
        "enable_chunked_context": True,
        "tokens_per_block": unit,
        "context_chunk_unit": unit,
        "context_chunking_policy": policy,
        "draft_len": 4,
    }
    _, spy = schedule(values, requests)
    inputs = spy.batches[0].drafts
    assert ([0] * len(requests) if inputs is None else inputs.counts.tolist()) == drafts


# Tokens of iterations.


def test_stretches_of_tokens():
    steps = steps_of(5, 9, [(6, 2), (9, 1)])
    assert steps == [1, 3, 1, 1, 2]
    assert stretches_of(5, steps, 8) == [(5, 6), (6, 6), (6, 9), (9, 9)]
    # The first three tokens had been produced before a pause.
    assert stretches_of(5, steps, 5) == [(6, 9), (9, 9)]
