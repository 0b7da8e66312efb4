"""The page of a run against an endpoint in a browser."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
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
