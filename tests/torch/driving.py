"""A substitute for the scheduler: drives an executor with requests, chunks and blocks that a test chooses."""

from collections import deque
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import Batch, BeamInputs, BlockCopy, StepOutputs
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import (
    GREEDY,
    NO_STOP_CONDITIONS,
    TOKENS_ONLY,
    OutputNumbers,
    OutputOptions,
    SamplingParams,
    StopConditions,
)
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.sizing import CacheLayout
from ifbbench.models.config import ModelConfig
from ifbbench.torch.build import executor_class
from ifbbench.torch.cache_windows import one_window_layout
from ifbbench.torch.model.llama import ForwardInputs, Gpt2Model, LlamaModel
from ifbbench.torch.model_executor import ModelExecutor

CPU = torch.device("cpu")
# An odd vocabulary; fewer KV heads than heads.
SMALL = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=512,
)
# A model with heads of the size that the kernels need.
MICRO = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=40,
    max_position_embeddings=256,
)


class FakeRequest(Request):
    """What an executor reads of a request, and its progress. With beams, `outputs` stays empty and `search` counts."""

    numbers: OutputNumbers
    search: BeamSearch

    def __init__(
        self,
        request_id: int,
        prompt: NDArray[np.int32],
        num_outputs: int,
        sampling: SamplingParams = GREEDY,
        options: OutputOptions = TOKENS_ONLY,
        stop: StopConditions = NO_STOP_CONDITIONS,
        beam_width: int = 1,
    ) -> None:
        super().__init__(
            request_id, len(prompt), num_outputs, sampling=sampling, options=options, stop=stop, beam_width=beam_width
        )
        self.prompt = prompt
        self.numbers = OutputNumbers(len(prompt))
        self.search = BeamSearch(beam_width, sampling, stop, num_outputs)
        self.computed = self.num_scheduled = 0
        self.outputs: list[int] = []

    @property
    def num_cached(self) -> int:
        """Tokens with cached keys and values in the generation phase: all but the newest."""
        return self.original_prompt_len + self.num_scheduled - 1

    @property
    def in_context(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def is_done(self) -> bool:
        return self.num_scheduled >= self.output_len or (self.beam_width > 1 and self.search.over)

    def tokens_between(self, start: int, stop: int) -> NDArray[np.int32]:
        return self.prompt[start:stop]

    def pause(self, max_prompt_len: int = 0) -> None:
        """Join the outputs to the prompt, as a resume by recompute does."""
        joined = self.outputs[self.prompt_len - self.original_prompt_len :]
        self.prompt = np.concatenate([self.prompt, np.array(joined, np.int32)])
        self.prompt_len = len(self.prompt)
        self.computed = 0

    def take(self, outputs: StepOutputs, place: int) -> None:
        """Keep output number `place`."""
        position = len(self.outputs)
        if outputs.log_probs is not None:
            self.numbers.add_log_prob(position, float(outputs.log_probs[place]))
        if place in outputs.generation_logits:
            self.numbers.add_generation(position, outputs.generation_logits[place])
        if outputs.tokens is not None:
            self.outputs.append(int(outputs.tokens[place]))
        if (best := outputs.candidates) is not None:
            is_last = self.search.num_tokens + 1 == self.output_len
            self.search.advance(best.tokens[place], best.beams[place], best.scores[place], is_last=is_last)


class RecordingModel(LlamaModel):
    """A model that keeps the inputs and logits of its last pass."""

    last_inputs: ForwardInputs
    last_logits: Tensor

    def forward(self, inputs: ForwardInputs) -> Tensor:
        self.last_inputs = inputs
        self.last_logits = super().forward(inputs)
        return self.last_logits


class RecordingGpt2(RecordingModel, Gpt2Model):
    """The same of a GPT-2."""


class Driver:
    """Runs requests on `executor`. The order of blocks is drawn from `seed`, and slots are reused.

    Beams share the full blocks of their prompt. padded: run prompts as static batching does. copies: those of the next
    batch. window_tables: of the windows after the first, where no beams share anything.
    """

    def __init__(
        self, executor: ModelExecutor, num_slots: int, num_blocks: int, seed: int = 0, max_beams: int = 1
    ) -> None:
        self.executor = executor
        self.random = np.random.default_rng(seed)
        shuffled = self.random.permutation(num_blocks).astype(np.int32)
        num_sequences = num_slots * max_beams
        self.own_blocks = shuffled[: num_blocks // num_sequences * num_sequences].reshape(num_slots, max_beams, -1)
        self.tables = self.own_blocks.copy()
        self.free_slots = list(range(num_slots))
        self.padded = False
        self.copies: tuple[BlockCopy, ...] = ()
        self.window_tables: tuple[NDArray[np.int32], ...] = ()
        self.attention_window = AttentionWindow(executor.tokens_per_block, 2**40, 2**40)
        self.iteration = 0
        self.in_flight: deque[tuple[tuple[ContextChunk, ...], list[FakeRequest]]] = deque()

    def step(self, context: list[tuple[FakeRequest, int]], generation: list[FakeRequest]) -> StepOutputs:
        """One iteration: (request, tokens) chunks and generation requests. Returns what collect() returned."""
        self.submit(context, generation)
        return self.collect()

    def submit(self, context: list[tuple[FakeRequest, int]], generation: list[FakeRequest]) -> None:
        """The first half of `step`; several may come before their `collect`."""
        chunks = tuple(ContextChunk(cast(Request, request), request.computed, length) for request, length in context)
        for request, _ in context:
            self._share_prompt(request)
        for request in generation:
            self._unshare_overwritten(request)
        tables = self.tables.copy()
        batch = self._batch(chunks, context, generation, tables)
        self.executor.submit(batch._replace(copies=self.copies, window_tables=self.window_tables))
        tables[:] = -9  # they must have been read
        self.copies = ()
        self.iteration += 1
        for request, length in context:
            request.computed += length
        yielding = [request for request, _ in context if not request.in_context] + generation
        for request in yielding:
            request.num_scheduled += 1
        self.in_flight.append((chunks, yielding))

    def collect(self) -> StepOutputs:
        """The second half of `step`, for the oldest batch in flight."""
        outputs = self.executor.collect()
        chunks, yielding = self.in_flight.popleft()
        answer = outputs.tokens if outputs.candidates is None else outputs.candidates.tokens
        assert answer is not None
        assert len(answer) == len(yielding)
        for place, request in enumerate(yielding):
            request.take(outputs, place)
        for index, logits in outputs.context_logits.items():
            assert len(logits) == chunks[index].length
            cast(FakeRequest, chunks[index].request).numbers.add_context(chunks[index].start, logits)
        return outputs

    def run(self, requests: list[FakeRequest], largest_chunk: int | None = None, pauses: int = 0) -> None:
        """Run all requests, of one beam width, in mixed batches with chunks of random size and random pauses."""
        waiting = list(requests)
        active: list[FakeRequest] = []
        while waiting or active:
            while waiting and self.free_slots:
                waiting[0].slot = self.free_slots.pop(0)
                active.append(waiting.pop(0))
            context = [(request, self._chunk(request, largest_chunk)) for request in active if request.in_context]
            self.step(context, [request for request in active if not request.in_context])
            for request in [request for request in active if request.is_done]:
                active.remove(request)
                self.free_slots.append(request.slot)
            started = [request for request in active if not request.in_context]
            if pauses and started and self.random.random() < 0.3:
                started[0].pause()
                pauses -= 1

    def _batch(
        self,
        chunks: tuple[ContextChunk, ...],
        context: list[tuple[FakeRequest, int]],
        generation: list[FakeRequest],
        tables: NDArray[np.int32],
    ) -> Batch:
        slots = np.array([request.slot for request in generation], np.int32)
        positions = np.array([request.num_cached for request in generation], np.int32)
        widest = max(
            generation + [request for request, _ in context], key=lambda request: request.beam_width, default=None
        )
        if widest is None or widest.beam_width == 1:
            return Batch(self.iteration, chunks, slots, positions, tables, padded=self.padded)
        beams = self._beams(generation) if generation else None
        count = max(2, 1 + len(widest.stop.end_tokens)) * widest.beam_width
        return Batch(self.iteration, chunks, slots, positions, tables, widest.beam_width, beams, count, self.padded)

    def _beams(self, generation: list[FakeRequest]) -> BeamInputs:
        size = self.executor.tokens_per_block
        searches = [request.search for request in generation]
        return BeamInputs(
            tokens=np.stack([search.tokens for search in searches]),
            parents=np.stack([search.parents for search in searches]),
            scores=np.stack([search.scores for search in searches]),
            # Of a prompt, beams own one block at most; where they share that, too, nothing is copied.
            private_from=np.array([max(request.prompt_len - size, 0) for request in generation], np.int32),
        )

    def _share_prompt(self, request: FakeRequest) -> None:
        self.tables[request.slot] = own = self.own_blocks[request.slot]
        if request.beam_width == 1:
            return
        place, size = self._place(request.prompt_len), self.executor.tokens_per_block
        shared = place // size if place == request.prompt_len + self.attention_window.bubble else own.shape[1]
        self.tables[request.slot, 1:, :shared] = self.tables[request.slot, 0, :shared]
        if place % size:
            self.tables[request.slot, :, place // size] = own[:, place // size]

    def _unshare_overwritten(self, request: FakeRequest) -> None:
        """Un-share a shared block that the window overwrites."""
        block = self._place(request.num_cached) // self.executor.tokens_per_block
        if request.num_cached + self.attention_window.bubble >= self.attention_window.capacity:
            self.tables[request.slot, :, block] = self.own_blocks[request.slot, :, block]

    def _place(self, position: int) -> int:
        """Where a position behind the sink tokens is stored."""
        return int(self.attention_window.cache_positions(np.array(position)))

    def _chunk(self, request: FakeRequest, largest: int | None) -> int:
        left = request.prompt_len - request.computed
        return left if largest is None else min(left, int(self.random.integers(1, largest + 1)))


def requests_of(
    lengths: list[tuple[int, int]],
    vocab_size: int,
    seed: int = 0,
    sampling: SamplingParams = GREEDY,
    beam_width: int = 1,
    stop: StopConditions = NO_STOP_CONDITIONS,
) -> list[FakeRequest]:
    """Requests of (prompt, output) lengths with prompts drawn from `seed`."""
    random = np.random.default_rng(seed)
    return [
        FakeRequest(
            index,
            random.integers(0, vocab_size, prompt).astype(np.int32),
            output,
            sampling,
            stop=stop,
            beam_width=beam_width,
        )
        for index, (prompt, output) in enumerate(lengths)
    ]


def driver_of(
    model: LlamaModel, num_slots: int, tokens_per_block: int, longest: int, seed: int = 0, max_beams: int = 1
) -> Driver:
    """A driver over a fresh executor for sequences of up to `longest` tokens."""
    num_blocks = num_slots * max_beams * -(-longest // tokens_per_block) + 3
    layout = one_window_layout(model.config, num_blocks, tokens_per_block)
    executor = executor_class(model)(model, layout, num_slots)
    return Driver(executor, num_slots, num_blocks, seed, max_beams)


def layout_driver(
    model: LlamaModel, layout: CacheLayout, num_slots: int, seed: int = 0, kv_cache_dtype: torch.dtype | None = None
) -> Driver:
    """A driver over a fresh executor with the cache `layout`; each window has blocks for `num_slots` sequences."""
    first, *others = layout.windows
    max_beams = first.attention_window.max_beam_width
    executor = ModelExecutor(model, layout, num_slots, kv_cache_dtype=kv_cache_dtype)
    driver = Driver(executor, num_slots, first.num_blocks, seed, max_beams)
    driver.attention_window = first.attention_window
    driver.window_tables = tuple(
        driver.random.permutation(window.num_blocks)
        .astype(np.int32)[: window.num_blocks // num_slots * num_slots]
        .reshape(num_slots, 1, -1)
        for window in others
    )
    return driver
