"""`tune --goal cost --sides together,apart`: the cheapest deployment with prefill and decode apart, or not."""

import json
import shlex
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.replay.run import summarise_run
from ifbbench.studies.tune_candidates import Goal
from tests.fleet.test_fleet import config_of

pytestmark = pytest.mark.usefixtures("one_process")
SLO = "ttft.p99=250ms,tpot.p99=9ms"
# All that a search would change is given, so that every deployment has these settings.
LIMITS: dict[str, Any] = {
    "max_batch_size": 256,
    "max_num_tokens": 4096,
    "policy": "guaranteed_no_evict",
    "context_chunking_policy": "first_come_first_served",
    "tokens_per_block": 32,
}
MOST_GPUS = 6


def write_long_prompts(path: Path) -> str:
    """Long prompts that hold up the tokens of others."""
    draw, arrival_s, rows = Random(101), 0.0, []
    for number in range(40):
        arrival_s += draw.expovariate(50)
        lengths = {"prompt_len": draw.randint(200, 4000), "output_len": draw.randint(20, 120)}
        rows.append({"request_id": number, "arrival_s": arrival_s, **lengths})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tuned(path: Path, *options: str) -> dict[str, Any]:
    given = [word for name, value in LIMITS.items() for word in (f"--{name}", str(value))]
    words = ["tune", write_long_prompts(path / "trace.jsonl"), "--device", "h100-sxm", "--model", "llama-3.1-8b"]
    words += ["--goal", "cost", "--max-gpus", str(MOST_GPUS), "--quiet", "--json", "--enable_chunked_context", *given]
    done = CliRunner().invoke(main, [*words, "--output", str(path / "tuned"), *options])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory, one_process: None) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("sides")
    return path, tuned(path, "--slo", SLO, "--router", "least_requests", "--sides", "together,apart")


def test_the_cheapest_is_that_of_an_exhaustive_grid(answer: tuple[Path, dict[str, Any]]) -> None:
    path, found = answer
    goal = Goal.of("cost", SLO)
    fleets: list[dict[str, int]] = [{"replicas": number} for number in range(1, MOST_GPUS + 1)]
    for prefill in range(1, MOST_GPUS):
        for decode in range(1, MOST_GPUS - prefill + 1):
            fleets.append({"prefill_replicas": prefill, "decode_replicas": decode})
    usual = LIMITS | {"router": "least_requests", "slo": SLO, "enable_chunked_context": True}
    meets = [
        sum(one.values())
        for one in fleets
        if not goal.shortfalls(summarise_run(str(path / "trace.jsonl"), config_of(**usual, **one)))
    ]
    figures = found["recommendation"]["figures"]
    assert figures["gpus"] == min(meets)
    assert figures["prefill_replicas"] + figures["decode_replicas"] == figures["gpus"]


def test_the_command_and_the_config_file_repeat_the_figures(answer: tuple[Path, dict[str, Any]]) -> None:
    path, found = answer
    figures, (command,) = found["recommendation"]["figures"], found["recommendation"]["commands"]
    run = ["run", "--config", str(path / "tuned" / "run.yaml")]
    for words in (shlex.split(command)[1:], run):
        done = CliRunner().invoke(main, [*words, "--output", str(path / "again"), "--overwrite", "--json", "--quiet"])
        summary = json.loads(done.stdout)
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            assert summary[name]["p99"] == figures[name]["p99"]
        assert summary["fleet"]["gpus"] == figures["gpus"]


def test_the_sentence_has_what_the_runs_measured(answer: tuple[Path, dict[str, Any]]) -> None:
    _, found = answer
    sides = found["sides"]
    assert sides["text"].startswith(f"Prefill and decode apart pay here: {sides['apart']['gpus']} GPUs")
    assert sides["with_equal_gpus"]["gpus"] == sides["apart"]["gpus"]
    assert sides["with_equal_gpus"]["misses"]["tpot.p99"] > 1
    times = sides["apart"]["mean_s"]
    assert 0 < times["prefill_queue"] + times["transfer"] + times["decode_blocks"] < times["ttft"]
    rows = found["deployments"]
    assert [row["sides"] for row in rows] == ["apart", "together"]
    assert rows[0]["gpus"] == sides["apart"]["gpus"]
    assert rows[1]["needs_gpus"] == MOST_GPUS + 1


def test_where_it_does_not_pay_the_nearest_ratio_says_why(tmp_path: Path) -> None:
    found = tuned(tmp_path, "--slo", "ttft.p99=600ms,tpot.p99=100ms", "--sides", "together,apart")
    sides = found["sides"]
    assert found["recommendation"]["figures"]["gpus"] == sides["together"]["gpus"]
    assert sides["text"].startswith("Prefill and decode apart do not pay here")
    assert "in the queues of prefill replicas" in sides["text"]
    assert sides["with_equal_gpus"]["prefill_replicas"] >= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--sides", "apart"], "give --goal cost"),
        (["--goal", "cost", "--sides", "left"], "expected together, apart"),
        (["--goal", "cost", "--decode", "tp_size=2"], "add --sides apart"),
        (["--goal", "cost", "--sides", "apart", "--prefill_replicas", "2"], "--sides apart compares such fleets"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: list[str], expected: str) -> None:
    done = CliRunner().invoke(main, ["tune", "chat", "--device", "h100-sxm", "--model", "llama-3.1-8b", *options])
    assert done.exit_code == 2
    assert expected in done.output
