"""The executor that runs a model with PyTorch."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.batching.batch import Batch, ContextChunk, StepOutputs
from ifbbench.batching.kv_cache.layout import CacheLayout
from ifbbench.errors import InputError
from ifbbench.execution.beams import beam_inputs, best_candidates
from ifbbench.execution.cache_windows import CacheWindows, one_window_layout
from ifbbench.execution.device_memory import LOWER_FOR_BATCH, OutOfMemory, is_out_of_memory, needing_memory
from ifbbench.execution.numbers import ContextRows, WantedNumbers
from ifbbench.execution.packing import PackedBatch, pack
from ifbbench.execution.penalty import RepetitionPenalty
from ifbbench.execution.sampling import Sampler
from ifbbench.execution.under_way import DeviceOutputs, OutputsUnderWay
from ifbbench.model.llama import ForwardInputs, LlamaModel

if TYPE_CHECKING:  # it imports Triton, which is not there everywhere
    from ifbbench.execution.cuda_graphs import GenerationGraphs, Recorder


class ModelExecutor:
    """Runs batches through `model` over a KV cache of its own, as `ifbbench.batching.batch.Executor` asks.

    The newest token of each slot stays on the device, so a batch can start before the host has seen the tokens of the
    one before.
    """

    def __init__(
        self, model: LlamaModel, num_slots: int, num_blocks: int, tokens_per_block: int, max_seq_len: int | None = None,
        *, layout: CacheLayout | None = None, kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        """max_seq_len: the longest sequence that will come, in tokens; InputError if the model has fewer positions.

        layout: the KV cache; then `num_blocks` and `tokens_per_block` are not looked at. Without it, the cache has one
        window for all layers (see `one_window_layout`). kv_cache_dtype: what keys and values are stored as, the model's
        data type if None. InputError if the layout lets layers see more than the model's sliding window; ValueError if
        it does not fit the model.
        """
        positions = model.config.max_position_embeddings
        if max_seq_len is not None and max_seq_len > positions:
            raise InputError(f"--max_seq_len: {max_seq_len} is more than the model's {positions} positions; expected "
                             f"at most {positions} (tokens). Lower it or leave it out.")
        self._model = model
        layout = layout or one_window_layout(model.config, num_blocks, tokens_per_block, max_seq_len)
        self.tokens_per_block = layout.windows[0].geometry.tokens_per_block
        windows_class, sampler_class = _classes_for(model)
        self._graphs: GenerationGraphs | None = None
        with torch.inference_mode():
            self._cache = windows_class(model.config, layout, num_slots, model.device, model.dtype, kv_cache_dtype,
                                        attends_steps=model.operations.attends_steps)  # fmt: skip
            self._newest = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        if model.uses_kernels and model.device.type == "cuda":
            self.use_graphs(num_slots, max_seq_len or positions)
        self._sampler = sampler_class(num_slots)
        self._penalty = RepetitionPenalty(num_slots, model.config.vocab_size, model.device)
        self._wanted = WantedNumbers(num_slots)
        self._under_way: deque[OutputsUnderWay] = deque()

    def use_graphs(self, num_slots: int, max_seq_len: int, record: "Recorder | None" = None) -> None:
        """Run generation-only batches as CUDA graphs from now on, or as what `record` makes of a pass."""
        from ifbbench.execution.cuda_graphs import GenerationGraphs
        from ifbbench.model.kernel_llama import KernelLlama

        assert isinstance(self._model, KernelLlama)
        self._graphs = GenerationGraphs(self._model, self._cache.windows, num_slots, max_seq_len, record)

    def submit(self, batch: Batch) -> None:
        """Start one batch, to run after those submitted before. One that raises has started nothing: OutOfMemory where
        memory does not have what it takes, KernelError for a kernel that cannot run."""
        try:
            with torch.inference_mode():
                for chunk in batch.context:
                    self._assign(chunk)
                self._under_way.append(OutputsUnderWay(self._run(batch), self._model.device))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            num_context = batch.num_context_tokens
            doing = f"running {num_context:,} context and {batch.num_tokens - num_context:,} generation tokens"
            raise OutOfMemory.during(doing, LOWER_FOR_BATCH, self._model.device, error) from error

    def warm_up(self, hear: Callable[[int, int], None]) -> None:
        """Once a generation batch has run: record the CUDA graphs of all sizes, and compile the kernels that copy
        blocks. The KV cache must be nobody's. hear: is told how many graphs there are, and of how many.

        InputError if memory does not have what they take."""
        recording = needing_memory("recording CUDA graphs", LOWER_FOR_BATCH, self._model.device)
        with torch.inference_mode(), recording:
            self._cache.warm_up()
            if self._graphs is not None:
                self._graphs.record_all(hear)

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch under way. RuntimeError if there is none. With beams there are no `log_probs`:
        the candidates' scores say as much."""
        if not self._under_way:
            raise RuntimeError("collect() without submit(): no iteration is under way")
        return self._under_way.popleft().wait()

    def close(self) -> None:
        """Give back the KV cache's memory. The executor cannot be used afterwards."""
        self._under_way.clear()
        del self._cache, self._penalty, self._graphs

    def _assign(self, chunk: ContextChunk) -> None:
        """The slot belongs to the chunk's request now."""
        request = chunk.request
        self._sampler.assign(request.slot, request.sampling, request.original_prompt_len)
        self._penalty.assign(request, prompt_is_complete=chunk.is_last)
        self._wanted.assign(request.slot, request.options)

    def _run(self, batch: Batch) -> DeviceOutputs:
        packed = pack(batch, self._cache.max_beams(batch))
        context_rows = ContextRows.of(batch, packed)
        logits = self._logits(batch, packed, context_rows)
        num_output_rows = len(packed.output_rows)
        context_logits = {} if context_rows is None else context_rows.split(logits[num_output_rows:])
        logits = logits[:num_output_rows]
        generation_logits = self._wanted.generation_logits(logits, packed, batch.beam_width)
        if batch.beam_width > 1:
            scores = torch.from_numpy(beam_inputs(batch).scores.copy()).to(self._model.device)
            candidates = best_candidates(logits, scores, packed.num_last_chunks, batch.num_candidates)
            return DeviceOutputs(None, candidates, None, context_logits, generation_logits)
        tokens = self._choose(logits, packed)
        log_probs = self._wanted.log_probs(logits, tokens, packed)
        return DeviceOutputs(tokens, None, log_probs, context_logits, generation_logits)

    def _logits(self, batch: Batch, packed: PackedBatch, context_rows: ContextRows | None) -> Tensor:
        """Logits [output rows + context logits' rows, vocabulary]."""
        if batch.num_tokens == 0:
            self._cache.prepare(batch)
            return self._newest.new_empty((0, self._model.config.vocab_size), dtype=self._model.dtype)
        if self._graphs is not None and self._graphs.takes(batch):
            self._cache.prepare(batch)
            return self._graphs.logits(batch, packed, self._generation_tokens(batch))
        wanted = packed.output_rows
        if context_rows is not None:
            wanted = np.concatenate([wanted, context_rows.rows])
        inputs = ForwardInputs(
            tokens=torch.cat([self._on_device(packed.context_tokens), self._generation_tokens(batch)]),
            positions=self._on_device(packed.positions),
            output_rows=self._on_device(wanted),
            layers=self._cache.layer_inputs(batch, packed),
        )
        self._cache.prepare(batch)
        logits = self._model.forward(inputs)
        self._cache.share_prompts(batch, packed)
        return logits

    def _generation_tokens(self, batch: Batch) -> Tensor:
        """Newest token of each generation request and beam, [requests · beams]."""
        if batch.beam_width > 1:
            return self._on_device(beam_inputs(batch).tokens.astype(np.int64).ravel())
        return self._newest.index_select(0, self._on_device(batch.slots.astype(np.int64)))

    def _choose(self, logits: Tensor, packed: PackedBatch) -> Tensor:
        """The new tokens, int64 [outputs], which become the newest of their slots."""
        slots = packed.output_slots
        tokens = self._sampler.choose(self._penalty.apply(logits, slots), slots, packed.output_positions)
        self._penalty.note(tokens, slots)
        self._newest.index_copy_(0, self._on_device(slots), tokens)
        return tokens

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)


def _classes_for(model: LlamaModel) -> tuple[type[CacheWindows], type[Sampler]]:
    """What plans batches and chooses tokens for `model`."""
    if not model.uses_kernels:
        return CacheWindows, Sampler
    # These import Triton, which a run without a GPU does not need.
    from ifbbench.execution.kernel_sampling import KernelSampler
    from ifbbench.execution.kernel_windows import KernelCacheWindows

    return KernelCacheWindows, KernelSampler
