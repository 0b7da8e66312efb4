"""The time between tokens: what prompts in the same iterations took of it, against a sum over single iterations."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ifbbench.analysis.findings import Findings
from ifbbench.analysis.generation_time import HELD, HOST, PROMPTS, TOKENS
from ifbbench.cli.main import main
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.names import from_mapping
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import StepWork
from tests.analysis.runs import SETTINGS, simulate, write_requests


@pytest.mark.parametrize("kind", ["guaranteed_no_evict", "max_utilization", "unchunked", "small batch", "small budget"])
def test_prompts_in_the_same_iterations(kind: str, tmp_path: Path) -> None:
    run = simulate(tmp_path, "run", write_requests(tmp_path / "trace.jsonl", seed=3), **SETTINGS[kind])
    found = Findings(run).generation
    assert found is not None
    config = from_mapping(run.config)
    cost_model = CostModel(Shard.of_config(load_model_config(config.model), config), load_hardware("h100-sxm"))
    bounds = Findings(run).bounds
    assert not isinstance(bounds, str)
    for request_id, row in run.row_of.items():
        parts = found.of_request(request_id)
        if not row["tpot_s"]:
            assert not parts
            continue
        assert sum(parts.values()) == pytest.approx(row["e2e_s"] - row["ttft_s"])
        expected_s = host_s = 0.0
        for span in run.spans[request_id]:
            if span.phase != "generation":
                continue
            for number in range(span.first, span.last + 1):
                work = StepWork(*(int(column[number]) for column in bounds.work.computed))
                alone = StepWork(
                    generation_tokens=work.generation_tokens,
                    generation_kv_tokens=work.generation_kv_tokens,
                    outputs=work.generation_tokens,
                )
                expected_s += (cost_model.device_ns(work) - cost_model.device_ns(alone)) / 1e9
                host_s += run.iterations.host_s[number]
        assert parts[PROMPTS] == pytest.approx(expected_s, rel=1e-6, abs=1e-9)
        assert parts[HOST] == pytest.approx(host_s, rel=1e-6, abs=1e-6)
        first = next(index for index, span in enumerate(run.spans[request_id]) if span.produced)
        phases = {span.phase for span in run.spans[request_id][first + 1 :]}
        assert (parts[HELD] > 1e-6) == bool(phases - {"generation"})
    summed = np.sum([list(found.of_request(one).values()) or [0.0] * 4 for one in run.row_of], axis=0)
    assert list(found.of_run) == [TOKENS, PROMPTS, HOST, HELD]
    assert list(found.of_run.values()) == pytest.approx(summed.tolist())


def test_a_long_prompt_is_what_most_bad_tpot_comes_from(tmp_path: Path) -> None:
    """Two answers are under way when a prompt of 7,000 tokens arrives; no limit holds anything."""
    rows = [
        {"request_id": number, "arrival_s": arrival_s, "prompt_len": length, "max_new_tokens": 40, "output_len": 40}
        for number, (arrival_s, length) in enumerate([(0.0, 20), (0.0, 20), (0.05, 7000), (9.0, 20), (9.0, 20)])
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    settings = {"max_num_tokens": 8192, "max_seq_len": 8192, "max_tokens_in_paged_kvcache": None}
    path = str(simulate(tmp_path, "run", trace, **settings).path)
    facts = json.loads(CliRunner().invoke(main, ["why", path, "--budget", "0", "--json"]).stdout)
    assert [*facts["waiting_by_limit"]] == ["none"]
    assert facts["generation"]["shares_of_slowest"]["prompts"] > 0.4 > facts["generation"]["shares"]["prompts"] > 0.1
    assert "prompts in the same iterations" in CliRunner().invoke(main, ["why", path, "--budget", "0"]).stdout
    life = CliRunner().invoke(main, ["why", path, "--request", "0"]).stdout
    assert "Prompts of others in the same iterations took" in " ".join(life.split())
    assert "No limit held it back" in " ".join(life.split())
    assert "of it for prompts of others" in life
    assert "Prompts of others" not in CliRunner().invoke(main, ["why", path, "--request", "4"]).stdout
