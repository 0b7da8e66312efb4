"""The page of a run against an endpoint in a browser."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.cli.main import main
from ifbbench.report.pages.client_page import client_page_data
from ifbbench.report.pages.page import write_page
from ifbbench.rundir.what_if import keep_what_if
from tests.endpoint.fake_endpoint import fake_endpoint
from tests.endpoint.test_endpoint import replay, three_tokens


# Made before the browser is started: see `browser`.
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("endpoint")
    with fake_endpoint(three_tokens) as server:
        replay(server, directory, count=12)
    done = CliRunner().invoke(main, ["plot", str(directory / "run"), "--html"])
    assert done.exit_code == 0, done.output
    return directory / "run"


@pytest.fixture(scope="module")
def page_with_trials(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `run` as if other settings had been predicted for it: those of a simulated run."""
    directory = tmp_path_factory.mktemp("predicted")
    simulated = str(directory / "simulated")
    words = ("chat", "--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--max_num_samples", "12", "--quiet")
    assert CliRunner().invoke(main, ["run", *words, "--output", simulated]).exit_code == 0
    done = CliRunner().invoke(main, ["why", simulated, "--what_if", "max_batch_size=1", "--json"])
    shutil.copytree(run, directory / "run")
    assert keep_what_if(directory / "run", json.loads(done.stdout)["what_if"]) is None
    return Path(write_page([directory / "run"], directory))


def test_it_has_the_settings_that_were_predicted(run: Path, page_with_trials: Path) -> None:
    assert "--max_batch_size 1" in page_with_trials.read_text()
    assert client_page_data(RecordedRun.load(run, or_endpoint=True))["what_if"] is None


def test_it_shows_the_settings_that_were_predicted(page_with_trials: Path, opened: Any) -> None:
    assert opened(page_with_trials).locator("#what-if code").all_inner_texts() == ["--max_batch_size 1"]


@pytest.mark.parametrize("width", [1000, 1300])
def test_it_opens_with_charts_of_one_width(run: Path, opened: Any, width: int) -> None:
    page = opened(run / "charts" / "run.html")
    page.set_viewport_size({"width": width, "height": 900})
    assert page.locator(".tile").count() > 5
    assert page.locator(".tile .value[data-figure='requests.completed']").inner_text() == "12 of 12"
    widths = page.eval_on_selector_all("#charts img", "all => all.map(one => one.getBoundingClientRect().width)")
    assert len(widths) > 3
    assert len(set(widths)) == 1
    own = page.eval_on_selector_all("#charts img", "all => all.map(one => one.naturalWidth)")
    assert max(own) - min(own) <= 1, "texts in all charts are of one size"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
