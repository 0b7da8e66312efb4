"""The run page in a browser: it opens without a network, shows the figures of the run, and tells what `why` tells."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.findings import Findings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.report.pages.page import write_page

RUN = (
    "run chat --device sim:h100-sxm --model llama-3.1-8b --max_num_samples 60 --request_rate 40 --max_batch_size 48 "
    "--max_num_tokens 1024 --max_tokens_in_paged_kvcache 30000 --quiet --output"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with pauses and one without."""
    made = []
    for policy in ("max_utilization", "guaranteed_no_evict"):
        directory = tmp_path_factory.mktemp("runs") / policy
        done = CliRunner().invoke(main, [*RUN.split(), str(directory), "--policy", policy])
        assert done.exit_code == 0, done.output
        made.append(directory)
    assert json.loads((made[0] / "summary.json").read_text())["pauses"] > 3
    return made


def test_the_file_refers_to_nothing_else(runs: list[Path], tmp_path: Path) -> None:
    text = write_page(runs[:1], tmp_path).read_text()
    assert re.findall(r"""(?:src|href)=["'](?!#|data:)|https?://(?!www\.w3\.org/2000/svg)|@import""", text) == []


def test_the_figures_are_those_of_summary_json(runs: list[Path], tmp_path: Path, opened: Any) -> None:
    page = opened(write_page(runs[:1], tmp_path))
    summary = json.loads((runs[0] / "summary.json").read_text())
    shown = page.eval_on_selector_all("[data-figure]", "all => all.map(one => [one.dataset.figure, one.dataset.value])")
    assert len(shown) > 10
    for name, value in shown:
        figure: Any = summary
        for part in name.split("."):
            figure = figure[part]
        assert float(value) == figure
    as_texts = "all => all.map(one => [one.dataset.statistic, one.textContent])"
    cells = page.eval_on_selector_all("[data-statistic]", as_texts)
    for name, text in cells:
        latency, statistic = name.split(".")
        assert float(text.replace(",", "")) == pytest.approx(summary[latency][statistic] * 1000, rel=0.006)
    assert page.locator("h1").inner_text() == "chat, llama-3.1-8b on sim:h100-sxm"
    # The strips: mean of the waiting requests and the peak of the blocks, from the arrays.
    used = page.evaluate("ifbbench.runs[0].blocks.highest")
    assert used == summary["kv_blocks"]["peak_used"]
    assert page.evaluate("ifbbench.runs[0].pauses.length") == summary["pauses"]


@pytest.fixture
def of_engine(request: pytest.FixtureRequest, runs: list[Path], tmp_path: Path) -> Path:
    """A run of the engine that the parameter names."""
    if request.param == "trtllm":
        return runs[0]
    directory = tmp_path / "run"
    done = CliRunner().invoke(main, [*RUN.split(), str(directory), "--engine", request.param])
    assert done.exit_code == 0, done.output
    return directory


@pytest.mark.parametrize("of_engine", ["trtllm", "vllm", "sglang"], indirect=True)
def test_the_life_of_each_request_is_what_why_tells(of_engine: Path, tmp_path: Path, opened: Any) -> None:
    page = opened(write_page([of_engine], tmp_path))
    run = RecordedRun.load(of_engine)
    # Iterations that overlap count once: no mean is above the largest batch.
    for name in ("generation", "context", "budget"):
        series = f"ifbbench.runs[0].{name}"
        means = page.evaluate(f"Array.from({series}.means(ifbbench.runs[0].begin, ifbbench.runs[0].end, 300))")
        assert 0 < max(means) <= page.evaluate(f"{series}.highest") * (1 + 1e-9)
    findings = Findings(run)
    lives = page.evaluate("ifbbench.runs[0].header.ids.map((_, r) => ifbbench.runs[0].life(r))")
    assert len(lives) == 60
    for request_id, shown in zip(run.trace, lives, strict=True):
        life = findings.life(request_id)
        assert "Alone on the device" in shown["sentences"][0]
        assert shown["sentences"] == life.sentences()
        assert [one["reason"] for one in shown["stretches"]] == [one.reason(life.words) for one in life.stretches]
        assert [one["first"] for one in shown["stretches"]] == [one.first for one in life.stretches]
        times = [one["to"] - one["from"] for one in shown["stretches"]]
        assert times == pytest.approx([one.duration_s for one in life.stretches], abs=3e-6)


def test_zoom_hover_search_click_and_keys(runs: list[Path], tmp_path: Path, opened: Any) -> None:
    page = opened(write_page(runs[:1], tmp_path))
    canvas = page.locator("#views canvas")
    box = canvas.bounding_box()
    whole = page.evaluate("[ifbbench.state.from, ifbbench.state.to]")

    page.mouse.move(box["x"] + 500, box["y"] + 60)
    page.mouse.wheel(0, -400)
    is_closer = "ifbbench.state.to - ifbbench.state.from < ifbbench.state.end * 0.9"
    # The wheel acts some frames later.
    assert any(page.evaluate(is_closer) or page.wait_for_timeout(20) for _ in range(500))
    page.click("#zoom-all")
    assert page.evaluate("[ifbbench.state.from, ifbbench.state.to]") == whole

    request = page.evaluate("""() => {
        const view = ifbbench.state.views[0], run = view.run; view.layout();
        const r = run.pauses[0].victim, i = run.span.phase.indexOf(3, run.span.offset[r]);
        return [r, view.x((run.span.from[i] + run.span.to[i]) / 2), view.y(r) + view.rowHeight / 2, run.header.ids[r]];
    }""")
    _, x, y, request_id = request
    page.mouse.move(box["x"] + x, box["y"] + y)
    tooltip = page.locator("#tooltip").inner_text()
    assert tooltip.startswith(f"Request {request_id}")
    assert "paused to make room for" in tooltip
    assert "tokens in the batch" in tooltip
    page.mouse.click(box["x"] + x, box["y"] + y)
    assert page.locator("#life h2").inner_text() == f"Request {request_id}"
    assert "It was paused" in page.locator("#sentences").inner_text()

    page.fill("#search", "17")
    page.press("#search", "Enter")
    assert page.locator("#life h2").inner_text() == "Request 17"
    assert page.evaluate("ifbbench.state.to - ifbbench.state.from") < whole[1] - whole[0]
    page.locator("#ledger tr.link").first.click()
    assert page.evaluate("ifbbench.state.selected.r") == page.evaluate(
        "[...ifbbench.runs[0].pauses].sort((a, b) => b.tokens - a.tokens)[0].victim"
    )
    canvas.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Escape")
    assert page.evaluate("[ifbbench.state.from, ifbbench.state.to]") == whole
    assert page.locator("#life").is_hidden()
    page.keyboard.press("ArrowDown")
    assert page.locator("#life h2").inner_text() == "Request 0"
    page.keyboard.press("+")
    assert page.evaluate("ifbbench.state.to - ifbbench.state.from") < whole[1] - whole[0]


def test_an_address_names_a_request(runs: list[Path], tmp_path: Path, opened: Any) -> None:
    page = opened(write_page(runs[:1], tmp_path), "#request=17")
    assert page.locator("#life h2").inner_text() == "Request 17"
    assert page.evaluate("ifbbench.state.to - ifbbench.state.from") == page.evaluate("ifbbench.state.end")


# A page draws in the next frame.
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_every_choice_of_colours_and_rows_draws_something_else(runs: list[Path], tmp_path: Path, opened: Any) -> None:
    page = opened(write_page(runs[:1], tmp_path))
    pictures = set()
    choices = {"#colour": ("request", "class", "cause", "phase"), "#rows": ("running", "lanes", "all")}
    for selector, values in choices.items():
        for value in values:
            page.select_option(selector, value)
            page.evaluate(DRAWN)
            pictures.add(page.evaluate("document.querySelector('#views canvas').toDataURL()"))
    assert len(pictures) == 5  # no request has a class; phase and all requests are the first picture again


def test_two_runs_on_one_page(runs: list[Path], tmp_path: Path, opened: Any) -> None:
    page = opened(write_page(runs, tmp_path))
    assert page.locator("#views canvas").count() == 2
    assert page.locator("#views h3").all_inner_texts() == ["max_utilization", "guaranteed_no_evict"]
    assert re.match(r"First different decision: iteration \d+\.", page.locator("#divergence").inner_text())
    page.click("#zoom-in")
    widths = page.evaluate("ifbbench.state.views.map(view => view.time(view.width) - view.time(0))")
    assert widths[0] == pytest.approx(widths[1])


def test_a_killed_run_and_one_without_completed_requests(runs: list[Path], tmp_path: Path, opened: Any) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(runs[0], killed)
    (killed / "summary.json").unlink()
    (killed / "requests.jsonl").unlink()
    lines = (killed / "iterations.jsonl").read_bytes()
    (killed / "iterations.jsonl").write_bytes(lines[: len(lines) // 2])
    page = opened(write_page([killed], tmp_path))
    assert "Partial" in page.locator("header").inner_text()
    assert page.locator("#views canvas").count() == 1


def test_the_last_tick_of_a_distribution_is_not_cut(tmp_path: Path, opened: Any) -> None:
    """The longest wait is a little over 10 s, so that its axis ends with 10,000."""
    directory = tmp_path / "run"
    asked = "run chat --device sim:h100-sxm --model llama-3.1-8b --max_num_samples 60 --max_batch_size 4 --quiet "
    done = CliRunner().invoke(main, [*f"{asked} --request_rate 6 --output".split(), str(directory)])
    assert done.exit_code == 0, done.output
    page = opened(write_page([directory], tmp_path))
    cut = """all => all.filter(one => {
        const box = one.getBoundingClientRect(), chart = one.ownerSVGElement.getBoundingClientRect();
        return box.right > chart.right + 0.5;
    }).map(one => one.textContent)"""
    texts = page.eval_on_selector_all("svg[role=img] text", "all => all.map(one => one.textContent)")
    assert "10,000" in texts
    assert page.eval_on_selector_all("svg[role=img] text", cut) == []


def test_the_page_shows_what_was_tried_until_the_run_is_changed(tmp_path: Path, opened: Any) -> None:
    directory = tmp_path / "run"
    words = [*RUN.split(), str(directory), "--max_num_samples", "20"]
    assert CliRunner().invoke(main, words).exit_code == 0
    page = opened(write_page([directory], tmp_path))
    assert page.locator("#what-if pre").inner_text() == f"ifbbench why {directory}"

    options = ("--what_if", "max_batch_size=4", "--what_if", "overlap=async", "--improve", "tpot.p99", "--json")
    done = CliRunner().invoke(main, ["why", str(directory), *options])
    found = json.loads(done.stdout)["what_if"]
    best = found["changes"][found["recommended"]]
    page = opened(write_page([directory], tmp_path))
    assert page.locator("#what-if code").all_inner_texts() == [
        " ".join(f"--{name} {value}" for name, value in one["settings"].items()) for one in found["changes"]
    ]
    first = page.locator("#what-if tbody tr").nth(1).inner_text()
    assert f"{best['effects']['tpot_s.p99']['after'] * 1000:.3g}" in first
    milder = [found["changes"][found["milder"]]["command"]] if found["milder"] is not None else []
    assert page.locator("#what-if pre").all_inner_texts() == [best["command"], *milder, found["command"]]
    assert "Recommended" in page.locator("#summary").inner_text()

    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps(summary | {"duration_s": 1.0}))
    page = opened(write_page([directory], tmp_path))
    assert "tried before the run was changed" in page.locator("#what-if").inner_text()
    assert page.locator("#what-if table").count() == 0

    assert CliRunner().invoke(main, [*words, "--overwrite"]).exit_code == 0
    assert not (directory / "what_if.json").exists()


def test_a_damaged_outcome_is_named(runs: list[Path], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(runs[0], directory)
    (directory / "what_if.json").write_text('{"goal": 3}')
    with pytest.raises(InputError, match=r"what_if\.json: .*remove it, or let `ifbbench why"):
        write_page([directory], tmp_path)
