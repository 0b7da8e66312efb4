"""Every file of a run is valid by its schema, in several kinds of runs, and the page of the files has every field."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from ifbbench.cli.main import main
from ifbbench.compressed import read_pieces
from ifbbench.replay.run import run_trace
from ifbbench.rundir.schema import FILES, schema_of, schemas
from ifbbench.settings.config import RunConfig
from tests.rundir.virtual_run import Interrupted, limits, run, trace_of

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
ROWS: list[dict[str, Any]] = [
    {"prompt_len": 60, "output_len": 9, "max_new_tokens": 30, "class": "chat"},
    {"prompt_tokens": [1, 2, 3, 4], "output_len": 20, "priority": 0.9, "stop_ids": [7]},
    {"prompt_len": 40, "output_len": 1, "class": "batch"},
    {"prompt_len": 40, "prefix_ids": [3], "prefix_lens": [32], "output_len": 25, "max_new_tokens": 40},
    {"prompt_len": 9_000, "output_len": 5},  # refused
    {"prompt_len": 30, "output_len": 30, "lora_task_id": 2},
]
KINDS: dict[str, dict[str, Any]] = {
    "in-flight": {},
    "pauses": {"policy": "max_utilization", "max_tokens_in_paged_kvcache": 120, "enable_chunked_context": True},
    "static": {"type": "v1"},
    "two passes": {"type": "UIFB"},
    "executor's statistics": {"iteration_stats_format": "trtllm", "recording_format": "jsonl.gz"},
    "executor's static": {"iteration_stats_format": "trtllm", "type": "v1"},
    "thinned": {"iteration_stats_every": 4},
    "contiguous": {"kv_cache_type": "contiguous", "max_tokens_in_paged_kvcache": None, "max_batch_size": 2},
    "simulated": {"device": "sim:h100-sxm", "model": "llama-3.1-8b", "enable_kv_cache_reuse": True},
    "profile": {"device": "cpu", "profile": True},
    "LoRA": {"num_loras": 4, "lora_rank": 2},
}


def strict(schema: Any) -> Any:
    """`schema` without further fields: one that no type names is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(item) for name, item in schema.items()}
    return inner | {"additionalProperties": False} if "properties" in schema else inner


def check(directory: Path) -> set[str]:
    """Validate the files of a run directory; returns their names."""
    checked = set()
    for path in sorted(directory.iterdir()):
        name = path.name.removesuffix(".gz")
        if name not in FILES:
            continue
        text = b"".join(read_pieces(path)).decode()
        validator = Draft202012Validator(strict(schema_of(name)))
        for content in [text] if name.endswith(".json") else text.splitlines():
            errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(json.loads(content))]
            assert errors == [], f"{name}: {content[:300]}"
        checked.add(name)
    return checked


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_run_are_valid(kind: str, tmp_path: Path) -> None:
    rows = [{"request_id": 10 + index, "arrival_s": 0.001 * index, **row} for index, row in enumerate(ROWS)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common: dict[str, Any] = {
        "device": "null",
        "time_scale": 0,
        "cpu_threads": 1,
        "max_seq_len": 128,
        "tokens_per_block": 8,
        "max_tokens_in_paged_kvcache": 512,
    }
    config = RunConfig(**(common | KINDS[kind]), output=str(tmp_path / "run"))
    summary = run_trace(str(tmp_path / "trace.jsonl"), config).summary
    assert summary["requests"]["failed"] == 1
    assert bool(summary["pauses"]) == (kind == "pauses")
    missing = {"open_spans.jsonl", "metrics.jsonl"} | (set() if KINDS[kind].get("type") == "v1" else {"steps.jsonl"})
    assert check(tmp_path / "run") == set(FILES) - missing


def test_lines_of_a_killed_run_are_valid(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(trace_of([(0.0, 40, 20)] * 40), limits("guaranteed_no_evict"), tmp_path / "run", kill_after=700)
    (tmp_path / "run" / "run.json").unlink()  # this run has no more than a name
    assert check(tmp_path / "run") == {"iterations.jsonl", "spans.jsonl", "requests.jsonl", "open_spans.jsonl"}


def test_schemas_are_valid_and_are_printed() -> None:
    assert json.loads(CliRunner().invoke(main, ["schema"]).output) == schemas()
    for name, schema in schemas().items():
        Draft202012Validator.check_schema(schema)
        assert json.loads(CliRunner().invoke(main, ["schema", f"some/run/{name}"]).output) == schema


def test_other_files_have_no_schema() -> None:
    result = CliRunner().invoke(main, ["schema", "request.jsonl"])
    assert result.exit_code == 2
    assert "expected one of run.json, summary.json, " in result.output


def test_a_wrong_type_is_found() -> None:
    line = {"request_id": 1, "phase": "paused", "first_iteration": 0, "last_iteration": 1.5, "tokens": 0, "cause": 2}
    (error,) = Draft202012Validator(schema_of("open_spans.jsonl")).iter_errors(line)
    assert error.json_path == "$.last_iteration"


def fields_of(schema: Any) -> Iterator[str]:
    """The names of all fields in a schema, but for the settings in `run.json`."""
    if isinstance(schema, list):
        for item in schema:
            yield from fields_of(item)
    elif isinstance(schema, dict):
        for name, item in schema.items():
            if name == "properties":
                yield from item
            yield from fields_of({} if name == "config" else item)


@pytest.mark.parametrize("file", [name for name in FILES if name not in ("open_spans.jsonl", "steps.jsonl")])
def test_the_page_has_the_fields_of_each_file(file: str) -> None:
    """The tables of a file's section have a row for each field: name, type, unit and meaning."""
    (section,) = re.findall(rf"^## `{file}`\n(.*?)^## ", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \|[^|]* \| [^|]+ \|$", section, re.MULTILINE)
    assert set(fields_of(schema_of(file))) <= set(rows)
