"""Runs in several processes: the tokens and the schedule of one process, one message when a rank fails, no orphans."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.config import RunConfig
from ifbbench.errors import InputError
from ifbbench.execution.ranks import launched_place, place_in_environment
from ifbbench.replay.run import RunResult, run_trace, summarise_run

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "device": "cpu", "time_scale": 0.0, "max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 128,
    "max_tokens_in_paged_kvcache": 512, "enable_chunked_context": True, "warm_up": 0,
}  # fmt: skip
START_S, END_S = 60.0, 60.0


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 requests; every other one shares a prefix with others."""
    draw = random.Random(1)
    prefix = [draw.randrange(4096) for _ in range(40)]
    rows = []
    for number in range(64):
        prompt = [draw.randrange(4096) for _ in range(draw.randint(5, 60))]
        output_len = draw.randint(4, 20)
        rows.append({
            "request_id": number, "arrival_s": 0.0, "prompt_tokens": prefix[: 40 * (number % 2)] + prompt,
            "prompt_len": 40 * (number % 2) + len(prompt), "output_len": output_len,
            "max_new_tokens": output_len + draw.randint(0, 8),
        })  # fmt: skip
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(trace: Path, directory: Path, **settings: Any) -> tuple[RunResult, list[Any]]:
    """The result and the tokens of a run into `directory`."""
    tokens = directory.with_suffix(".tokens.json")
    paths = {"output": str(directory), "responses_json": str(tokens), "overwrite": True}
    result = run_trace(str(trace), RunConfig(**SIZES | settings | paths))
    return result, json.loads(tokens.read_text())


class Notes:
    """A progress, and the directory that a run reports."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.recorded: list[Path] = []

    def stage(self, label: str) -> None:
        self.stages.append(label)

    def update(self, completed: int, total: int | None, text: str) -> None:
        pass


def test_tensor_parallelism(trace: Path, tmp_path: Path) -> None:
    """Also what the process that starts the ranks takes part in."""
    one, expected = run(trace, tmp_path / "one")
    notes, tokens = Notes(), tmp_path / "tokens.json"
    config = RunConfig(**SIZES, tp_size=2, output=str(tmp_path / "tp2"), responses_json=str(tokens))
    two = run_trace(str(trace), config, notes, on_recording=notes.recorded.append, on_recorded=notes.recorded.append)
    assert json.loads(tokens.read_text()) == expected
    assert two.summary["schedule_digest"] == one.summary["schedule_digest"]
    assert notes.stages == ["reading trace", "loading model", "writing trace", "replaying", "writing results"]
    assert notes.recorded == [tmp_path / "tp2"] * 2
    ranks = json.loads((tmp_path / "tp2" / "run.json").read_text())["ranks"]
    assert [(row["rank"], row["tp_rank"], row["stage"], row["device"]) for row in ranks] == [
        (0, 0, 0, "cpu"), (1, 1, 0, "cpu"),
    ]  # fmt: skip
    assert len({row["pid"] for row in ranks} | {os.getpid()}) == 3
    assert simulated_digest(trace, tmp_path, tp_size=2) == two.summary["schedule_digest"]


def test_pipeline_parallelism(trace: Path, tmp_path: Path) -> None:
    _, expected = run(trace, tmp_path / "one")
    two, tokens = run(trace, tmp_path / "pp2", pp_size=2, check_ranks=7)
    assert tokens == expected
    lines = [json.loads(line) for line in (two.directory / "iterations.jsonl").read_text().splitlines()]
    assert {line["MicroBatch ID"] for line in lines} == {0, 1}
    assert simulated_digest(trace, tmp_path, pp_size=2) == two.summary["schedule_digest"]


def simulated_digest(trace: Path, tmp_path: Path, **sizes: int) -> str:
    settings = SIZES | {"device": "sim:cpu", "output": str(tmp_path / "simulated")} | sizes
    return str(run_trace(str(trace), RunConfig(**settings)).summary["schedule_digest"])


def launch(script: str, arguments: list[str], world_size: int, **more: str) -> list[subprocess.Popen[str]]:
    """Processes with the environment of Open MPI's mpirun."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more | {
                f"OMPI_COMM_WORLD_{name}": str(value) for name, value in
                (("RANK", rank), ("SIZE", world_size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", world_size))
            },
        ) for rank in range(world_size)
    ]  # fmt: skip


# Several runs in the processes of one launcher.
MATRIX = """
import json, sys
from ifbbench.config import RunConfig
from ifbbench.replay.run import run_trace
for settings in json.loads(sys.argv[2]):
    run_trace(sys.argv[1], RunConfig(**settings))
"""
POLICIES: list[dict[str, Any]] = [
    {"policy": "guaranteed_no_evict", "max_batch_size": 16, "max_num_tokens": 128},
    {"policy": "max_utilization", "max_tokens_in_paged_kvcache": 256},
    {"policy": "max_utilization", "enable_chunked_context": False, "max_num_tokens": 128, "enable_kv_cache_reuse": True,
     "max_tokens_in_paged_kvcache": 384, "max_batch_size": 16, "tokens_per_block": 8},
]  # fmt: skip
MORE: list[dict[str, Any]] = [
    {"type": "v1", "max_num_tokens": 128}, {"type": "inflight_unfused"}, {"enable_trt_overlap": True},
    {"kv_cache_type": "contiguous", "enable_chunked_context": False, "max_num_tokens": 128},
    {"max_attention_window": "24"}, {"temperature": 0.8, "seed": 5}, {"max_beam_width": 2, "beam_width": 2},
    {"dtype": "bf16"}, {"repetition_penalty": 1.2}, {"num_loras": 3, "lora_rank": 8},
    {"kv_host_cache_bytes": 10**6, "enable_kv_cache_reuse": True},
]  # fmt: skip


def check_all(trace: Path, directory: Path, cases: list[tuple[dict[str, Any], dict[str, int]]]) -> list[dict[str, Any]]:
    """Each (settings, split) gives the tokens of one process. All splits need as many ranks. Returns the summaries."""
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
    processes = launch(MATRIX, [str(trace), json.dumps([config for _, _, config in runs])], world_size)
    for process in processes:
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
    summaries = [json.loads((directory / str(number) / "summary.json").read_text()) for number, _, _ in runs]
    for (number, name, _), (given, _), summary in zip(runs, cases, summaries, strict=True):
        tokens = json.loads((directory / f"{number}.json").read_text())
        assert summary["requests"]["completed"] == len(tokens) == 64, name
        # In 16 bits a sum of parts is rounded otherwise than a whole one.
        assert tokens == expected[str(given)] or given.get("dtype") == "bf16", name
    return summaries


def test_four_ranks_of_a_launcher(trace: Path, tmp_path: Path) -> None:
    """Pauses, reuse, whole prompts, LoRA, and tensor parallelism within pipeline stages."""
    settings = POLICIES[2] | {"num_loras": 3, "lora_rank": 8}
    (summary,) = check_all(trace, tmp_path, [(settings, {"tp_size": 2, "pp_size": 2})])
    assert summary["pauses"] > 0
    assert summary["prefix_hit_rate"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("split", [
    {"tp_size": 2}, {"pp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}, {"pp_size": 4},
], ids=str)  # fmt: skip
def test_all_settings(trace: Path, tmp_path: Path, split: dict[str, int]) -> None:
    settings = [*POLICIES, *MORE]
    if "pp_size" in split:  # V1 runs in no pipeline
        settings.remove(MORE[0])
    check_all(trace, tmp_path, [(given, split) for given in settings])


@pytest.mark.slow
def test_no_rank_times_out_while_no_request_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({
        "request_id": number, "arrival_s": 5.0 * number, "prompt_len": 20, "max_new_tokens": 5, "output_len": 5,
    }) + "\n" for number in range(2)))  # fmt: skip
    settings = {"time_scale": 1.0, "tp_size": 2, "rank_timeout": 2.0}
    assert summarise_run(str(path), RunConfig(**SIZES | settings))["requests"]["completed"] == 2


# Ranks that fail.


@contextmanager
def started(trace: Path, directory: Path, *options: str, status: int) -> Iterator[list[int]]:
    """The command, and the process ids of its ranks followed by its own, once it has run iterations. It must end with
    `status` after the block, and no process may be left."""
    lengths = ["--reserve", "fixed:60", "--max_batch_size", "4"]
    sizes = [text for name, value in SIZES.items() if name != "max_batch_size" for text in (f"--{name}", str(value))]
    sizes = [text for text in sizes if text != "True"]
    command = [sys.executable, "-m", "ifbbench", "run", str(trace), "--output", str(directory), "--quiet"]
    process = subprocess.Popen(
        [*command, *sizes, *lengths, "--tp_size", "2", *options], text=True, stderr=subprocess.PIPE, cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    pids: list[int] = []
    try:
        deadline = time.monotonic() + START_S
        while not pids and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            if (directory / "run.json").exists() and (text := (directory / "run.json").read_text()):
                pids = [row["pid"] for row in json.loads(text)["ranks"]]
        yield [*pids, process.pid]
        errors = process.communicate(timeout=END_S)[1]
        (directory / "errors.txt").write_text(errors)
        assert process.returncode == status, errors
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    """Whether the process runs; an ended one that nobody waited for does not count."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def message_of(directory: Path) -> str:
    """The one line that the command printed."""
    (line,) = (directory / "errors.txt").read_text().splitlines()
    return line


def check_readable(directory: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(directory)])
    assert result.exit_code == 0
    assert "Partial" in result.output


def test_a_rank_that_is_killed(trace: Path, tmp_path: Path) -> None:
    with started(trace, tmp_path / "run", status=1) as pids:
        os.kill(pids[1], signal.SIGKILL)
    message = message_of(tmp_path / "run")
    assert message.startswith("Error: the run ended early: rank 1 was killed by SIGKILL, perhaps for lack of memory (")
    assert re.search(r"\(\d+ of 64 requests were done; results are kept in .*run\)$", message)
    check_readable(tmp_path / "run")


def test_a_rank_that_hangs(trace: Path, tmp_path: Path) -> None:
    with started(trace, tmp_path / "run", "--rank_timeout", "2", status=1) as pids:
        os.kill(pids[1], signal.SIGSTOP)
    assert "rank 1 did not answer for 2 s, the limit of --rank_timeout" in message_of(tmp_path / "run")
    check_readable(tmp_path / "run")


def test_an_interrupt(trace: Path, tmp_path: Path) -> None:
    with started(trace, tmp_path / "run", status=130) as pids:
        os.kill(pids[-1], signal.SIGINT)
    assert re.match(r"Interrupted. \d+ of 64 requests were done; results are kept in", message_of(tmp_path / "run"))
    check_readable(tmp_path / "run")


def test_a_rank_that_decides_otherwise(trace: Path, tmp_path: Path) -> None:
    policy = "tests.replay.odd_rank_policies:Differs"
    with started(trace, tmp_path / "run", "--policy", policy, status=1):
        pass
    assert re.search(r"rank 1 decided otherwise than rank 0 in iteration \d+\.", message_of(tmp_path / "run"))
    check_readable(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "sign"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (-1, signal.SIGKILL),
                                            (-1, signal.SIGTERM)])  # fmt: skip
def test_other_processes_that_die_or_hang(trace: Path, tmp_path: Path, rank: int, sign: signal.Signals) -> None:
    with started(trace, tmp_path / "run", "--rank_timeout", "2", status=1 if rank == 0 else -sign) as pids:
        os.kill(pids[rank], sign)
    if rank == 0:
        expected = "was killed by SIGKILL" if sign == signal.SIGKILL else "did not answer for 2 s"
        assert f"the run ended early: rank 0 {expected}" in message_of(tmp_path / "run")
    check_readable(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "message"), [
    ("OutOfMemory", r"in rank 1, policy .* failed: .*no memory for a list of requests"),
    ("Hangs", r"rank 0 did not answer for 2 s"),
])  # fmt: skip
def test_a_rank_that_fails_or_hangs_in_a_policy(trace: Path, tmp_path: Path, policy: str, message: str) -> None:
    options = ["--policy", f"tests.replay.odd_rank_policies:{policy}", "--rank_timeout", "2"]
    with started(trace, tmp_path / "run", *options, status=1):
        pass
    assert re.search(message, message_of(tmp_path / "run"))
    check_readable(tmp_path / "run")


# Places of ranks.


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, None), ({"RANK": "1"}, None),
    ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 8, 1, 2)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 1, 2)),
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, (0, 2, 0, 1)),
])  # fmt: skip
def test_the_place_in_the_environment(environment: dict[str, str], expected: tuple[int, ...] | None) -> None:
    place = place_in_environment(environment)
    assert (place and (place.rank, place.world_size, place.local_rank, place.local_size)) == expected


@pytest.mark.parametrize(("environment", "message"), [
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE: expected the numbers"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: 2 is not a rank of 2"),
])  # fmt: skip
def test_places_that_are_wrong(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        place_in_environment(environment)


def test_another_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--tp_size 2 --pp_size 2: need 4 processes, and 2 were launched"):
        run_trace(None, RunConfig(device="cpu", tp_size=2, pp_size=2))
    with pytest.raises(InputError, match="need 1 processes, and 2 were launched"):
        run_trace(None, RunConfig(device="cpu"))
    assert launched_place(RunConfig(device="sim:h100-sxm")) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    place = launched_place(RunConfig(device="cpu", tp_size=2))
    assert place is not None
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT are not set"):
        place.address()


@pytest.mark.parametrize(("settings", "message"), [
    ({"tp_size": 3}, "--tp_size: 3 devices cannot share 8 attention heads"),
    ({"pp_size": 5}, "--pp_size: 5 stages are more than the model's 4 layers"),
])  # fmt: skip
def test_splits_are_refused_before_processes_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        summarise_run(None, RunConfig(device="cpu", **settings))
