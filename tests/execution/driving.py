"""A stand-in for the scheduler: drives an executor with requests, chunks and blocks that a test chooses."""

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.batching.batch import Batch, ContextChunk
from ifbbench.batching.request import GREEDY, Request, SamplingParams
from ifbbench.execution.model_executor import ModelExecutor
from ifbbench.model.kv_cache import PagedKvCache
from ifbbench.model.llama import ForwardInputs, LlamaModel


@dataclass(eq=False)
class FakeRequest:
    """What an executor reads of a request, and its progress."""

    request_id: int
    prompt: NDArray[np.int32]
    num_outputs: int
    sampling: SamplingParams = GREEDY
    slot: int = -1
    original_prompt_len: int = field(init=False)
    computed: int = 0
    outputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.original_prompt_len = len(self.prompt)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are cached in the generation phase: all but the newest."""
        return self.original_prompt_len + len(self.outputs) - 1

    @property
    def in_context(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def is_done(self) -> bool:
        return len(self.outputs) >= self.num_outputs

    def tokens_between(self, start: int, stop: int) -> NDArray[np.int32]:
        return self.prompt[start:stop]

    def pause(self) -> None:
        """Join the outputs to the prompt, as a resume by recompute does."""
        joined = self.outputs[self.prompt_len - self.original_prompt_len :]
        self.prompt = np.concatenate([self.prompt, np.array(joined, np.int32)])
        self.computed = 0


class RecordingModel(LlamaModel):
    """A model that keeps the logits of its last pass."""

    last_logits: Tensor

    def forward(self, inputs: ForwardInputs, cache: PagedKvCache) -> Tensor:
        self.last_logits = super().forward(inputs, cache)
        return self.last_logits


class Driver:
    """Runs requests on `executor`; blocks lie in an order drawn from `seed`, and slots are reused."""

    def __init__(self, executor: ModelExecutor, num_slots: int, num_blocks: int, seed: int = 0) -> None:
        self.executor = executor
        self.random = np.random.default_rng(seed)
        shuffled = self.random.permutation(num_blocks).astype(np.int32)
        self.tables = shuffled[: num_blocks // num_slots * num_slots].reshape(num_slots, -1)
        self.free_slots = list(range(num_slots))
        self.iteration = 0

    def step(self, context: list[tuple[FakeRequest, int]], generation: list[FakeRequest]) -> NDArray[np.int32]:
        """One iteration: (request, tokens) chunks and generation requests. Returns what collect() returned."""
        chunks = tuple(ContextChunk(cast(Request, request), request.computed, length) for request, length in context)
        slots = np.array([request.slot for request in generation], np.int32)
        positions = np.array([request.num_cached for request in generation], np.int32)
        self.executor.submit(Batch(self.iteration, chunks, slots, positions, self.tables))
        tokens = self.executor.collect()
        self.iteration += 1
        for request, length in context:
            request.computed += length
        yielding = [request for request, _ in context if not request.in_context] + generation
        assert len(tokens) == len(yielding)
        for request, token in zip(yielding, tokens.tolist(), strict=True):
            request.outputs.append(token)
        return tokens

    def run(self, requests: list[FakeRequest], largest_chunk: int | None = None, pauses: int = 0) -> None:
        """Run all requests to their end, in mixed batches with chunks of random size and random pauses."""
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

    def _chunk(self, request: FakeRequest, largest: int | None) -> int:
        left = request.prompt_len - request.computed
        return left if largest is None else min(left, int(self.random.integers(1, largest + 1)))


def requests_of(
    lengths: list[tuple[int, int]], vocab_size: int, seed: int = 0, sampling: SamplingParams = GREEDY
) -> list[FakeRequest]:
    """Requests of (prompt, output) lengths with prompts drawn from `seed`."""
    random = np.random.default_rng(seed)
    return [FakeRequest(index, random.integers(0, vocab_size, prompt).astype(np.int32), output, sampling)
            for index, (prompt, output) in enumerate(lengths)]


def driver_of(model: LlamaModel, num_slots: int, tokens_per_block: int, longest: int, seed: int = 0) -> Driver:
    """A driver over a fresh executor whose slots hold sequences of up to `longest` tokens."""
    num_blocks = num_slots * -(-longest // tokens_per_block) + 3
    executor = ModelExecutor(model, num_slots, num_blocks, tokens_per_block)
    return Driver(executor, num_slots, num_blocks, seed)


CPU = torch.device("cpu")
