"""`ifbbench capacity` with prefill and decode apart, held to fleets that are always full."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.settings.names import from_mapping
from ifbbench.studies.capacity_sides import study_sides
from ifbbench.workload.formats import write_trace
from ifbbench.workload.trace import TraceRequest
from tests.fleet.test_fleet import ENGINES, config_of

SHORT = TraceRequest(0, 0.0, 1000, 60, 60)


def requests(number: int, like: TraceRequest) -> list[TraceRequest]:
    return [TraceRequest(at, 0.0, like.prompt_len, like.max_new_tokens, like.output_len) for at in range(number)]


def full_rate(path: Path, replica: int, number: int, **asked: Any) -> float:
    """Requests per second of one replica of a fleet to which all requests come at once."""
    path.mkdir()
    write_trace(requests(number, SHORT), path / "trace.jsonl")
    summary = run_trace(str(path / "trace.jsonl"), config_of(**asked, output=str(path / "fleet"))).summary
    assert summary["requests"]["completed"] == number
    own = json.loads((path / "fleet" / f"replica={replica}" / "summary.json").read_text())
    return float(own["request_throughput_per_s"])


@pytest.mark.parametrize("engine", ENGINES)
def test_rates_are_those_of_fleets_that_are_always_full(engine: str, tmp_path: Path) -> None:
    """The rate of a prefill replica beside many decode replicas, and of a decode replica beside many prefill replicas,
    is what `capacity` computes."""
    asked: dict[str, Any] = {"engine": engine, "prefill": "max_num_tokens=4000", "decode": "max_batch_size=8"}
    # Prompts are sent without delay, and none is found in a cache.
    asked |= {"transfer_bandwidth": 1e15, "router": "least_requests", "enable_kv_cache_reuse": False}
    found = study_sides(config_of(**asked, prefill_replicas=1, decode_replicas=1), [SHORT])
    assert found.decode.at_once == 8
    assert found.ratio is not None
    assert found.prefill.rate is not None
    assert found.decode.rate is not None
    computed = full_rate(tmp_path / "prefill", 0, 96, **asked, prefill_replicas=1, decode_replicas=12)
    assert found.prefill.rate == pytest.approx(computed, rel=0.05)
    generated = full_rate(tmp_path / "decode", 6, 96, **asked, prefill_replicas=6, decode_replicas=1)
    assert found.decode.rate == pytest.approx(generated, rel=0.1)


def test_each_side_has_settings_of_its_own_and_a_link() -> None:
    config = config_of(
        engine="vllm", prefill_replicas=2, decode_replicas=3, decode="tp_size=2", transfer_bandwidth=1.31072e9
    )
    found = study_sides(config, [SHORT])
    assert (found.prefill.study.config.tp_size, found.decode.study.config.tp_size) == (1, 2)
    # 131,072 bytes of a token, of which each of two GPUs receives half.
    assert (found.prefill.link_rate, found.decode.link_rate) == (10_000, 20_000)
    # The links of prefill replicas are slowest: ten prompts a second each.
    assert found.rate == pytest.approx(20)
    assert found.link_use(found.prefill) == pytest.approx(1)
    assert found.link_use(found.decode) == pytest.approx(20 / 3 * 1000 / 20_000)
    one = from_mapping({"engine": "vllm", "device": "null", "prefill_replicas": 1}, command_line=True)
    with pytest.raises(InputError, match="needs --decode_replicas"):
        study_sides(one)


def test_sglang_keeps_tokens_free_for_each_request() -> None:
    asked = {"engine": "sglang", "prefill_replicas": 1, "decode_replicas": 1, "decode": "max_batch_size=4096"}
    held = [study_sides(config_of(**asked, num_reserved_decode_tokens=n), [SHORT]).decode.at_once for n in (0, 512)]
    assert held[0] is not None
    assert held[1] is not None
    tokens = study_sides(config_of(**asked)).decode.study.pool.windows[0].num_blocks
    assert held[1] == tokens // (1000 + 30 + 512) < held[0]


def test_the_command_says_which_ratio_balances() -> None:
    options = ["--device", "h100-sxm", "--model", "llama-3.1-8b", "--engine", "vllm", "--input-len", "1155"]
    options += ["--output-len", "211", "--prefill_replicas", "3", "--decode_replicas", "2"]
    result = CliRunner().invoke(main, ["capacity", *options])
    assert result.exit_code == 0, result.output
    assert "They balance with 1.52 prefill replicas for each decode replica." in result.output
    facts = json.loads(CliRunner().invoke(main, ["capacity", *options, "--json"]).stdout)
    assert facts["sides"]["prefill"]["requests"]["mean_output_len"] == 1
    assert facts["sides"]["decode"]["requests"]["mean_output_len"] == 211
    assert facts["requests_per_s"] == pytest.approx(3 * facts["sides"]["prefill"]["requests_per_s"])
    assert facts["summary"][-1] in result.output
    refused = CliRunner().invoke(main, ["capacity", *options[:-4], "--router_state_age", "1"])
    assert refused.exit_code == 2
    assert "--router_state_age: is for a fleet" in refused.output
