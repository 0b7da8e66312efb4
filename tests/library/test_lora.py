"""Batches that mix LoRA adapters, held against PEFT on a small random model; and adapters that requests bring."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ifbbench import BatchManager, InferenceRequest
from ifbbench.errors import InputError
from ifbbench.models.lora_modules import lora_modules
from ifbbench.models.named_models import load_model_config
from ifbbench.serving.library.client import Tensors
from tests.library.test_against_transformers import SCHEDULES, answers, check_close, checkpoint, prompts

__all__ = ["checkpoint", "prompts"]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "attention": {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["o_proj", "down_proj", "k_proj"],
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {"layers.1.self_attn.k_proj": 12},
    },
    "one layer": {"r": 5, "lora_alpha": 2, "target_modules": ALL, "layers_to_transform": [1]},
}
BROUGHT: dict[str, Any] = {"lora_device_mem_fraction": 0.01}


@pytest.fixture(scope="module")
def lora_dir(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters of ADAPTERS as PEFT saves them, task 0 to 3."""
    from peft import LoraConfig, get_peft_model  # it takes seconds, of each process that collects the tests

    directory = tmp_path_factory.mktemp("loras")
    for number, (name, settings) in enumerate(ADAPTERS.items()):
        torch.manual_seed(number)
        base = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(**settings))
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(directory / f"{number} {name}")
    return directory


@pytest.fixture(scope="module")
def references(checkpoint: Path, lora_dir: Path) -> dict[int | None, Any]:
    """The model with the adapter of each task, and without."""
    from peft import PeftModel

    found: dict[int | None, Any] = {
        None: transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    }
    for number, path in enumerate(sorted(lora_dir.iterdir())):
        base = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        found[number] = PeftModel.from_pretrained(base, path).eval()
    return found


def mixed_requests(prompts: list[list[int]], **fields: Any) -> list[InferenceRequest]:
    """Every prompt with several adapters and with none: equal tokens must not share blocks."""
    tasks: list[int | None] = [None, 0, 1, 2, 3]
    return [
        InferenceRequest(index, prompts[index % len(prompts)], 20, lora_task_id=tasks[index % len(tasks)], **fields)
        for index in range(3 * len(prompts))
    ]


def check_tokens_and_logits(request: InferenceRequest, tensors: Tensors, reference: Any) -> None:
    prompt_len, tokens = len(request.input_ids), torch.from_numpy(tensors["output_ids"][0].astype(np.int64))
    with torch.inference_mode():
        logits = reference(tokens).logits[0]
    check_close(tensors["generation_logits"][0, 0], logits[prompt_len - 1 : -1])
    check_close(tensors["context_logits"][0], logits[:prompt_len])
    assert tokens[0, prompt_len:].tolist() == tensors["generation_logits"][0, 0].argmax(-1).tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_and_logits_equal_those_of_peft(
    schedule: str, checkpoint: Path, lora_dir: Path, references: dict[int | None, Any], prompts: list[list[int]]
) -> None:
    requests = mixed_requests(prompts, return_context_logits=True, return_generation_logits=True)
    found, pauses = answers(
        checkpoint, requests, "max_utilization", lora_dir=str(lora_dir), **{"max_batch_size": 8} | SCHEDULES[schedule]
    )
    assert (pauses > 0) == ("pauses" in schedule)
    for request in requests:
        check_tokens_and_logits(request, found[request.request_id], references[request.lora_task_id])


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "V1"},
        {"model_type": "InflightBatching"},
        {"enable_trt_overlap": True},
        {"overlap": "async"},
        {"draft_ngram": 2},
        {"lora_num_device_mod_layers": 1, "max_lora_rank": 8},
        {"lora_num_device_mod_layers": 1, "max_lora_rank": 8, "enable_trt_overlap": True},
        {"lora_num_device_mod_layers": 1, "max_lora_rank": 8, "overlap": "async"},
        {"lora_num_device_mod_layers": 1, "max_lora_rank": 8, "draft_ngram": 2},
        {"lora_host_cache_bytes": 0, "lora_num_device_mod_layers": 1},
        {"lora_host_cache_bytes": 0, "lora_num_device_mod_layers": 1, "enable_trt_overlap": True},
    ],
    ids=[
        "static",
        "unfused",
        "overlap",
        "async",
        "drafts",
        "one page",
        "one page, overlap",
        "one page, async",
        "one page, drafts",
        "no host memory",
        "no host memory, overlap",
    ],
)
def test_other_ways_to_run_give_the_same(
    settings: dict[str, Any],
    checkpoint: Path,
    lora_dir: Path,
    references: dict[int | None, Any],
    prompts: list[list[int]],
) -> None:
    requests = mixed_requests(prompts, return_context_logits=True, return_generation_logits=True)
    optional: dict[str, Any] = {
        "model_type": "IFB",
        "lora_dir": str(lora_dir),
        "max_num_tokens": 200,
        "tokens_per_block": 4,
        "max_batch_size": 6,
    }
    found, _ = answers(checkpoint, requests, "guaranteed_no_evict", **optional | settings)
    for request in requests:
        check_tokens_and_logits(request, found[request.request_id], references[request.lora_task_id])


def test_beams(checkpoint: Path, lora_dir: Path, references: dict[int | None, Any], prompts: list[list[int]]) -> None:
    requests = [InferenceRequest(task, prompts[5], 8, beam_width=3, lora_task_id=task) for task in range(3)]
    found, _ = answers(checkpoint, requests, "guaranteed_no_evict", lora_dir=str(lora_dir), tokens_per_block=4)
    for request in requests:
        with torch.inference_mode():
            expected = references[request.lora_task_id].generate(
                input_ids=torch.tensor([prompts[5]]),
                num_beams=3,
                num_return_sequences=3,
                do_sample=False,
                max_new_tokens=8,
                pad_token_id=0,
            )
        assert found[request.request_id]["output_ids"][0].tolist() == expected.tolist()


def as_arrays(checkpoint: Path, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A saved adapter in TensorRT-LLM's layout: `lora_weights` and `lora_config`."""
    from peft import PeftModel, get_peft_model_state_dict

    base = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, path)
    state = get_peft_model_state_dict(model)
    numbers = {module.name: module.number for module in lora_modules(load_model_config(checkpoint))}
    rows, config = [], []
    for name, lora_a in state.items():
        if "lora_A" not in name:
            continue
        layer, module = int(name.split(".layers.")[1].split(".")[0]), name.split(".")[-3]
        scale = model.get_submodule(name.removesuffix(".lora_A.weight")).scaling["default"]
        lora_b = state[name.replace("lora_A", "lora_B")] * scale
        rows.append(torch.cat([lora_a.flatten(), lora_b.flatten()]).numpy())
        config.append([numbers[module], layer, len(lora_a)])
    weights = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for row, values in zip(weights, rows, strict=True):
        row[: len(values)] = values
    return weights, np.array(config, np.int32)


def test_a_request_brings_its_adapter_and_later_ones_need_its_id_only(
    checkpoint: Path, lora_dir: Path, references: dict[int | None, Any], prompts: list[list[int]]
) -> None:
    adapters = {70 + number: as_arrays(checkpoint, path) for number, path in enumerate(sorted(lora_dir.iterdir()))}
    tasks = [70, 71, None, 72, 73, 71, 70, 73, None, 72]
    seen: set[int | None] = set()
    requests = []
    for index, task in enumerate(tasks):
        brought: dict[str, Any] = {}
        if task is not None and task not in seen:
            weights, config = adapters[task]
            brought = {"lora_weights": weights[None], "lora_config": config[None]}
        seen.add(task)
        requests.append(
            InferenceRequest(
                index,
                prompts[index % 8],
                10,
                lora_task_id=task,
                return_context_logits=True,
                return_generation_logits=True,
                **brought,
            )
        )
    found, _ = answers(checkpoint, requests, "guaranteed_no_evict", tokens_per_block=4, **BROUGHT)
    for request in requests:
        task = None if request.lora_task_id is None else request.lora_task_id - 70
        check_tokens_and_logits(request, found[request.request_id], references[task])


def error_of(checkpoint: Path, request: InferenceRequest, **optional_params: Any) -> str:
    """The error of the final response of the only request."""
    waiting, errors = [request], []
    manager = BatchManager(
        str(checkpoint),
        "IFB",
        1,
        "guaranteed_no_evict",
        lambda count: [waiting.pop()] if waiting else [],
        lambda request_id, tensors, is_final, error: errors.append(error),
        None,
        None,
        optional_params={"device": "cpu", **optional_params},
        start=False,
    )
    manager.close()
    (error,) = errors
    return error


def arrays(config: list[list[int]], size: int = 4096) -> dict[str, np.ndarray]:
    return {"lora_weights": np.zeros((len(config), size), np.float32), "lora_config": np.array(config, np.int32)}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({}, "LoRA task 5 is unknown, or was evicted: expected lora_weights and lora_config"),
    "no cache": (arrays([[1, 0, 2]]) | {"settings": {}}, "lora_weights: there is no cache for adapters"),
    "no config": (
        {"lora_weights": np.zeros((1, 9), np.float32)},
        "an adapter needs lora_task_id, lora_weights and lora_config together",
    ),
    "another layer": (arrays([[1, 2, 2]]), "layer 2 with rank 2 of q_proj does not fit the model"),
    "short rows": (arrays([[1, 0, 2]], size=9), "rows of at least 128 values, not 9"),
    "unknown module": (arrays([[12, 0, 2]]), "module 12 is not supported; expected one of 1 (q_proj)"),
    "rank": (arrays([[1, 0, 60]]), "rank 60; expected at most 32 (--max_lora_rank)"),
    "DoRA": (arrays([[1, 0, 2, 1]]), "DoRA is not supported"),
    "nothing": (arrays([[-1, 0, 2]]), "no module is adapted"),
    "another shape": (
        {"lora_weights": np.zeros(9, np.float32), "lora_config": np.zeros((1, 3), np.int32)},
        "expected floats in 2 dimensions, not float32 of shape [9]",
    ),
}


@pytest.mark.parametrize(("fields", "error"), BAD.values(), ids=BAD.keys())
def test_bad_adapter_of_a_request(fields: dict[str, Any], error: str, checkpoint: Path) -> None:
    fields = dict(fields)
    settings = fields.pop("settings", BROUGHT | {"max_lora_rank": 32})
    request = InferenceRequest(1, [3, 4, 5], 4, lora_task_id=5, **fields)
    assert error in error_of(checkpoint, request, **settings)


def test_a_task_without_adapters_runs_the_base_model(checkpoint: Path) -> None:
    assert error_of(checkpoint, InferenceRequest(1, [3, 4, 5], 4, lora_task_id=5)) == ""


def test_adapter_of_another_model(lora_dir: Path) -> None:
    with pytest.raises(InputError, match=r"the model asks for \[rank, 688\] and \[256, rank\]"):
        BatchManager(
            "tiny",
            "IFB",
            1,
            "guaranteed_no_evict",
            lambda count: [],
            lambda *_: None,
            optional_params={"device": "cpu", "lora_dir": str(lora_dir)},
            start=False,
        )
