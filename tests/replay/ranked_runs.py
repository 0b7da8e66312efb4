"""A trace of 64 requests, and runs of it, for tests of several ranks."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench import BatchManager, Communicator, InferenceRequest, SamplingParams
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace
from ifbbench.replay.single import RunResult
from ifbbench.settings.config import RunConfig

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "device": "cpu",
    "time_scale": 0.0,
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 128,
    "max_tokens_in_paged_kvcache": 512,
    "enable_chunked_context": True,
    "warm_up": 0,
}


def write_trace(path: Path) -> Path:
    """64 requests; every other one shares a prefix with others."""
    draw = random.Random(1)
    prefix = [draw.randrange(4096) for _ in range(40)]
    rows = []
    for number in range(64):
        prompt = [draw.randrange(4096) for _ in range(draw.randint(5, 60))]
        output_len = draw.randint(4, 20)
        rows.append(
            {
                "request_id": number,
                "arrival_s": 0.0,
                "prompt_tokens": prefix[: 40 * (number % 2)] + prompt,
                "prompt_len": 40 * (number % 2) + len(prompt),
                "output_len": output_len,
                "max_new_tokens": output_len + draw.randint(0, 8),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(trace: Path, directory: Path, **settings: Any) -> tuple[RunResult, list[Any]]:
    """The result and the tokens of a run into `directory`."""
    tokens = directory.with_suffix(".tokens.json")
    paths = {"output": str(directory), "responses_json": str(tokens), "overwrite": True}
    result = run_trace(str(trace), RunConfig(**SIZES | settings | paths))
    return result, json.loads(tokens.read_text())


def simulated_digest(trace: Path, tmp_path: Path, **sizes: Any) -> str:
    settings = SIZES | {"device": "sim:cpu", "output": str(tmp_path / "simulated")} | sizes
    return str(run_trace(str(trace), RunConfig(**settings)).summary["schedule_digest"])


def answers(with_drafts: bool = False, **sizes: int) -> dict[str, Any]:
    """Sequences or errors, by request, of a batch manager in this process, or with `sizes` of rank 0 of a launcher."""
    draw, model = np.random.default_rng(1), load_model_config("tiny")
    adapter = {  # of the query projections in the first and the last layer, with rank 2
        "lora_task_id": 7,
        "lora_config": np.array([[1, 0, 2], [1, model.num_layers - 1, 2]], np.int32),
        "lora_weights": draw.normal(size=(2, 4 * model.hidden_size)).astype(np.float32),
    }
    table = draw.normal(size=(3, model.hidden_size)).astype(np.float32)
    bias = draw.normal(scale=5, size=model.vocab_size).astype(np.float32)
    asked: list[dict[str, Any]] = [
        {},
        adapter,
        {"lora_task_id": 7},
        {"sampling": SamplingParams(bad_words=((467,), (5, 6)))},
        {"sampling": SamplingParams(embedding_bias=bias)},
        {"prompt_embedding_table": table, "input_ids": [model.vocab_size + 2, 4, model.vocab_size]},
        {"draft_input_ids": np.array([1, 2, 3], np.int32)} if with_drafts else {},
    ]
    common: dict[str, Any] = {"max_new_tokens": 12}
    waiting = [
        InferenceRequest(number, **common | {"input_ids": [3, 4, number]} | fields)
        for number, fields in enumerate(asked)
    ]
    found: dict[str, Any] = {}

    def send(request_id: int, tensors: dict[str, Any], is_final: bool, error: str) -> None:
        found[str(request_id)] = error or tensors["output_ids"][0, 0].tolist()

    manager = BatchManager(
        "tiny",
        "IFB",
        1,
        "max_utilization",
        lambda count: [waiting.pop(0)] if waiting and count else [],
        send,
        optional_params={
            "device": "cpu",
            "max_seq_len": 64,
            "max_batch_size": 4,
            "lora_device_mem_fraction": 0.01,
            "kv_cache_config": {"max_tokens": 512},
            "max_lora_rank": 4,
        },
        communicator=Communicator(**sizes, device="cpu") if sizes else None,
    )
    manager.close()
    return found
