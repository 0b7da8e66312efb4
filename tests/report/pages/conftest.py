"""A browser for the tests of pages."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
# Long enough for a busy machine.
PATIENCE_MS = 300_000
# All pages are drawn by one process, and none by a GPU's.
OPTIONS = ("--no-sandbox", "--disable-gpu", "--renderer-process-limit=1")


# Playwright keeps an event loop in this thread while it is open, with which tests of other files cannot start theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed, in which the page would be opened")
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS, timeout=PATIENCE_MS)
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """A function that opens a page and returns it; at the end, no error and no request may have been seen."""
    problems: list[str] = []
    pages: list[Any] = []

    def open_page(path: Path, fragment: str = "") -> Any:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        pages.append(page)
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.extend({request.url.partition("#")[0]} - {path.as_uri()}))
        page.goto(path.as_uri() + fragment)
        # Not wait_for_function: from its second look on, the page itself evaluates text, which its policy forbids.
        page.wait_for_selector("html[data-ready-ms]", state="attached")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert problems == []
