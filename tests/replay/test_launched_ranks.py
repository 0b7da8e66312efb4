"""Several runs in the processes of one launcher: the tokens of one process, and one message when a run fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.replay.ranked_runs import ROOT, SIZES, answers, run, simulated_digest, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl")


# Forks the ranks of a launcher, with the environment of Open MPI's mpirun, from a process that has imported what they
# need: importing torch takes longer than their runs. Prints the exit statuses of all.
LAUNCHER = """
import json, os, sys
import ifbbench.torch.model_executor
from ifbbench.settings.config import RunConfig
from ifbbench.replay.run import run_trace
from tests.replay.ranked_runs import answers
trace, folder, size, configs, sizes = map(json.loads, sys.argv[1:])
pids = []
for rank in range(size):
    if pid := os.fork():
        pids.append(pid)
        continue
    for name, value in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", size)):
        os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    output = os.open(f"{folder}/rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    if sizes:  # a batch manager, with sizes of its communicator
        print(json.dumps(answers(**sizes)), flush=True)
    for settings in configs:
        run_trace(trace, RunConfig(**settings))
    sys.exit()
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""
POLICIES: list[dict[str, Any]] = [
    {"policy": "guaranteed_no_evict", "max_batch_size": 16, "max_num_tokens": 128},
    {"policy": "max_utilization", "max_tokens_in_paged_kvcache": 256},
    {
        "policy": "max_utilization",
        "enable_chunked_context": False,
        "max_num_tokens": 128,
        "enable_kv_cache_reuse": True,
        "max_tokens_in_paged_kvcache": 384,
        "max_batch_size": 16,
        "tokens_per_block": 8,
    },
]
MORE: list[dict[str, Any]] = [
    {"type": "v1", "max_num_tokens": 128},
    {"type": "inflight_unfused"},
    {"enable_trt_overlap": True},
    {"kv_cache_type": "contiguous", "enable_chunked_context": False, "max_num_tokens": 128},
    {"max_attention_window": "24"},
    {"temperature": 0.8, "seed": 5},
    {"max_beam_width": 2, "beam_width": 2},
    {"dtype": "bf16"},
    {"repetition_penalty": 1.2},
    {"num_loras": 3, "lora_rank": 8},
    {"kv_host_cache_bytes": 10**6, "enable_kv_cache_reuse": True},
]


def launch(
    trace: Path, folder: Path, statuses: list[int], configs: list[dict[str, Any]], sizes: dict[str, Any] | None = None
) -> list[str]:
    """What each rank printed in one launcher's runs of `configs`. They must end with `statuses`."""
    arguments = [json.dumps(one) for one in (str(trace), str(folder), len(statuses), configs, sizes)]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-c", LAUNCHER, *arguments]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=900)
    outputs = [path.read_text() for path in sorted(folder.glob("rank-*.txt"))]
    assert (done.returncode, done.stdout) == (0, f"{statuses}\n"), [done.stderr, *outputs]
    return outputs


def check_all(trace: Path, directory: Path, cases: list[tuple[dict[str, Any], dict[str, int]]]) -> list[dict[str, Any]]:
    """Each (settings, split) gives the tokens of one process, and so does a batch manager before them. All splits need
    as many ranks. Returns the summaries."""
    expected: dict[str, Any] = {}
    runs = []
    for number, (given, split) in enumerate(cases):
        name = f"{number}-{given}-{split}".replace("/", "")
        if str(given) not in expected:
            expected[str(given)] = run(trace, directory / f"{number}-one", **given)[1]
        paths = {"output": str(directory / str(number)), "responses_json": str(directory / f"{number}.json")}
        runs.append((number, name, SIZES | given | split | paths))
    _, split = cases[0]
    world_size = split.get("tp_size", 1) * split.get("pp_size", 1)
    of_lead, *of_others = launch(trace, directory, [0] * world_size, [config for _, _, config in runs], split)
    assert json.loads(of_lead.partition("\n")[0]) == answers()  # warnings follow
    assert of_others == ["{}\n"] * (world_size - 1)
    summaries = [json.loads((directory / str(number) / "summary.json").read_text()) for number, _, _ in runs]
    for (number, name, _), (given, _), summary in zip(runs, cases, summaries, strict=True):
        tokens = json.loads((directory / f"{number}.json").read_text())
        assert summary["requests"]["completed"] == len(tokens) == given.get("max_num_samples", 64), name
        # In 16 bits a sum of parts is rounded otherwise than a whole one.
        assert tokens == expected[str(given)] or given.get("dtype") == "bf16", name
    return summaries


def test_four_ranks_of_a_launcher(trace: Path, tmp_path: Path) -> None:
    """Pauses, reuse, whole prompts, LoRA, and tensor parallelism within pipeline stages."""
    settings = POLICIES[2] | {"num_loras": 3, "lora_rank": 8, "max_num_samples": 24}
    split = {"tp_size": 2, "pp_size": 2}
    (summary,) = check_all(trace, tmp_path, [(settings | {"check_ranks": 7}, split)])
    assert summary["pauses"] > 0
    assert summary["prefix_hit_rate"] > 0
    lines = [json.loads(line) for line in (tmp_path / "0" / "iterations.jsonl").read_text().splitlines()]
    assert {line["MicroBatch ID"] for line in lines} == {0, 1}
    assert simulated_digest(trace, tmp_path, **settings, **split) == summary["schedule_digest"]


@pytest.mark.slow
def test_drafts_and_queues_and_a_run_that_fails(trace: Path, tmp_path: Path) -> None:
    """The last run fails in rank 1: rank 0 says so at once, and nothing else is printed. A batch manager before them
    has virtual tokens, bad words, biases, LoRA adapters and draft tokens of its requests."""
    cases: list[dict[str, Any]] = [
        {"draft_ngram": 2, "draft_len": 3},
        {"draft_model": "tiny", "draft_len": 2, "temperature": 0.5},
        {"normalize_log_probs": True, "return_log_probs": True, "temperature": 0.7, "top_k": 20, "max_queue_size": 5},
    ]
    cases = [{"max_num_samples": 12, "max_batch_size": 4} | case for case in cases]
    expected = [run(trace, tmp_path / f"one-{number}", **case) for number, case in enumerate(cases)]
    fails = {"policy": "tests.replay.odd_rank_policies:OutOfMemory"}
    runs = [
        SIZES
        | {"tp_size": 2}
        | case
        | {"output": str(tmp_path / str(number)), "responses_json": str(tmp_path / f"{number}.json")}
        for number, case in enumerate([*cases, fails])
    ]
    of_lead, of_other = launch(trace, tmp_path, [1, 1], runs, {"tp_size": 2, "with_drafts": True})
    assert of_other == "{}\n"
    assert json.loads(of_lead.partition("\n")[0]) == answers(with_drafts=True)
    message = r"RunFailed: the run ended after \d+ iterations: .*in rank 1, policy .* failed: .*no memory for a list"
    assert len(re.findall(message, of_lead)) == 1
    for number, (one, tokens) in enumerate(expected):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        summary = json.loads((tmp_path / str(number) / "summary.json").read_text())
        assert [row | {"log_probs": None} for row in found] == [row | {"log_probs": None} for row in tokens]
        assert summary["requests"] == one.summary["requests"]
        assert summary["schedule_digest"] == one.summary["schedule_digest"]
    assert expected[2][0].failed == 12 - 4 - 5


@pytest.mark.slow
def test_wrong_input_is_reported_once(tmp_path: Path) -> None:
    runs = [SIZES | {"tp_size": 2, "output": str(tmp_path / "run")}]
    of_lead, of_other = launch(tmp_path / "missing", tmp_path, [1, 0], runs)
    assert "InputError: trace " in of_lead
    assert of_other == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        {"tp_size": 2},
        {"pp_size": 2},
        {"tp_size": 4},
        {"tp_size": 2, "pp_size": 2},
        {"pp_size": 4},
    ],
    ids=str,
)
def test_all_settings(trace: Path, tmp_path: Path, split: dict[str, int]) -> None:
    settings = [*POLICIES, *MORE]
    if "pp_size" in split:  # V1 runs in no pipeline
        settings.remove(MORE[0])
    check_all(trace, tmp_path, [(given, split) for given in settings])
