"""Writing pages: templates and data become one file that opens without a network. Here the page of one or two runs."""

import json
from collections.abc import Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from ifbbench.analysis.compare import Comparison
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.files import replace_file
from ifbbench.report.colours import page_script, page_style
from ifbbench.report.pages.page_data import page_data
from ifbbench.report.tables import settings_line

FILE = "run.html"
SCRIPTS = ("common.js", "data.js", "draw.js", "view.js", "panels.js", "main.js")


def write_page(directories: Sequence[Path], into: Path) -> Path:
    """Write the page of one run, of a fleet, or of two runs on one axis of time with their first divergence, as
    `run.html` into a directory; of a run without iterations it has a sentence. InputError if one of two runs has none
    or is against an endpoint, or the file cannot be written."""
    is_alone = len(directories) == 1
    runs = [RecordedRun.load(path, or_endpoint=is_alone, or_empty=is_alone, or_fleet=is_alone) for path in directories]
    if runs[0].data.is_fleet:
        from ifbbench.report.pages import fleet_page  # as below

        data = fleet_page.fleet_page_data(runs[0])
        return write_html(into / FILE, fleet_page.TEMPLATE, fleet_page.SCRIPTS, runs[0].data.name, data)
    if runs[0].data.endpoint:
        from ifbbench.report.pages import client_page  # its charts need matplotlib, which takes long to import

        return write_html(
            into / FILE,
            client_page.TEMPLATE,
            client_page.SCRIPTS,
            runs[0].data.name,
            client_page.client_page_data(runs[0]),
        )
    if nothing := runs[0].nothing_ran:
        empty = {
            "name": runs[0].data.name,
            "settings": settings_line(runs[0].data),
            "sentence": f"There is nothing to show: {nothing}.",
        }
        return write_html(into / FILE, "nothing", ("common.js", "nothing.js"), empty["name"], empty)
    content: dict[str, Any] = {"runs": [page_data(run) for run in runs]}
    if len(runs) == 2:
        comparison = Comparison(runs[0], runs[1])
        divergence = comparison.first_divergence
        content["divergence"] = None if divergence is None else divergence.as_dict()
        content["same_trace"] = comparison.same_trace
    title = " and ".join(dict.fromkeys(run["name"] for run in content["runs"]))
    return write_html(into / FILE, "run", SCRIPTS, title, content)


def write_html(path: Path, template: str, scripts: Sequence[str], title: str, content: dict[str, Any]) -> Path:
    """Write a page as one file: page.html with the body of `template`.html, its scripts and `content`."""
    replace_file(path, _html(template, scripts, title, content))
    return path


def _html(template: str, scripts: Sequence[str], title: str, content: dict[str, Any]) -> str:
    templates = files("ifbbench.report.pages") / "templates"
    # "<" cannot begin a tag in the data, and NaN is not JSON.
    data = json.dumps(_finite(content), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    # The first line of a body is its link for keyboards, which stands before the header.
    skip, _, body = (templates / f"{template}.html").read_text(encoding="utf-8").partition("\n")
    parts = {
        "skip": skip,
        "body": body,
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": page_style() + (templates / "page.css").read_text(encoding="utf-8"),
        "script": page_script() + "\n".join((templates / name).read_text(encoding="utf-8") for name in scripts),
        "data": data,
    }
    html = (templates / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        html = html.replace(f"{{{{{name}}}}}", text)
    return html


def _finite(value: Any) -> Any:
    """`value` with None for each float that JSON cannot express."""
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value
