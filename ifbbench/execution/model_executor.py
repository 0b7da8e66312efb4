"""The executor that runs a model with PyTorch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.batching.batch import Batch, IntArray
from ifbbench.errors import InputError
from ifbbench.execution.packing import PackedBatch, pack
from ifbbench.execution.sampling import Sampler
from ifbbench.model.attention_plan import plan_attention
from ifbbench.model.kv_cache import PagedKvCache
from ifbbench.model.llama import ForwardInputs, LlamaModel


class ModelExecutor:
    """Runs batches through `model` over a paged KV cache of its own, as `ifbbench.batching.batch.Executor` asks.

    The newest token of each slot stays on the device, so an iteration can start before the host has seen the tokens of
    the one before.
    """

    def __init__(
        self, model: LlamaModel, num_slots: int, num_blocks: int, tokens_per_block: int, max_seq_len: int | None = None
    ) -> None:
        """max_seq_len: the longest sequence that will come, in tokens; InputError if the model has fewer positions."""
        positions = model.config.max_position_embeddings
        if max_seq_len is not None and max_seq_len > positions:
            raise InputError(f"--max_seq_len: {max_seq_len} is more than the model's {positions} positions; expected "
                             f"at most {positions} (tokens). Lower it or leave it out.")
        self._model = model
        self._tokens_per_block = tokens_per_block
        with torch.inference_mode():
            self._cache = PagedKvCache(model.config, num_blocks, tokens_per_block, model.device, model.dtype)
            self._newest = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        self._sampler = Sampler(num_slots)
        self._submitted: Tensor | None = None

    def submit(self, batch: Batch) -> None:
        """Start one iteration. RuntimeError if the last one has not been collected."""
        if self._submitted is not None:
            raise RuntimeError("submit() before collect(): an iteration is under way already")
        for chunk in batch.context:
            request = chunk.request
            self._sampler.assign(request.slot, request.sampling, request.original_prompt_len)
        with torch.inference_mode():
            self._submitted = self._run(batch)

    def collect(self) -> IntArray:
        """Token ids of the submitted iteration, [outputs]: its last chunks, then its generation requests."""
        if self._submitted is None:
            raise RuntimeError("collect() without submit(): no iteration is under way")
        tokens: IntArray = self._submitted.to("cpu", torch.int32).numpy()
        self._submitted = None
        return tokens

    def close(self) -> None:
        """Give back the KV cache's memory. The executor cannot be used afterwards."""
        del self._cache

    def _run(self, batch: Batch) -> Tensor:
        if batch.num_tokens == 0:
            return self._newest[:0]
        packed = pack(batch, self._tokens_per_block)
        logits = self._model.forward(self._inputs(batch, packed), self._cache)
        tokens = self._sampler.choose(logits, packed.output_slots, packed.output_positions)
        self._newest.index_copy_(0, self._on_device(packed.output_slots), tokens)
        return tokens

    def _inputs(self, batch: Batch, packed: PackedBatch) -> ForwardInputs:
        generation_slots = self._on_device(batch.slots.astype(np.int64))
        newest = self._newest.index_select(0, generation_slots)
        return ForwardInputs(
            tokens=torch.cat([self._on_device(packed.context_tokens), newest]),
            positions=self._on_device(packed.positions),
            cache_rows=self._on_device(packed.cache_rows),
            output_rows=self._on_device(packed.output_rows),
            groups=plan_attention(packed.spans, batch.block_tables, self._tokens_per_block, self._model.device),
        )

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)
