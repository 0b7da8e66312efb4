"""Recordings of real vLLM servers, and a log: `server.tar.gz` and `async_server.tar.gz` have what `python -m
benchmarks.vllm_server --requests 80 --blocks 36 --keep DIRECTORY` left of the synchronous and the asynchronous one
(vLLM 0.32 on a CPU), with what a wrapper around `schedule` saw; the first one also the lines of the log that `import`
reads."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from tests.live.recordings import batches, decisions, holders_of, lines


def extracted(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(name)
    with tarfile.open(Path(__file__).parent / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted("server", tmp_path_factory)


@pytest.fixture(scope="module", params=["server", "async_server"])
def each_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(request.param, tmp_path_factory)


def call(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_each_of_several_replays_says_whether_it_differs(server: Path, tmp_path: Path) -> None:
    """A sweep takes the settings of the recording, as `run` does."""
    recording = str(server / "recording")
    output = call("sweep", recording, "--over", "max_num_seqs=8,16", "--quiet", "--output", str(tmp_path / "sweep"))
    assert "max_batch_size=8: The replay is not the recorded schedule: " in output
    assert output.count("The replay is not the recorded schedule") == 1  # the server had 16
    few = ["--max_num_seqs", "8", "--quiet", "--output"]
    output = call("run", recording, "--engine", "vllm", "--repeat", "2", *few, str(tmp_path / "repeats"))
    assert "repeat-1, repeat-2: The replay is not the recorded schedule: " in output
    over = ["--over", "max_num_seqs=8,16", "--keep", "summary", "--quiet"]
    output = call("sweep", recording, *over, "--output", str(tmp_path / "summaries"))
    assert "The runs were not compared with the recorded schedule: --keep run keeps them for it." in output


def test_the_recording_is_what_the_wrapper_saw_and_is_replayed(each_server: Path, tmp_path: Path) -> None:
    recording, seen = each_server / "recording", lines(each_server, "witness")
    names = {row["request_id"]: row["name"] for row in lines(recording, "requests")}
    is_async = json.loads((recording / "run.json").read_text())["config"]["async_scheduling"]
    assert is_async == (each_server.name.startswith("async"))
    for batch, step in zip(batches(recording), seen, strict=True):
        found = {names[number]: tokens for number, tokens in batch.items()}
        expected = {name: tokens for name, tokens, _ in step["scheduled"]}
        # Where iterations are scheduled ahead, spans have no step too many of a request that has ended by then.
        assert found == {name: tokens for name, tokens in expected.items() if not is_async or name in found}
        assert all(expected[name] == 1 for name in expected.keys() - found.keys())
    pauses = [(line[2], line[3]) for line in decisions(recording)]
    assert pauses == [(len(step["preempted"]), step["free_blocks"]) for step in seen]
    assert sum(count for count, _ in pauses) > 10
    output = call("run", str(recording), "--engine", "vllm", "--output", str(tmp_path / "replayed"), "--quiet")
    assert "recorded schedule" not in output
    assert decisions(tmp_path / "replayed") == decisions(recording)
    assert batches(tmp_path / "replayed") == batches(recording)


def test_a_replay_that_differs_says_so(server: Path, tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    shutil.copytree(server / "recording", recording)
    replay = ["run", str(recording), "--engine", "vllm", "--quiet", "--output"]
    assert "recorded schedule" not in call(*replay, str(tmp_path / "equal"))
    rows = lines(recording, "iterations")
    number, details = 200, rows[200]["ifbbench"]
    text = f"1 of {len(rows)} iterations differ, first iteration {number}: "
    text += f"{rows[number]['Scheduled Requests']} requests with {details['budget_used']} tokens"
    details["budget_used"] += 3
    (recording / "iterations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert text in call(*replay, str(tmp_path / "differs"))
    (recording / "iterations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-2]))
    output = call(*replay, str(tmp_path / "longer"))
    assert f"3 of {len(rows)} iterations differ, first iteration {number}: " in output
    assert f"recorded: {rows[number]['Scheduled Requests']} requests with {details['budget_used']} tokens" in output
    (recording / "iterations.jsonl").write_text("no iteration\n")
    output = call(*replay, str(tmp_path / "unreadable"))
    assert "was not compared with the recorded schedule: " in output
    assert "iterations.jsonl, line 1" in output
    (recording / "iterations.jsonl").unlink()
    assert "recorded schedule" not in call(*replay, str(tmp_path / "unknown"))


def test_why_names_what_held_a_request(each_server: Path) -> None:
    """In 100 random iterations, against a literal transcription of vLLM's rule on vLLM's own queue."""
    found = holders_of(each_server / "recording", lines(each_server, "witness"), 16, 256, 100, seed=0)
    assert len(found) == 100
    assert [one for one in found if one.found != one.expected] == []
    assert {one.expected[1] for one in found} >= {"blocks", "num_tokens"}


def test_its_log_has_the_iterations_of_the_recording(server: Path, tmp_path: Path) -> None:
    call("import", str(server / "vllm.log"), "--output", str(tmp_path / "imported"))
    recorded, found = (lines(path, "iterations") for path in (server / "recording", tmp_path / "imported"))
    # vLLM counts a request that computes its prompt again after a pre-emption as generation: one of them in a batch is
    # known by its tokens, several are not told apart.
    again = [number for number, row in enumerate(recorded) if row["ifbbench"]["tokens_recomputed"]]
    assert 0 < len(again) < 25
    assert len(found) == len(recorded)
    for number, (row, other) in enumerate(zip(found, recorded, strict=True)):
        assert row["Scheduled Requests"] == other["Scheduled Requests"]
        assert row["ifbbench"]["budget_used"] == other["ifbbench"]["budget_used"]
        # The log has the blocks in use when the requests that ended had left.
        assert row["Used KV cache blocks"] <= other["Used KV cache blocks"] + 1
        if number not in again:
            assert row["Total Context Tokens"] == other["Total Context Tokens"]
    near = [
        abs(row["Used KV cache blocks"] - other["Used KV cache blocks"]) <= 1
        for row, other in zip(found, recorded, strict=True)
    ]
    assert sum(near) > 0.7 * len(near)
    ends = [rows[-1]["ifbbench"]["start_s"] - rows[0]["ifbbench"]["start_s"] for rows in (found, recorded)]
    assert ends[0] == pytest.approx(ends[1], abs=2.0)
    run = json.loads((tmp_path / "imported" / "run.json").read_text())
    assert (run["config"]["max_batch_size"], run["config"]["max_num_tokens"]) == (16, 256)


def test_other_settings_are_tried_on_it(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is replayed on a simulated device that was fitted to it."""
    (server / "model").mkdir(exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (server / "model" / "config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(server)  # the server was started there with `--model model`
    output = call("why", "recording", "--what_if", "max_num_seqs=32", "--budget", "60s")
    assert "its replay there" in output
    assert "--max-num-seqs 32" in output
