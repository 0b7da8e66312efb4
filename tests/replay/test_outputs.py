"""The engine's greedy tokens equal those of `transformers`, one request at a time, whatever the schedule."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

pytestmark = pytest.mark.usefixtures("small_model")

VOCABULARY = 89
END_TOKEN = 2
# Where the two best logits are closer than this, either token is right and the comparison of the request stops.
NEAR_TIE = 1e-4
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=END_TOKEN,
    )
    directory = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of 1 to 90 tokens, outputs of 1 to 30, all reserving more than they make."""
    draw = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("trace") / "mixed.jsonl"
    rows = []
    for index in range(NUM_REQUESTS):
        prompt = draw.integers(0, VOCABULARY, int(draw.integers(1, 91))).tolist()
        length = int(draw.integers(1, 31))
        rows.append(
            {
                "request_id": 100 + index,
                "arrival_s": 0.0,
                "prompt_tokens": prompt,
                "output_len": length,
                "max_new_tokens": length + 5,
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path, trace: Path) -> dict[int, list[int]]:
    """request id → greedy tokens of transformers, cut at the first near tie."""
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = {}
    for row in map(json.loads, trace.read_text().splitlines()):
        tokens, answer = list(row["prompt_tokens"]), []
        for _ in range(row["output_len"]):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            best = logits.topk(2).values
            if best[0] - best[1] < NEAR_TIE:
                break
            answer.append(int(logits.argmax()))
            tokens.append(answer[-1])
        answers[row["request_id"]] = answer
    lengths = [json.loads(row)["output_len"] for row in trace.read_text().splitlines()]
    assert sum(map(len, answers.values())) > 0.99 * sum(lengths)
    return answers


@pytest.mark.parametrize("tokens_per_block", [1, 8, 32])
@pytest.mark.parametrize("chunking", [None, "first_come_first_served", "equal_progress"])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_tokens_equal_transformers(
    policy: str,
    chunking: str | None,
    tokens_per_block: int,
    checkpoint: Path,
    trace: Path,
    expected: dict[int, list[int]],
    tmp_path: Path,
) -> None:
    config = RunConfig(
        policy=policy,
        model=str(checkpoint),
        device="cpu",
        max_batch_size=6,
        max_num_tokens=32 if chunking else 128,
        enable_chunked_context=chunking is not None,
        context_chunking_policy=chunking or "first_come_first_served",
        context_chunk_unit=max(8, tokens_per_block),
        tokens_per_block=tokens_per_block,
        max_tokens_in_paged_kvcache=192,
        output=str(tmp_path / "run"),
        responses_json=str(tmp_path / "responses.json"),
        quiet=True,
    )
    summary = run_trace(str(trace), config).summary

    answers = {
        row["response_id"]: row["response_tokens"] for row in json.loads((tmp_path / "responses.json").read_text())
    }
    lengths = {row["request_id"]: row["output_len"] for row in map(json.loads, trace.read_text().splitlines())}
    assert {request_id: len(tokens) for request_id, tokens in answers.items()} == lengths
    for request_id, tokens in expected.items():
        assert answers[request_id][: len(tokens)] == tokens, f"request {request_id}"
    if policy == "max_utilization":
        assert summary["pauses"] > 0, "the pool was meant to be too small"
    else:
        assert summary["pauses"] == 0


def test_sampled_tokens_do_not_depend_on_the_batch(checkpoint: Path, trace: Path, tmp_path: Path) -> None:
    answers = []
    for name, batch_size in (("alone", 1), ("together", 8)):
        config = RunConfig(
            model=str(checkpoint),
            device="cpu",
            temperature=0.8,
            top_k=20,
            top_p=0.95,
            seed=5,
            quiet=True,
            max_batch_size=batch_size,
            output=str(tmp_path / name),
            responses_json=str(tmp_path / f"{name}.json"),
        )
        run_trace(str(trace), config)
        answers.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert answers[0] == answers[1]
    assert len({tuple(row["response_tokens"]) for row in answers[0]}) > 1


def test_stop_ids_of_the_trace_end_its_requests_alone(checkpoint: Path, trace: Path, tmp_path: Path) -> None:
    def run(source: Path, name: str) -> list[list[int]]:
        config = RunConfig(
            model=str(checkpoint),
            device="cpu",
            quiet=True,
            output=str(tmp_path / name),
            responses_json=str(tmp_path / f"{name}.json"),
        )
        run_trace(str(source), config)
        return [row["response_tokens"] for row in json.loads((tmp_path / f"{name}.json").read_text())]

    whole = run(trace, "whole")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    longest = max(range(len(rows)), key=lambda index: len(set(whole[index])))
    stop = whole[longest][len(whole[longest]) // 2]
    rows[longest]["stop_ids"] = [VOCABULARY - 1, stop] if stop != VOCABULARY - 1 else [stop]
    with_stop = tmp_path / "with_stop.jsonl"
    with_stop.write_text("".join(json.dumps(row) + "\n" for row in rows))

    stopped = run(with_stop, "stopped")
    ends = [offset for offset, token in enumerate(whole[longest]) if token in rows[longest]["stop_ids"]]
    assert stopped[longest] == whole[longest][: ends[0] + 1]
    assert stopped[:longest] + stopped[longest + 1 :] == whole[:longest] + whole[longest + 1 :]


def test_end_token_ends_a_request_early(checkpoint: Path, trace: Path, tmp_path: Path) -> None:
    answers = {}
    for name, stop in (("whole", False), ("stopped", True)):
        config = RunConfig(
            model=str(checkpoint),
            device="cpu",
            stop_at_end_token=stop,
            quiet=True,
            output=str(tmp_path / name),
            responses_json=str(tmp_path / f"{name}.json"),
        )
        run_trace(str(trace), config)
        rows = json.loads((tmp_path / f"{name}.json").read_text())
        answers[name] = [row["response_tokens"] for row in rows]
    ended = [tokens for tokens in answers["whole"] if END_TOKEN in tokens]
    assert ended, "the model was meant to make its end token"
    assert answers["stopped"] == [
        tokens[: tokens.index(END_TOKEN) + 1] if END_TOKEN in tokens else tokens for tokens in answers["whole"]
    ]
