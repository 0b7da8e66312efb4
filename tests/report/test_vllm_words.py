"""What people read of a run under vLLM's scheduler has vLLM's words."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.text import Text

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main as cli
from ifbbench.report.charts import CHARTS, NOT_OF_A_RUN
from ifbbench.report.overlay import draw_schedules
from ifbbench.report.pages.page_data import page_data
from ifbbench.report.style import styled
from ifbbench.rundir.reader import load_run

RUN = (
    "run chat --engine vllm --device sim:h100-sxm --model llama-3.1-8b --max_tokens_in_paged_kvcache 8192"
    " --time_scale 0 --max_num_samples 40 --max_num_tokens 1024 --watermark 0.01 --quiet --overwrite --output"
)
NOT_VLLM = ("paus", "batch size", "max_batch_size", "max_num_tokens", "chunked context", "full_prompt")


def printed(*words: str) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "run"
    printed(*RUN.split(), str(path))
    return path


def test_tables_and_sentences(run: Path) -> None:
    recorded = RecordedRun.load(run)
    pause = recorded.iterations.pauses[0]
    texts = [
        printed("report", str(run)),
        printed("why", str(run), "--budget", "0"),
        printed("why", str(run), "--request", str(pause.victim)),
        printed("why", str(run), "--iteration", str(pause.iteration)),
        printed("watch", str(run), "--once"),
    ]
    for text in texts:
        assert not [word for word in NOT_VLLM if word in text.lower()], text
    assert "Pre-emptions" in texts[0]
    assert "max_num_batched_tokens 1024" in texts[0]
    assert "Costliest pre-emptions" in texts[1]
    assert f"is pre-empted to make room for {pause.beneficiary}" in texts[2]
    assert f"Request {pause.victim} was pre-empted to make room for" in texts[3]
    for text in texts[:2]:
        for name in ("number of sequences", "token budget", "watermark", "full prompt reserved"):
            assert name in text


def test_charts_and_page(run: Path) -> None:
    data = load_run(run)
    with styled():
        figures = [chart.draw(data) for name, chart in CHARTS.items() if name not in NOT_OF_A_RUN]
        figures.append(draw_schedules([data, data]))
    shown = {text.get_text() for figure in figures for text in figure.findobj(Text) if isinstance(text, Text)}
    assert not [text for text in shown for word in NOT_VLLM if word in text.lower()]
    assert any("pre-emptions" in text for text in shown)
    assert any(text.startswith("max_num_seqs") for text in shown)
    header = page_data(RecordedRun.load(run))
    assert (header["pause"], header["paused"]) == ("pre-emption", "pre-empted")
    assert header["limit_texts"]["full_prompt"][:2] == ("full prompt reserved", "KV blocks for its full prompt")
    assert header["part_names"]["paused"] == "pre-empted"
