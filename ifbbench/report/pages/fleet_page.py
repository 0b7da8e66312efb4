"""The page of a fleet: figures, what its router did, a lane for each replica, and slow and failed requests."""

from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ifbbench.analysis.fleet import FleetFindings
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.analysis.sides import SidesFindings
from ifbbench.analysis.words import words_of
from ifbbench.report.chart_files import Output
from ifbbench.report.charts import CHARTS, FLEET_CHARTS, SUMMARY_CHARTS, plot_run
from ifbbench.report.pages.client_page import FAILED, SLOWEST
from ifbbench.report.tables import fleet_sentences, peak_blocks, settings_line
from ifbbench.rundir.figures import figures
from ifbbench.rundir.fleet import replica_directories

TEMPLATE, SCRIPTS = "fleet", ("common.js", "panels.js", "fleet.js")


def fleet_page_data(run: RecordedRun) -> dict[str, Any]:
    """Everything that the page shows of `run`. The charts are SVG in base64."""
    data, summary = run.data, figures(run.data)
    findings = SidesFindings(data) if data.is_disaggregated else FleetFindings(data)
    rows = list(run.row_of.values())
    done = sorted((row for row in rows if row["outcome"] != "failed"), key=lambda row: (-row["e2e_s"], row["index"]))
    failed = [row for row in rows if row["outcome"] == "failed"]
    return {
        "name": data.name,
        "settings": settings_line(data),
        "partial": data.partial,
        "recorded_every": 1,
        "trace": (data.run.get("trace") or {}).get("name"),
        "model": (data.run.get("model") or {}).get("name"),
        "device": (data.run.get("model") or {}).get("device"),
        "pause": words_of(run.config).pause,
        "config": data.config,
        "summary": summary,
        "kv_peak": peak_blocks(summary),
        "blocks": words_of(data.config).blocks(data.config.get("tokens_per_block")),
        "findings": findings.sentences() if rows else [],
        "sentences": fleet_sentences(summary),
        "replicas": (summary.get("fleet") or {}).get("replicas") or [],
        "pages": [f"{path.name}/run.html" for path in replica_directories(run.path) if (path / "run.html").is_file()],
        "charts": _charts(run),
        "slowest": [_shown(row) for row in done[:SLOWEST]],
        "failed": [_shown(row) for row in failed[:FAILED]],
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    names = ("request_id", "arrival_s", "e2e_s", "ttft_s", "replica", "prefill_replica", "decode_replica", "error")
    parts = row.get("attribution_s") or {}
    part, seconds = max(parts.items(), key=lambda item: item[1], default=("", 0.0))
    share = seconds / row["e2e_s"] if row.get("e2e_s") else None
    return {name: row.get(name) for name in names} | {"cause": part.replace("_", " "), "share": share}


def _charts(run: RecordedRun) -> list[dict[str, str]]:
    names = SUMMARY_CHARTS if run.config.get("recording") == "summary" else FLEET_CHARTS
    with TemporaryDirectory() as folder:
        files = {path.stem: path for path in plot_run(run.data, output=Output(Path(folder), ("svg",)))}
        return [
            {"name": name, "shows": CHARTS[name].shows, "svg": b64encode(files[name].read_bytes()).decode()}
            for name in names
            if name in files
        ]
