"""The parts of a model on several ranks compute what the whole model does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ifbbench.engine.sampling_params import TOKENS_ONLY, OutputOptions, SamplingParams
from ifbbench.errors import InputError
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.models.config import GPT2, ModelConfig
from ifbbench.torch.build import make_model
from ifbbench.torch.model import weights as weights_module
from ifbbench.torch.model.linear import make_linear
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.part import ModelPart
from ifbbench.torch.model.weights import load_weights, random_weights
from ifbbench.torch.pipeline import layout_of_stage
from tests.torch import driving
from tests.torch.driving import CPU, FakeRequest, driver_of, requests_of
from tests.torch.ranks_in_threads import Ranks

# An odd vocabulary and number of layers; fewer KV heads than ranks.
SMALL = replace(driving.SMALL, num_layers=3)
GPT2_SMALL = replace(
    SMALL,
    architecture=GPT2,
    num_kv_heads=4,
    activation="gelu_new",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)
SPLITS = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
NO_LINKS: Any = None
LENGTHS = [(9, 5), (20, 4), (1, 6), (33, 3)]


def whole(config: ModelConfig) -> LlamaModel:
    return make_model(config, random_weights(config, 3, CPU, torch.float32))


def part_of(part: ModelPart) -> LlamaModel:
    return make_model(part.config, random_weights(part.model, 3, CPU, torch.float32, part=part))


def run(model: LlamaModel, options: OutputOptions = TOKENS_ONLY, **asked: Any) -> list[FakeRequest]:
    """Chunked prompts, mixed batches and slots with several owners."""
    with torch.inference_mode():
        requests = requests_of(LENGTHS, 97, **asked)
        for request in requests:
            request.options = options
        driver_of(model, 3, 8, 48).run(requests, largest_chunk=7)
        return requests


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "query_key_norm": True},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ],
    ids=["Llama", "tied, Qwen 3", "biases"],
)
def test_tokens_are_those_of_the_whole_model(changes: dict[str, Any], split: tuple[int, int]) -> None:
    config = replace(SMALL, **changes)
    expected = [request.outputs for request in run(whole(config))]
    for outputs in Ranks(*split).run(config, lambda part: run(part_of(part))):
        assert [request.outputs for request in outputs] == expected


@pytest.mark.parametrize("split", [(4, 1), (2, 2), (1, 3)], ids=str)
def test_gpt2(split: tuple[int, int]) -> None:
    expected = [request.outputs for request in run(whole(GPT2_SMALL))]
    for outputs in Ranks(*split).run(GPT2_SMALL, lambda part: run(part_of(part))):
        assert [request.outputs for request in outputs] == expected


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_sampling_penalty_log_probs_and_logits(split: tuple[int, int]) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=3, repetition_penalty=1.3)
    options = OutputOptions(return_log_probs=True, return_context_logits=True)
    expected = run(whole(SMALL), options, sampling=sampling)
    for outputs in Ranks(*split).run(SMALL, lambda part: run(part_of(part), options, sampling=sampling)):
        for one, other in zip(outputs, expected, strict=True):
            assert one.outputs == other.outputs
            torch.testing.assert_close(one.numbers.context_logits, other.numbers.context_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_virtual_tokens(split: tuple[int, int]) -> None:
    """Their embeddings replace the sum over the ranks that share the vocabulary."""
    table = np.random.default_rng(1).normal(size=(3, SMALL.hidden_size)).astype(np.float32)

    def outputs(model: LlamaModel) -> list[list[int]]:
        requests = requests_of(LENGTHS, SMALL.vocab_size)
        for request in requests:
            request.prompt[::3] = SMALL.vocab_size + request.prompt[::3] % 3
            request.options = OutputOptions(prompt_embedding_table=table)
        with torch.inference_mode():
            driver_of(model, 3, 8, 48).run(requests, largest_chunk=7)
        return [request.outputs for request in requests]

    expected = outputs(whole(SMALL))
    assert expected != [request.outputs for request in run(whole(SMALL))]
    assert Ranks(*split).run(SMALL, lambda part: outputs(part_of(part))) == [expected] * (split[0] * split[1])


@pytest.mark.parametrize("split", [(2, 1), (1, 2)], ids=str)
def test_beams(split: tuple[int, int]) -> None:
    def beams(model: LlamaModel) -> list[Any]:
        with torch.inference_mode():
            requests = requests_of(LENGTHS[:3], 97, beam_width=2)
            driver_of(model, 3, 8, 48, max_beams=2).run(requests, largest_chunk=7)
            return [request.search.tokens.tolist() for request in requests]

    expected = beams(whole(SMALL))
    assert Ranks(*split).run(SMALL, lambda part: beams(part_of(part))) == [expected] * (split[0] * split[1])


def test_two_sums_a_layer() -> None:
    ranks = Ranks(2, 1)

    def one_token(part: ModelPart) -> None:
        (request,) = requests_of([(1, 1)], 97)
        with torch.inference_mode():
            driver_of(part_of(part), 1, 8, 48).run([request])

    ranks.run(SMALL, one_token)
    assert ranks.sums == 2 * SMALL.num_layers + 1  # and one for the embedding


def test_a_rank_reads_its_part_of_a_file_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, attention_bias=True)
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...], *part: slice) -> torch.Tensor:
        shapes[name] = shape
        return weights_module.normal_values(shape, 5, name) * 0.1

    weights_module._llama(config, note, make_linear, None)
    save_file({name: note(name, shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    read: list[int] = []
    opened = weights_module._open

    class Counting:
        """A file that counts the values that are read."""

        def __init__(self, path: Path) -> None:
            self._file = opened(path)

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def keys(self) -> Any:
            return self._file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(self._file.get_tensor(name).numel())
            return self._file.get_tensor(name)

        def get_slice(self, name: str) -> "Slice":
            return Slice(self._file.get_slice(name))

    class Slice:
        def __init__(self, whole: Any) -> None:
            self._whole = whole
            self.get_shape = whole.get_shape

        def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
            read.append(self._whole[part].numel())
            return self._whole[part]

    monkeypatch.setattr(weights_module, "_open", Counting)
    load_weights(config, tmp_path, CPU, torch.float32)
    total, parts = sum(read), []
    for tp_rank in range(2):
        for stage in range(3):
            read.clear()
            load_weights(config, tmp_path, CPU, torch.float32, part=ModelPart(config, NO_LINKS, 2, tp_rank, 3, stage))
            parts.append(sum(read))
    # Norms are on every rank of a layer, and the last one on all.
    norms = config.hidden_size * (2 * config.num_layers + 1)
    assert total <= sum(parts) <= total + norms + 5 * config.hidden_size
    assert max(parts) < 0.4 * total


def test_files_and_random_weights_are_split_alike(tmp_path: Path) -> None:
    names = {}

    def note(name: str, shape: tuple[int, ...], *part: slice) -> torch.Tensor:
        names[name] = weights_module.normal_values(shape, 5, name) * 0.1
        return names[name]

    weights_module._llama(SMALL, note, make_linear, None)
    save_file(names, tmp_path / "model.safetensors")
    expected = [one.outputs for one in run(make_model(SMALL, load_weights(SMALL, tmp_path, CPU, torch.float32)))]
    for outputs in Ranks(2, 2).run(
        SMALL,
        lambda part: run(make_model(part.config, load_weights(part.model, tmp_path, CPU, torch.float32, part=part))),
    ):
        assert [one.outputs for one in outputs] == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1), "3 devices cannot share 4 attention heads"),
        ((1, 4), "4 stages are more than the model's 3 layers"),
    ],
)
def test_splits_that_are_impossible(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelPart(SMALL, NO_LINKS, sizes[0], 0, sizes[1], 0)


def test_kv_heads_that_ranks_cannot_share() -> None:
    config = replace(SMALL, num_heads=6, num_kv_heads=3, intermediate_size=48)
    with pytest.raises(InputError, match="2 ranks cannot share 3 KV heads evenly"):
        ModelPart(config, NO_LINKS, 2, 0)


def test_a_stage_without_a_window() -> None:
    long, short = (AttentionWindow(8, size, 64) for size in (64, 16))
    layout = CacheLayout((WindowLayout((0,), long, 8), WindowLayout((1, 2), short, 8)))
    with pytest.raises(InputError, match="stage 1 has no layer with one of the attention windows"):
        layout_of_stage(layout, ModelPart(SMALL, NO_LINKS, pp_size=2, stage=1))
