"""The first sentence of `why` states what requests waited for, and nothing tells users to change what no run tried."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.analysis.findings import Findings
from ifbbench.cli.main import main
from tests.analysis.runs import SETTINGS, simulate, write_requests

UNTRIED = re.compile(r"\b(raise|raising|lower --|increase|give the|no setting|chang(e|es|ed) no)", re.IGNORECASE)
KINDS: dict[str, dict[str, Any]] = SETTINGS | {
    "enough of everything": {"max_tokens_in_paged_kvcache": None, "time_scale": 50.0},
    "adapters": {"num_loras": 30, "lora_device_mem_fraction": 0.002, "max_tokens_in_paged_kvcache": None},
}


@pytest.mark.usefixtures("without_layout")
@pytest.mark.parametrize("kind", KINDS)
def test_waiting_is_stated_and_nothing_is_advised(kind: str, tmp_path: Path) -> None:
    run = simulate(tmp_path, "run", write_requests(tmp_path / "trace.jsonl", seed=3), **KINDS[kind])
    directory = run.data.path
    printed = {
        name: CliRunner().invoke(main, [*name.split(), str(directory)]).output
        for name in ("why --budget 0", "why --budget 0 --json", "report", "report --json")
    }
    assert CliRunner().invoke(main, ["plot", "--html", str(directory)]).exit_code == 0
    page = (directory / "charts" / "run.html").read_text()
    for name, text in {**printed, "page": page}.items():
        assert not UNTRIED.search(text), f"{name}: {UNTRIED.search(text)}"

    findings = Findings(run)
    waited_s, text = findings.waiting_s, findings.waiting_text
    facts = json.loads(printed["why --budget 0 --json"])
    assert facts["advice"] == {"text": text, "limit": max(waited_s, key=waited_s.__getitem__, default=None)}
    assert text in printed["why --budget 0"]
    if kind == "enough of everything":
        assert text == "No request waited for a limit."
        return
    total = float(re.search(r"waited ([\d,.]+) request-seconds", text)[1].replace(",", ""))  # type: ignore[index]
    all_s = sum(findings.all_waiting_s.values())
    assert total == pytest.approx(all_s, rel=0.005)
    no_limit_is_told = findings.all_waiting_s.get("none", 0.0) >= 0.01 * all_s
    assert text.count(" % for ") == len(waited_s) + no_limit_is_told
    assert ("for the next iteration" in text) == no_limit_is_told
    assert ("Pauses, which free KV blocks, cost" in text) == bool(findings.ledger.entries)


def test_a_limit_is_named_with_its_value(tmp_path: Path) -> None:
    trace = write_requests(tmp_path / "trace.jsonl", seed=3)
    small = {"small batch": "a batch slot (max_batch_size 4)", "small budget": "the token budget (max_num_tokens 96)"}
    for kind, words in small.items():
        assert words in Findings(simulate(tmp_path, kind, trace, **SETTINGS[kind])).waiting_text
    run = simulate(tmp_path, "blocks", trace, **SETTINGS["guaranteed_no_evict"])
    assert f"KV blocks ({run.data.run['num_kv_blocks']:,} in all)" in Findings(run).waiting_text
