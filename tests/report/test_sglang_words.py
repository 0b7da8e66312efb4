"""What people read of a run under SGLang's scheduler has SGLang's words, and counts no running request as waiting."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from ifbbench.analysis.explain import iteration_facts
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.report.charts import CHARTS, NOT_DRAWN, NOT_OF_A_RUN
from ifbbench.report.iteration_charts import limits_of_line
from ifbbench.report.overlay import draw_overlay, draw_schedules
from ifbbench.report.pages.page_data import page_data
from ifbbench.report.style import styled
from ifbbench.rundir.reader import load_run
from tests.report.test_vllm_words import printed

TRACE = """\
num_requests: 40
prompt_len: {distribution: uniform, min: 100, max: 900}
output_len: {distribution: uniform, min: 100, max: 400}
arrival: {process: constant, rate: 50}
"""
RUN = (
    "--engine sglang --device sim:h100-sxm --model llama-3.1-8b --max-total-tokens 6000"
    " --schedule-conservativeness 0.1 --no_ignore_eos --quiet --output"
)
NOT_SGLANG = (
    "paus",
    "pre-empt",
    "batch size",
    "max_batch_size",
    "token budget",
    "max_num_tokens",
    "chunked context",
    "kv block",
    "blocks",
    "skipped",
    "sequence slot",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "run"
    trace = path.with_name("trace.yaml")
    trace.write_text(TRACE)
    printed("run", str(trace), *RUN.split(), str(path))
    return path


def test_tables_and_sentences(run: Path) -> None:
    recorded = RecordedRun.load(run)
    retraction = recorded.iterations.pauses[0]
    spans = load_run(run).spans
    aside = spans[spans["phase"] == "skipped"].iloc[0]
    texts = [
        printed("report", str(run)),
        printed("why", str(run), "--budget", "0"),
        printed("why", str(run), "--request", str(retraction.victim)),
        printed("why", str(run), "--request", str(aside["request_id"])),
        printed("why", str(run), "--iteration", str(aside["first_iteration"])),
        printed("watch", str(run), "--once"),
    ]
    for text in texts:
        assert not [word for word in NOT_SGLANG if word in text.lower()], text
    assert "KV tokens, peak use" in texts[0]
    assert "Running requests stood aside for prompts" in texts[0]
    assert "standing aside for prompts, or computed again" in texts[1]
    assert "is retracted to make room for" in texts[2]
    assert "stands aside for prompts" in texts[3]
    assert "stood aside for prompts" in texts[4]


def test_running_requests_do_not_wait(run: Path) -> None:
    data, recorded = load_run(run), RecordedRun.load(run)
    table = data.iterations
    held = table[(table["bound_by"] == "prefill") & (table["queued"] > 0)].iloc[0]
    facts = iteration_facts(recorded, int(held["iteration_counter"]))
    assert (facts.waiting, facts.waiting + facts.aside) == (held["queued"], held["waiting"])
    assert facts.aside > 0
    assert facts.used["batch_size"] == held["active_request_count"] > held["scheduled_requests"]
    named = table["queue_head_reason"].dropna()
    assert len(named) > 10
    assert list(limits_of_line(data)[named.index]) == list(named)
    first = table[table["queue_head_request"].notna()].iloc[0]
    text = printed("why", str(run), "--iteration", str(first["iteration_counter"]))
    assert f"The queue waited for request {int(first['queue_head_request'])}, which waited for " in text
    with styled():
        figure = CHARTS["throughput"].draw(data)
    shown = [text.get_text() for text in figure.axes[0].findobj(Text) if isinstance(text, Text)]
    assert any("KV tokens" in text for text in shown)
    assert not any("prompts first" in text for text in shown)
    highest = max(np.asarray(patch.get_path().vertices)[:, 1].max() for patch in figure.axes[0].patches)
    assert highest < table["queued"].max() + 1e-6 < table["waiting"].max()


def test_charts_and_page(run: Path) -> None:
    data = load_run(run, NOT_DRAWN)
    with styled():
        figures = [chart.draw(data) for name, chart in CHARTS.items() if name not in NOT_OF_A_RUN]
        figures += [draw_schedules([data, data]), draw_overlay([data, data])]
    shown = {text.get_text() for figure in figures for text in figure.findobj(Text) if isinstance(text, Text)}
    assert not [text for text in shown for word in NOT_SGLANG if word in text.lower()]
    assert "KV tokens used" in shown
    assert "pool: 6,000 tokens" in shown
    assert "standing aside for prompts" in shown
    data = load_run(run)
    header = page_data(RecordedRun.load(run))
    assert (header["pause"], header["paused"], header["blocks"]) == ("retraction", "retracted", "tokens")
    assert header["skipped"][1] == "stands aside for prompts"
    assert np.all(data.requests_waiting == data.iterations["queued"])
