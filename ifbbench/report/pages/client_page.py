"""The page of a run against an endpoint: figures, charts and slow requests, without what only the server knows."""

from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.analysis.client_side import ClientFindings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.words import words_of
from ifbbench.report.chart_files import Output
from ifbbench.report.charts import CHARTS, ENDPOINT_CHARTS, plot_run
from ifbbench.report.client_side import client_sentences, client_warnings
from ifbbench.report.pages.page_data import shown_what_if
from ifbbench.report.tables import peak_blocks, settings_line
from ifbbench.rundir.figures import figures
from ifbbench.rundir.run_directory import WHAT_IF

TEMPLATE, SCRIPTS = "endpoint", ("common.js", "panels.js", "endpoint.js")
SLOWEST, FAILED = 15, 30


def client_page_data(run: RecordedRun) -> dict[str, Any]:
    """Everything that the page shows of `run`. The charts are SVG in base64."""
    data, findings, summary = run.data, ClientFindings(run), figures(run.data)
    failed = [row for row in run.row_of.values() if row["outcome"] == "failed"]
    return {
        "name": data.name,
        "settings": settings_line(data),
        "partial": data.partial,
        "recorded_every": 1,
        "trace": (data.run.get("trace") or {}).get("name"),
        "model": (data.endpoint or {}).get("model"),
        "device": (data.endpoint or {}).get("url"),
        "config": data.config,
        "summary": summary,
        "kv_peak": peak_blocks(summary),
        "blocks": words_of(data.config).blocks(data.config.get("tokens_per_block")),
        "findings": findings.text,
        "warnings": [*client_warnings(data, summary), *client_sentences(summary)],
        "what_if": shown_what_if(run) if (run.path / WHAT_IF).exists() else None,
        "charts": _charts(run),
        "slowest": findings.slowest(SLOWEST),
        "failed": [
            {name: row.get(name) for name in ("request_id", "arrival_s", "kind", "error")} for row in failed[:FAILED]
        ],
    }


def _charts(run: RecordedRun) -> list[dict[str, str]]:
    with TemporaryDirectory() as folder:
        files = {path.stem: path for path in plot_run(run.data, output=Output(Path(folder), ("svg",)))}
        return [
            {"name": name, "shows": CHARTS[name].shows, "svg": b64encode(files[name].read_bytes()).decode()}
            for name in ENDPOINT_CHARTS
            if name in files
        ]
