"""Attention windows show what their rule says: as a dense decoder with the mask written out does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import GREEDY, NO_STOP_CONDITIONS, OutputOptions
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.models.config import ModelConfig
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.torch.model.kv_cache import PagedKvCache
from ifbbench.torch.model.llama import LlamaModel
from ifbbench.torch.model.weights import random_weights
from ifbbench.torch.model_executor import ModelExecutor
from tests.engine.engine import Loop, scheduler_of
from tests.torch import driving
from tests.torch.dense_reference import dense_logits
from tests.torch.driving import CPU, Driver, FakeRequest, RecordingModel, layout_driver, requests_of

SMALL = replace(driving.SMALL, num_layers=3)
SEED = 3
ALL_LAYERS = (0, 1, 2)
LONGEST = 80
SLOTS = 3
LENGTHS = [(5, 30), (37, 12), (1, 40), (16, 7), (61, 10), (12, 12)]
# Also prompts longer than the windows, on both sides of the borders of blocks.
BEAM_LENGTHS = [(5, 40), (11, 30), (8, 50), (41, 12), (30, 12), (33, 30), (20, 12)]
ALL_NUMBERS = OutputOptions(False, True, True, True)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(SMALL, random_weights(SMALL, SEED, CPU, torch.float32))


def window_of(
    size: int,
    sink: int = 0,
    tokens_per_block: int = 4,
    is_cyclic: bool = True,
    layers: tuple[int, ...] = ALL_LAYERS,
    max_beams: int = 1,
) -> WindowLayout:
    attention_window = AttentionWindow(tokens_per_block, size, LONGEST, sink, max_beams, is_cyclic=is_cyclic)
    blocks = SLOTS * max_beams * attention_window.max_blocks_per_sequence
    return WindowLayout(layers, attention_window, blocks)


def asking_requests(lengths: list[tuple[int, int]], beam_width: int = 1) -> list[FakeRequest]:
    requests = requests_of(lengths, SMALL.vocab_size, beam_width=beam_width)
    for request in requests:
        request.options = ALL_NUMBERS
    return requests


def assert_dense(request: FakeRequest, windows: list[tuple[int, int]], config: ModelConfig = SMALL) -> None:
    """All logits of the request are those of the dense decoder."""
    tokens, length = request.prompt.tolist() + request.outputs, request.prompt_len
    expected = dense_logits(config, SEED, tokens, windows).float().numpy()
    context, generation = request.numbers.context_logits, request.numbers.generation_logits()
    assert context is not None
    assert generation is not None
    np.testing.assert_allclose(context, expected[:length], atol=1e-4)
    np.testing.assert_allclose(generation.reshape(-1, config.vocab_size), expected[length - 1 : -1], atol=1e-4)


def poison(driver: Driver) -> None:
    """Nothing that was not written may be read: it is no number."""
    for window in driver.executor._cache.windows:
        assert isinstance(window.cache, PagedKvCache)
        for storage in window.cache._all():
            with torch.inference_mode():
                storage.fill_(torch.nan)


CHUNKS = (None, 30, 7, 3)
SIZES = ((8, 0), (13, 0), (13, 3), (14, 8), (3, 1), (40, 5), (100, 3))
BLOCKS = ((4, True), (4, False), (16, True), (16, False), (1, True))


# All windows in all blocks, and of chunks one that meets each of both in some case; the others are slow.
@pytest.mark.parametrize(
    ("tokens_per_block", "is_cyclic", "size", "sink", "largest_chunk"),
    [
        pytest.param(*block, *size, chunk, marks=() if (index + number + place) % 4 == 0 else pytest.mark.slow)
        for index, block in enumerate(BLOCKS)
        for number, size in enumerate(SIZES)
        for place, chunk in enumerate(CHUNKS)
    ],
)
def test_logits_of_every_position(
    model: LlamaModel, tokens_per_block: int, is_cyclic: bool, size: int, sink: int, largest_chunk: int | None
) -> None:
    layout = CacheLayout((window_of(size, sink, tokens_per_block, is_cyclic),))
    requests = asking_requests(LENGTHS)
    layout_driver(model, layout, SLOTS, seed=size).run(requests, largest_chunk)
    for request in requests:
        assert_dense(request, [(size, sink)] * 3)


@pytest.mark.parametrize("largest_chunk", [None, 9])
@pytest.mark.parametrize("is_cyclic", [True, False])
def test_layers_with_windows_of_their_own(model: LlamaModel, is_cyclic: bool, largest_chunk: int | None) -> None:
    windows = (
        window_of(LONGEST, layers=(1,)),
        window_of(11, 2, 8, is_cyclic, (2,)),
        window_of(6, 0, 4, is_cyclic, (0,)),
    )
    requests = asking_requests(LENGTHS)
    driver = layout_driver(model, CacheLayout(windows), SLOTS)
    driver.run(requests, largest_chunk)
    for request in requests:
        assert_dense(request, [(6, 0), (LONGEST, 0), (11, 2)])


@pytest.mark.parametrize(("size", "sink"), [(8, 0), (9, 2)])
@pytest.mark.parametrize("is_cyclic", [True, False])
def test_places_that_were_not_written_are_not_read(model: LlamaModel, is_cyclic: bool, size: int, sink: int) -> None:
    requests = asking_requests([(12, 30), (43, 9), (30, 12)])
    driver = layout_driver(model, CacheLayout((window_of(size, sink, 4, is_cyclic),)), SLOTS)
    poison(driver)
    for slot, request in enumerate(requests):
        request.slot = slot
    first, second, third = requests
    driver.step([(first, 12), (second, 10)], [])
    driver.step([(second, 3), (third, 30)], [first])
    driver.step([(second, 30)], [first, third])
    while not (first.is_done and third.is_done):
        driver.step([], [request for request in requests if not request.is_done])
    for request in requests:
        assert_dense(request, [(size, sink)] * 3)


@pytest.mark.parametrize(("size", "sink"), [(9, 0), (11, 3), (24, 0)])
def test_padded_prompts(model: LlamaModel, size: int, sink: int) -> None:
    requests = asking_requests(LENGTHS[:3])
    driver = layout_driver(model, CacheLayout((window_of(size, sink),)), SLOTS)
    driver.padded = True
    driver.run(requests)
    for request in requests:
        assert_dense(request, [(size, sink)] * 3)


@pytest.mark.parametrize(("size", "sink"), [(12, 0), (13, 0), (13, 3), (15, 4), (30, 5)])
def test_beams_in_cyclic_blocks_are_those_in_linear_ones(model: LlamaModel, size: int, sink: int) -> None:
    finals = []
    for is_cyclic in (True, False):
        requests = requests_of(BEAM_LENGTHS, SMALL.vocab_size, beam_width=3)
        layout = CacheLayout((window_of(size, sink, 4, is_cyclic, max_beams=3),))
        layout_driver(model, layout, SLOTS, seed=int(is_cyclic)).run(requests, largest_chunk=6)
        finals.append([[beam.tokens.tolist() for beam in request.search.final()] for request in requests])
    assert finals[0] == finals[1]
    unlimited = requests_of(BEAM_LENGTHS, SMALL.vocab_size, beam_width=3)
    layout_driver(model, CacheLayout((window_of(LONGEST, max_beams=3),)), SLOTS).run(unlimited)
    assert finals[0] != [[beam.tokens.tolist() for beam in request.search.final()] for request in unlimited]


def dense_beams(prompt: list[int], num_outputs: int, beam_width: int, window: tuple[int, int]) -> list[list[int]]:
    """The beams that a search finds with the logits of the dense decoder."""
    search = BeamSearch(beam_width, GREEDY, NO_STOP_CONDITIONS, num_outputs)
    running: list[list[int]] = [[]]
    while not search.over:
        logits = [dense_logits(SMALL, SEED, prompt + tokens, [window] * 3)[-1] for tokens in running]
        scores = torch.stack(logits).log_softmax(-1) + torch.tensor(search.scores).double()[:, None]
        best = scores.flatten().sort(descending=True, stable=True)
        places, values = best.indices[: 2 * beam_width].numpy(), best.values[: 2 * beam_width].numpy()
        tokens, beams = places % SMALL.vocab_size, places // SMALL.vocab_size
        search.advance(tokens, beams, values, is_last=search.num_tokens + 1 == num_outputs)
        chosen = zip(search.parents.tolist(), search.tokens.tolist(), strict=True)
        running = [[*running[parent], token] for parent, token in chosen]
    return [beam.tokens.tolist() for beam in search.final()]


@pytest.mark.parametrize(
    ("size", "sink", "lengths"),
    [
        # Prompts that end within the window, fill its capacity (with a block to spare for beams) or wrap in it.
        (13, 0, [(6, 24), (16, 8), (17, 9), (30, 12)]),
        (13, 3, [(2, 20), (15, 8), (16, 9), (29, 12)]),
    ],
)
def test_beams_in_the_blocks_of_the_engine_are_those_of_a_dense_decoder(
    model: LlamaModel, size: int, sink: int, lengths: list[tuple[int, int]]
) -> None:
    beam_width = 2
    attention_window = AttentionWindow(4, size, LONGEST, sink, beam_width)
    # Room for one request and a little more: blocks bind, and max_utilization pauses.
    layout = WindowLayout(ALL_LAYERS, attention_window, beam_width * attention_window.max_blocks_per_sequence + 4)
    random = np.random.default_rng(size + sink)
    prompts = [random.integers(0, SMALL.vocab_size, length).astype(np.int32) for length, _ in lengths]
    expected = [
        dense_beams(prompt.tolist(), new_tokens, beam_width, (size, sink))
        for prompt, (_, new_tokens) in zip(prompts, lengths, strict=True)
    ]
    for policy in ("guaranteed_no_evict", "max_utilization"):
        config = BatchingConfig(
            policy,
            max_batch_size=3,
            max_num_tokens=64,
            max_seq_len=LONGEST,
            max_input_len=LONGEST - 1,
            tokens_per_block=4,
            num_blocks=layout.num_blocks,
            max_beam_width=beam_width,
            chunk_unit=4,
            windows=(layout,),
        )
        executor = ModelExecutor(model, CacheLayout((layout,)), config.num_slots)
        requests = [
            Request(index, len(prompt), new_tokens, prompt_tokens=prompt, beam_width=beam_width, index=index)
            for index, (prompt, (_, new_tokens)) in enumerate(zip(prompts, lengths, strict=True))
        ]
        run = Loop(config, [(0, request) for request in requests], executor).run(
            lambda manager, record: scheduler_of(manager).kv_cache.check_consistency()
        )
        assert scheduler_of(run.manager).kv_cache.free_blocks == layout.num_blocks
        found = [[beam.tolist() for beam in run.final(request).tokens] for request in requests]
        assert found == expected, policy


def test_long_prompts_are_tiled() -> None:
    config = ModelConfig(97, 32, 1, 4, 2, 8, 48, 2048)
    model = LlamaModel(config, random_weights(config, SEED, CPU, torch.float32))
    attention_window = AttentionWindow(16, 100, 1500, 5)
    layout = CacheLayout((WindowLayout((0,), attention_window, 2 * attention_window.max_blocks_per_sequence),))
    requests = requests_of([(1201, 3), (900, 3)], 97)
    for request in requests:
        request.options = ALL_NUMBERS
    layout_driver(model, layout, 2).run(requests, 700)
    for request in requests:
        assert_dense(request, [(100, 5)], config)


@pytest.mark.parametrize("padded", [True, False])
def test_no_place_is_written_twice_in_a_batch(padded: bool) -> None:
    recording = RecordingModel(SMALL, random_weights(SMALL, SEED, CPU, torch.float32))
    long, short = requests_of([(37, 2), (11, 2)], SMALL.vocab_size)
    long.slot, short.slot = 0, 2
    driver = layout_driver(recording, CacheLayout((window_of(13, 3),)), SLOTS)
    driver.padded = padded
    driver.step([(long, 37), (short, 11)], [])
    layer = recording.last_inputs.layers[0]
    kept = layer.cache_rows[layer.cache_rows != layer.cache.spare_row]
    assert len(kept) == 13 + 11
    assert len(kept.unique()) == len(kept)
    positions = recording.last_inputs.positions[layer.cache_rows != layer.cache.spare_row]
    assert positions.tolist() == [0, 1, 2, *range(27, 37), *range(11)]


def test_layouts_that_do_not_fit_the_model(model: LlamaModel) -> None:
    with pytest.raises(ValueError, match="a model of 3 layers"):
        layout_driver(model, CacheLayout((window_of(8, layers=(0, 1)),)), SLOTS)
    with pytest.raises(ValueError, match="no room beside 8 sink tokens"):
        layout_driver(model, CacheLayout((window_of(8, 8),)), SLOTS)
