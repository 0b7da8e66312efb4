"""The benchmark of engines on a CPU: the engines that are installed agree, and its arithmetic is right."""

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks.cpu_engine_runs import ENGINES
from benchmarks.cpu_engines import Measured, figures, make_checkpoint
from benchmarks.cpu_limit import DeviceSpeed, Limit, limit, schedule
from benchmarks.cpu_llama_cpp import Sequence, TokenBatch
from benchmarks.cpu_task import DTYPES, MAX_BATCH_SIZE, MAX_NUM_TOKENS, NUM_REQUESTS, Task, gguf_path
from ifbbench.torch.model.gguf_file import GgufFile

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, SHAPE)
    return directory


@pytest.fixture
def task(checkpoint: Path) -> Task:
    return Task.of_checkpoint(checkpoint, "float32", torch.get_num_threads())


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("ifbbench", "llama.cpp")])
def test_engines_that_compute_in_float32_give_the_same_tokens(checkpoint: Path, name: str) -> None:
    module, engine = ENGINES[name]
    pytest.importorskip(module)
    if name == "transformers_continuous" and not hasattr(importlib.import_module(module), "ContinuousBatchingConfig"):
        pytest.skip("transformers is older than its continuous batching")
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    task = Task(checkpoint, "float32", torch.get_num_threads(), prompts, lengths=[4, 2, 7])
    with ENGINES["ifbbench"][1](task) as own, engine(task) as other:
        expected = own()
        assert other() == expected
    assert list(map(len, expected)) == task.lengths


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_gets_the_same_weights(checkpoint: Path, dtype: str) -> None:
    pytest.importorskip("gguf")
    from safetensors.torch import load_file

    stored = GgufFile(gguf_path(checkpoint, dtype))
    weights = load_file(checkpoint / "model.safetensors")
    assert len(weights) == 3 + 2 * 9
    for name, weight in weights.items():
        as_kept = weight.to(getattr(torch, dtype)).float() if weight.ndim == 2 else weight
        assert torch.equal(stored.read(name)[0], as_kept)


def test_the_schedule_has_every_token_once(task: Task) -> None:
    works = schedule(task)
    assert sum(work.context_tokens for work in works) == sum(map(len, task.prompts))
    assert sum(work.outputs for work in works) == sum(task.lengths)
    assert sum(work.generation_tokens for work in works) == sum(task.lengths) - NUM_REQUESTS
    assert MAX_NUM_TOKENS - 64 < max(work.num_tokens for work in works) <= MAX_NUM_TOKENS
    assert max(work.generation_tokens for work in works) == MAX_BATCH_SIZE


def test_an_iteration_takes_as_long_as_its_slower_part(task: Task) -> None:
    """At speeds at which products and reading take equally long over all iterations, but not in each."""
    alone = limit(task, DeviceSpeed(1e9, 1e9))
    speed = DeviceSpeed(1e9, 1e9 * alone.matrix_tokens_per_s / alone.memory_tokens_per_s)
    both = limit(task, speed)
    assert both.matrix_tokens_per_s == pytest.approx(both.memory_tokens_per_s)
    assert both.tokens_per_s < 0.95 * both.matrix_tokens_per_s
    assert limit(task, DeviceSpeed(1e9, 1e30)).tokens_per_s == pytest.approx(both.matrix_tokens_per_s)
    assert limit(task, DeviceSpeed(1e30, speed.bytes_per_s)).tokens_per_s == pytest.approx(both.memory_tokens_per_s)


def test_figures_are_medians_beside_the_limit() -> None:
    task = Task(Path(), "float32", 1, prompts=[[1], [2]], lengths=[1, 3])
    own = [Measured(wall_s, 0.5, "1.0", [[7], [1, 2, 3]]) for wall_s in (9.0, 2.0, 1.0)]
    other = [Measured(4.0, 0.25, "2.0", [[7], [1, 2, 4]])]
    found = figures({"ifbbench": own, "vllm": other}, task, Limit(4.0, 5.0, 6.0))
    assert found["limit"] == {"tokens_per_s": 4, "matrix_tokens_per_s": 5, "memory_tokens_per_s": 6}
    assert found["ifbbench"] == {
        "output_tokens_per_s": 2.0,
        "share_of_limit": 0.5,
        "cpu_s": 0.5,
        "requests_as_ifbbench": 2,
        "version": "1.0",
    }
    assert found["vllm"]["requests_as_ifbbench"] == 1
    assert figures({"vllm": other}, task, Limit(4.0, 5.0, 6.0))["vllm"]["requests_as_ifbbench"] is None


def test_a_batch_for_llama_cpp_has_generation_first_and_no_more_than_the_budget() -> None:
    prompts = [torch.arange(length, dtype=torch.int32).numpy() for length in (500, 3, 200)]
    first, second, third = (Sequence(slot, slot, prompt, length=2) for slot, prompt in enumerate(prompts))
    second.cached, second.outputs = 3, [42]
    batch = TokenBatch()
    assert batch.fill([first, second, third]) == [second, first]
    assert batch.size == MAX_NUM_TOKENS
    assert (second.cached, first.cached, third.cached) == (4, 500, 11)
    first.outputs, second.outputs = [1], [42, 43]
    assert batch.fill([first, second, third]) == [first, second, third]
    assert batch.size == 1 + 1 + 189
