"""The page of a sweep in a browser: it opens without a network; figures, filter, charts and commands are right."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.report import sweep_charts
from ifbbench.report.pages.sweep_page import command_of
from ifbbench.studies.point_table import read_sweep

SWEEP = (
    "sweep chat --device sim:h100-sxm --model llama-3.1-8b --max_num_samples 40 --request_rate 60 --quiet "
    "--max_tokens_in_paged_kvcache 40000 --processes 1"
)


def _invoke(*words: str) -> str:
    done = CliRunner().invoke(main, [*words])
    assert done.exit_code == 0, done.output
    return done.output


def _page_of(directory: Path, keep: str, *over: str) -> Path:
    """Run a sweep into the directory, and write its page. Its other charts are not drawn."""
    axes = [word for axis in over for word in ("--over", axis)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_charts, "save", lambda figure, directory, name: [directory / name])
        _invoke(*SWEEP.split(), *axes, "--keep", keep, "--output", str(directory))
    _invoke("plot", str(directory), "--html")
    return directory


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings, three values of one and two of the other, with run directories."""
    over = ("max_batch_size=4,16,64", "policy=max_utilization,guaranteed_no_evict")
    return _page_of(tmp_path_factory.mktemp("sweeps") / "sizes", "run", *over)


@pytest.fixture(scope="module")
def sweep_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three settings, whose table is the widest of the usual ones."""
    over = ("max_batch_size=8,64", "max_num_tokens=512,2048", "policy=max_utilization,guaranteed_no_evict")
    return _page_of(tmp_path_factory.mktemp("sweeps") / "three", "summary", *over)


@pytest.fixture
def page(sweep: Path, opened: Any) -> Any:
    return opened(sweep / "sweep.html")


def test_the_file_refers_to_its_run_pages_only(sweep: Path) -> None:
    text = (sweep / "sweep.html").read_text()
    assert re.findall(r"""(?:src|href)=["'](?!#|data:)|https?://(?!www\.w3\.org/2000/svg)|@import""", text) == []


def test_the_figures_of_the_table_are_those_of_sweep_csv(sweep: Path, page: Any) -> None:
    with (sweep / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert page.locator("#table tbody tr").count() == len(rows) == 6
    for number, row in enumerate(rows):
        shown = page.eval_on_selector_all(
            f"#table tr[data-row='{number}'] [data-figure]",
            "all => all.map(one => [one.dataset.figure, one.dataset.value])",
        )
        assert len(shown) > 5
        assert {name: float(value) for name, value in shown} == {name: float(row[name]) for name, _ in shown}


def test_sorting_and_filtering(page: Any) -> None:
    def order() -> list[int]:
        return [int(row.get_attribute("data-row")) for row in page.locator("#table tbody tr").all()]

    key = "output_throughput_tokens_per_s"
    page.click(f"#table button[data-key='{key}']")
    values = page.evaluate(f"ifbbench.sweep.figures['{key}']")
    assert [values[row] for row in order()] == sorted(values, reverse=True)
    assert page.locator(f"#table th:has(button[data-key='{key}'])").get_attribute("aria-sort") == "descending"
    page.click(f"#table button[data-key='{key}']")
    assert [values[row] for row in order()] == sorted(values)
    page.fill("#filter", "max_batch_size>=16 policy=max_utilization")
    assert sorted(order()) == [2, 4]
    assert page.locator("#count").inner_text() == "2 of 6 points"
    assert page.locator("#pareto svg").first.locator(".mark[opacity='1']").count() == 2
    page.fill("#filter", "no such point")
    assert order() == []
    page.fill("#filter", "")
    page.select_option("#limit", index=1)
    assert 0 < len(order()) <= 6


def test_a_point_has_its_figures_its_command_and_its_run_page(sweep: Path, page: Any, tmp_path: Path) -> None:
    page.locator("#table tbody tr").nth(1).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#point h2").inner_text() == "max_batch_size=16, policy=max_utilization"
    link = page.locator("#point a.run").get_attribute("href")
    run = (sweep / link).resolve()
    assert run == (sweep / "max_batch_size=16,policy=max_utilization/charts/run.html").resolve()
    assert run.is_file()
    command = shlex.split(page.locator("#command").inner_text())
    assert command[:2] == ["ifbbench", "run"]
    _invoke(*command[1:], "--quiet", "--output", str(tmp_path / "again"))
    again = json.loads((tmp_path / "again/summary.json").read_text())
    shown = dict(page.eval_on_selector_all("[data-all]", "all => all.map(one => [one.dataset.all, one.dataset.value])"))
    assert float(shown["ttft_s.p99"]) == again["ttft_s"]["p99"]
    assert float(shown["iterations"]) == again["iterations"]
    page.keyboard.press("Escape")
    assert page.locator("#point").is_hidden()


def test_marks_of_the_charts_lead_to_points(page: Any) -> None:
    rows = page.evaluate("ifbbench.sweep.points.length")
    assert page.locator("#pareto svg").count() == 3
    for chart in page.locator("#curves .plots svg").all():
        assert chart.locator("circle.mark").count() == rows
    maps = page.locator("#maps svg")
    assert maps.count() == page.locator("#curves .plots svg").count() + 1
    assert maps.first.locator("rect.mark").count() == rows
    throughput = page.evaluate("ifbbench.sweep.figures['output_throughput_tokens_per_s']")
    texts = maps.first.locator("text.on-dark, text.on-light").all_text_contents()
    assert sorted(float(text.replace(",", "")) for text in texts) == pytest.approx(sorted(throughput), rel=0.006)
    maps.first.locator("rect.mark[data-point='3']").click()
    assert page.evaluate("ifbbench.sweep.selected") == 3
    page.select_option("#map-rows", "policy")
    assert page.locator("#map-columns").input_value() == "max_batch_size"
    page.select_option("#against", "policy")
    first = page.locator("#curves .plots svg").first
    assert first.get_attribute("aria-label").startswith("output tokens/s against policy")


def test_the_front_is_of_points_that_no_other_one_beats(page: Any) -> None:
    figures = page.evaluate("ifbbench.sweep.figures")
    points = set(zip(figures["ttft_s.p99"], figures["output_throughput_tokens_per_s"], strict=True))
    best = {(x, y) for x, y in points if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)}
    assert len(page.locator("#pareto .front").first.get_attribute("points").split()) == len(best)


def test_points_that_miss_an_objective_have_empty_marks(tmp_path: Path, opened: Any) -> None:
    _invoke(
        *SWEEP.split(),
        "--over",
        "max_batch_size=4,16,64",
        "--slo",
        "ttft.p99=5s",
        "--keep",
        "summary",
        "--output",
        str(tmp_path / "sweep"),
    )
    _invoke("plot", str(tmp_path / "sweep"), "--html")
    met = [row["slo.ttft.p99.met"] for row in read_sweep(tmp_path / "sweep").rows]
    assert {True, False} == set(met), "one of each is needed"
    page = opened(tmp_path / "sweep" / "sweep.html")
    for chart in ("#pareto", "#curves"):
        for number, is_met in enumerate(met):
            mark = page.locator(f"{chart} circle.mark[data-point='{number}']").first
            assert (mark.get_attribute("fill") == "var(--ground)") is not is_met
            assert mark.get_attribute("stroke") != "var(--ground)"
    assert "empty marks miss an objective" in page.locator("#legend").inner_text()


def test_cells_of_points_that_meet_every_objective_are_framed(tmp_path: Path, opened: Any) -> None:
    axes = ("--over", "max_batch_size=4,64", "--over", "policy=max_utilization,guaranteed_no_evict")
    _invoke(*SWEEP.split(), *axes, "--slo", "ttft.p99=5s", "--keep", "summary", "--output", str(tmp_path / "sweep"))
    _invoke("plot", str(tmp_path / "sweep"), "--html")
    met = [row["slo.ttft.p99.met"] for row in read_sweep(tmp_path / "sweep").rows]
    assert {True, False} == set(met), "one of each is needed"
    page = opened(tmp_path / "sweep" / "sweep.html")
    for number, is_met in enumerate(met):
        assert (page.locator(f"rect.mark[data-point='{number}']").first.get_attribute("stroke") is not None) is is_met
    assert "Framed cells meet every objective" in page.locator("#maps-note").inner_text()


def test_failed_points_and_a_sweep_over_one_setting(tmp_path: Path, opened: Any) -> None:
    directory = tmp_path / "windows"
    done = CliRunner().invoke(
        main, [*SWEEP.split(), "--over", "max_batch_size=2,4,8,16", "--keep", "summary", "--output", str(directory)]
    )
    assert done.exit_code == 0, done.output
    table = (directory / "sweep.csv").read_text().splitlines()
    cells = table[1].split(",")
    cells[1] = "out of memory <b>"
    (directory / "sweep.csv").write_text("\n".join([table[0], ",".join(cells), *table[2:]]) + "\n")
    _invoke("plot", str(directory), "--html")
    page = opened(directory / "sweep.html")
    assert page.locator("#table tbody tr").first.inner_text().split("\t") == ["2", "out of memory <b>"]
    assert "1 failed" in page.locator("header").inner_text()
    assert page.locator("#maps").is_hidden()
    page.locator("#table tbody tr").nth(1).click()
    assert page.locator("#point a.run").count() == 0


def test_a_command_has_the_settings_that_are_not_the_defaults(sweep: Path) -> None:
    words = shlex.split(command_of(read_sweep(sweep).rows[0]))
    assert words[2].endswith("chat.yaml")
    assert words[:2] + words[3:] == [
        "ifbbench",
        "run",
        "--max_num_samples",
        "40",
        "--request_rate",
        "60.0",
        "--policy",
        "max_utilization",
        "--max_batch_size",
        "4",
        "--max_tokens_in_paged_kvcache",
        "40000",
        "--device",
        "sim:h100-sxm",
        "--model",
        "llama-3.1-8b",
    ]


@pytest.mark.parametrize("width", [1000, 1300, 1900])
def test_nothing_is_cut_off(sweep_of_three: Path, opened: Any, width: int) -> None:
    page = opened(sweep_of_three / "sweep.html")
    page.set_viewport_size({"width": width, "height": 1000})
    wide = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.id || one.tagName)"
    assert page.eval_on_selector_all("html, body, section, .scroll, .plots, td, th", wide) == []
    right = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
    assert page.eval_on_selector_all("#table th, .plots svg", right) <= width


def test_lines_differ_from_limits_and_from_each_other(sweep_of_three: Path, opened: Any) -> None:
    page = opened(sweep_of_three / "sweep.html")
    styles = page.eval_on_selector_all(
        "#curves svg:first-child polyline",
        "all => all.map(getComputedStyle).map(one => [one.stroke, one.strokeDasharray, parseFloat(one.strokeWidth)])",
    )
    assert len({(stroke, dashes) for stroke, dashes, _ in styles}) == len(styles) == 4
    widths = [width for _, _, width in styles]
    assert widths == sorted(widths, reverse=True), "an equal line that is drawn later does not hide the first"
    limits = page.eval_on_selector_all("#legend i", "all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert {stroke for stroke, _, _ in styles} & set(limits) == set()
    assert page.locator("#curves-note svg line").count() == len(styles)


def test_texts_of_ticks_do_not_touch(tmp_path: Path, opened: Any) -> None:
    directory = _page_of(tmp_path / "rates", "summary", "kv_cache_free_gpu_mem_fraction=0.5,0.505,0.51,0.6,0.9")
    page = opened(directory / "sweep.html")
    # Of each chart the boxes of its texts; one of a tick and the name of an axis may not touch either.
    boxes = "all => all.map(svg => [...svg.querySelectorAll('text')].map(one => one.getBoundingClientRect().toJSON()))"
    for chart in page.eval_on_selector_all(".plots svg", boxes):
        for place, one in enumerate(chart):
            for other in chart[place + 1 :]:
                apart_x = one["right"] <= other["left"] or other["right"] <= one["left"]
                apart_y = one["bottom"] <= other["top"] + 2 or other["bottom"] <= one["top"] + 2
                assert apart_x or apart_y, (one, other)
