"""The requests of `cpu_engines` in llama.cpp, by its C interface as the package `llama-cpp-python` has it.

As in llama.cpp's own server, one call takes the next token of each sequence in generation and fills up with prompts; a
waiting request starts as soon as a sequence has ended.
"""

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu_task import MAX_BATCH_SIZE, MAX_NUM_TOKENS, MAX_SEQ_LEN, Run, Task, Tokens, gguf_path

IntArray = NDArray[np.int32]
# Of ggml's `enum ggml_type`; the package names only some.
GGML_TYPES = {"float32": 0, "bfloat16": 30}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way. slot: of the KV cache. length: how many outputs it wants. cached: tokens in the cache."""

    request: int
    slot: int
    prompt: IntArray
    length: int
    cached: int = 0
    outputs: list[int] = field(default_factory=list)

    @property
    def in_context(self) -> bool:
        return self.cached < len(self.prompt)

    def next_tokens(self, budget: int) -> list[int] | IntArray:
        return self.prompt[self.cached : self.cached + budget] if self.in_context else self.outputs[-1:]


class TokenBatch:
    """The memory of a `llama_batch`; every token belongs to one sequence."""

    def __init__(self) -> None:
        self._tokens, self._positions, self._slots = np.zeros((3, MAX_NUM_TOKENS), np.int32)
        self._ones = np.ones(MAX_NUM_TOKENS, np.int32)
        self._wants_logits = np.zeros(MAX_NUM_TOKENS, np.int8)
        integer = ctypes.POINTER(ctypes.c_int32)
        first = self._slots.ctypes.data
        places = (first + index * self._slots.itemsize for index in range(MAX_NUM_TOKENS))
        self._slot_pointers = (integer * MAX_NUM_TOKENS)(*(ctypes.cast(place, integer) for place in places))

    def fill(self, sequences: list[Sequence]) -> list[Sequence]:
        """Put in the next tokens of `sequences`, those in generation first; return those that will yield a token."""
        self.size = 0
        self._wants_logits[:] = 0
        yielding = []
        for sequence in sorted(sequences, key=lambda sequence: sequence.in_context):
            tokens = sequence.next_tokens(MAX_NUM_TOKENS - self.size)
            part = slice(self.size, self.size + len(tokens))
            self._tokens[part] = tokens
            self._positions[part] = np.arange(sequence.cached, sequence.cached + len(tokens))
            self._slots[part] = sequence.slot
            self.size, sequence.cached = part.stop, sequence.cached + len(tokens)
            if len(tokens) and not sequence.in_context:
                self._wants_logits[part.stop - 1] = 1
                yielding.append(sequence)
        return yielding

    def as_struct(self, llama: ModuleType) -> Any:
        """A `llama_batch` of what was put in."""
        integers, flags = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        return llama.llama_batch(
            n_tokens=self.size,
            token=self._tokens.ctypes.data_as(integers),
            embd=None,
            pos=self._positions.ctypes.data_as(integers),
            n_seq_id=self._ones.ctypes.data_as(integers),
            seq_id=self._slot_pointers,
            logits=self._wants_logits.ctypes.data_as(flags),
        )


class LlamaCpp:
    """A model in llama.cpp and its KV cache. RuntimeError if llama.cpp refuses the file or a batch."""

    def __init__(self, task: Task, flash_attention: bool) -> None:
        import llama_cpp

        self._llama: ModuleType = llama_cpp
        self._task = task
        llama_cpp.llama_backend_init()
        parameters, path = self._parameters(flash_attention), gguf_path(task.directory, task.dtype)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self._context = llama_cpp.llama_init_from_model(self._model, parameters) if self._model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot run {path}, which the package gguf writes")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = TokenBatch()

    def _parameters(self, flash_attention: bool) -> Any:
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = MAX_BATCH_SIZE * MAX_SEQ_LEN
        parameters.n_batch = parameters.n_ubatch = MAX_NUM_TOKENS
        parameters.n_seq_max = MAX_BATCH_SIZE
        parameters.n_threads = parameters.n_threads_batch = self._task.threads
        parameters.type_k = parameters.type_v = GGML_TYPES[self._task.dtype]
        parameters.flash_attn_type = int(flash_attention)
        parameters.kv_unified = flash_attention
        return parameters

    def run(self) -> Tokens:
        """Answer all requests, greedily."""
        outputs: Tokens = [[] for _ in self._task.prompts]
        waiting = deque(enumerate(zip(self._task.prompts, self._task.lengths, strict=True)))
        free, active = list(range(MAX_BATCH_SIZE)), list[Sequence]()
        while waiting or active:
            while waiting and free:
                request, (prompt, length) = waiting.popleft()
                active.append(Sequence(request, free.pop(), np.array(prompt, np.int32), length))
            for sequence in self._step(active):
                outputs[sequence.request] = sequence.outputs
                free.append(sequence.slot)
                active.remove(sequence)
        return outputs

    def _step(self, sequences: list[Sequence]) -> list[Sequence]:
        """One call of the model; returns the sequences that it ended."""
        yielding = self._batch.fill(sequences)
        status = self._llama.llama_decode(self._context, self._batch.as_struct(self._llama))
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        ended = []
        for sequence, token in zip(yielding, self._greedy_tokens(len(yielding)), strict=True):
            sequence.outputs.append(token)
            if len(sequence.outputs) == sequence.length:
                self._llama.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
                ended.append(sequence)
        return ended

    def _greedy_tokens(self, count: int) -> list[int]:
        """Of the rows that asked for logits, in the order of the batch."""
        if not count:
            return []
        logits = np.ctypeslib.as_array(self._llama.llama_get_logits(self._context), (count, self._vocab_size))
        return logits.argmax(axis=1).tolist()

    def close(self) -> None:
        """Give memory back."""
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)


@contextmanager
def llama_cpp(task: Task, flash_attention: bool = True) -> Iterator[Run]:
    """16 sequences at once, 512 tokens a call; reads the file at `gguf_path`.

    flash_attention: over one cache for all sequences; it rounds float32 keys and values to 16 bits. Else each sequence
    has a cache of its own, for the attention of all over one would be slow; then llama.cpp runs a call's prompts and
    generation tokens in several passes. The one is faster for larger models, the other for the smallest.
    """
    engine = LlamaCpp(task, flash_attention)
    try:
        yield engine.run
    finally:
        engine.close()
