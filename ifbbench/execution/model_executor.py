"""The executor that runs a model with PyTorch."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.kv_cache.sizing import CacheLayout
from ifbbench.errors import InputError
from ifbbench.execution.beams import beam_inputs, best_candidates
from ifbbench.execution.cache_windows import CacheWindows, one_window_layout
from ifbbench.execution.device_memory import LOWER_FOR_BATCH, needing_memory
from ifbbench.execution.numbers import ContextRows, LogProbsOf, WantedNumbers, log_probs_of
from ifbbench.execution.packing import PackedBatch, pack
from ifbbench.execution.penalty import RepetitionPenalty
from ifbbench.execution.prepared import BeamStep, ModelPass, PreparedBatch, SlotOwner
from ifbbench.execution.sampling import Sampler
from ifbbench.execution.under_way import DeviceOutputs, OutputsUnderWay
from ifbbench.model.llama import ForwardInputs, LlamaModel
from ifbbench.model.to_device import to_device

if TYPE_CHECKING:  # it imports Triton, which is not there everywhere
    from ifbbench.execution.cuda_graphs import GenerationGraphs, Recorder


class ModelExecutor:
    """Runs batches through `model` over a KV cache of its own, as `ifbbench.engine.batch.Executor` asks.

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
        self.tokens_per_block = layout.windows[0].attention_window.tokens_per_block
        parts = _parts_for(model)
        self._graphs: GenerationGraphs | None = None
        with torch.inference_mode():
            self._cache = parts.windows(model.config, layout, num_slots, model.device, model.dtype, kv_cache_dtype,
                                        attends_in_place=model.operations.attends_in_place)  # fmt: skip
            self._newest = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        if model.uses_kernels and model.device.type == "cuda":
            self.use_graphs(num_slots, max_seq_len or positions)
        self._sampler = parts.sampler(num_slots)
        self._penalty = RepetitionPenalty(num_slots, model.config.vocab_size, model.device)
        self._wanted = WantedNumbers(num_slots, parts.log_probs_of)
        # Each gives the outputs of a batch.
        self._under_way: deque[Callable[[], StepOutputs]] = deque()

    def use_graphs(self, num_slots: int, max_seq_len: int, record: "Recorder | None" = None) -> None:
        """Run generation-only batches as CUDA graphs from now on, or as what `record` makes of a pass."""
        from ifbbench.execution.cuda_graphs import GenerationGraphs
        from ifbbench.model.kernel_llama import KernelLlama

        assert isinstance(self._model, KernelLlama)
        self._graphs = GenerationGraphs(self._model, self._cache.windows, num_slots, max_seq_len, record)

    def submit(self, batch: Batch) -> None:
        """Start one batch, to run after those submitted before. One that raises has started nothing: OutOfMemory where
        memory does not have what it takes, KernelError for a kernel that cannot run.

        A GPU has it from then on. A CPU has nobody else to run it, so there it runs when it is collected.
        """
        num_context = batch.num_context_tokens
        doing = f"running {num_context:,} context and {batch.num_tokens - num_context:,} generation tokens"
        with torch.inference_mode(), self._needing_memory(doing):
            prepared = self._prepare(batch)
            if self._model.device.type == "cpu":
                self._under_way.append(lambda: self._run_now(prepared, doing))
            else:
                self._under_way.append(self._launch(prepared))

    def warm_up(self, hear: Callable[[int, int], None]) -> None:
        """Once a generation batch has run: record the CUDA graphs of all sizes, and compile the kernels that copy
        blocks. The KV cache must be nobody's. hear: is told how many graphs there are, and of how many.

        InputError if memory does not have what they take."""
        with torch.inference_mode(), self._needing_memory("recording CUDA graphs"):
            self._cache.warm_up()
            if self._graphs is not None:
                self._graphs.record_all(hear)

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch under way, which is lost if this raises. RuntimeError if there is none. With beams
        there are no `log_probs`: the candidates' scores say as much."""
        if not self._under_way:
            raise RuntimeError("collect() without submit(): no iteration is under way")
        outputs_of_oldest = self._under_way.popleft()
        with torch.inference_mode():
            return outputs_of_oldest()

    def close(self) -> None:
        """Give back the KV cache's memory. The executor cannot be used afterwards."""
        self._under_way.clear()
        del self._cache, self._penalty, self._graphs

    def _run_now(self, prepared: PreparedBatch, doing: str) -> StepOutputs:
        # OpenMP's number of threads is each thread's own; asked for it, PyTorch passes its own on to the one that asks.
        torch.get_num_threads()
        with self._needing_memory(doing):
            return self._launch(prepared)()

    def _needing_memory(self, doing: str) -> AbstractContextManager[None]:
        return needing_memory(doing, LOWER_FOR_BATCH, self._model.device)

    # Preparing: what reads requests and block tables, and depends on no batch before.

    def _prepare(self, batch: Batch) -> PreparedBatch:
        packed = pack(batch, self._cache.max_beams(batch))
        context_rows = ContextRows.of(batch, packed)
        has_beams = batch.beam_width > 1
        return PreparedBatch(
            iteration=batch.iteration,
            owners=tuple([SlotOwner.of(chunk) for chunk in batch.context]),
            packed=packed,
            slots=self._on_device(batch.slots.astype(np.int64)),
            beams=BeamStep(batch.beam_width, beam_inputs(batch), batch.num_candidates) if has_beams else None,
            context_rows=context_rows,
            moves=self._cache.plan_moves(batch, packed),
            forward=self._pass(batch, packed, context_rows),
        )

    def _pass(self, batch: Batch, packed: PackedBatch, context_rows: ContextRows | None) -> ModelPass:
        if batch.num_tokens == 0:
            return lambda _: self._newest.new_empty((0, self._model.config.vocab_size), dtype=self._model.dtype)
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.prepare(batch, packed)
        wanted = packed.output_rows
        if context_rows is not None:
            wanted = np.concatenate([wanted, context_rows.rows])
        context_tokens, positions = self._on_device(packed.context_tokens), self._on_device(packed.positions)
        output_rows, layers = self._on_device(wanted), self._cache.layer_inputs(batch, packed)
        return lambda newest: self._model.forward(
            ForwardInputs(torch.cat([context_tokens, newest]), positions, output_rows, layers)
        )

    # Launching: what the device does, in the order of submission.

    def _launch(self, batch: PreparedBatch) -> Callable[[], StepOutputs]:
        """Start `batch`; what comes back waits for its outputs."""
        for owner in batch.owners:
            self._sampler.assign(owner.slot, owner.sampling, owner.original_prompt_len)
            self._penalty.assign(owner.slot, owner.sampling.repetition_penalty, owner.prompt)
            self._wanted.assign(owner.slot, owner.options)
        self._cache.move_before(batch.moves)
        logits = batch.forward(self._generation_tokens(batch))
        self._cache.move_after(batch.moves)
        return OutputsUnderWay(self._outputs(batch, logits), self._model.device).wait

    def _generation_tokens(self, batch: PreparedBatch) -> Tensor:
        """Newest token of each generation request and beam, [requests · beams]."""
        if batch.beams is not None:
            return self._on_device(batch.beams.inputs.tokens.astype(np.int64).ravel())
        return self._newest.index_select(0, batch.slots)

    def _outputs(self, batch: PreparedBatch, logits: Tensor) -> DeviceOutputs:
        packed, num_output_rows = batch.packed, len(batch.packed.output_rows)
        context_logits = {} if batch.context_rows is None else batch.context_rows.split(logits[num_output_rows:])
        logits = logits[:num_output_rows]
        beam_width = 1 if batch.beams is None else batch.beams.width
        generation_logits = self._wanted.generation_logits(logits, packed, beam_width)
        if (beams := batch.beams) is not None:
            scores = to_device(beams.inputs.scores.copy(), self._model.device)
            candidates = best_candidates(logits, scores, packed.num_last_chunks, beams.num_candidates)
            return DeviceOutputs(None, candidates, None, context_logits, generation_logits)
        tokens = self._choose(logits, packed)
        log_probs = self._wanted.log_probs(logits, tokens, packed)
        return DeviceOutputs(tokens, None, log_probs, context_logits, generation_logits)

    def _choose(self, logits: Tensor, packed: PackedBatch) -> Tensor:
        """The new tokens, int64 [outputs], which become the newest of their slots."""
        slots = packed.output_slots
        tokens = self._sampler.choose(self._penalty.apply(logits, slots), slots, packed.output_positions)
        self._penalty.note(tokens, slots)
        self._newest.index_copy_(0, self._on_device(slots), tokens)
        return tokens

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return to_device(array, self._model.device)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What plans batches, chooses tokens and computes their log-probabilities for a model."""

    windows: type[CacheWindows] = CacheWindows
    sampler: type[Sampler] = Sampler
    log_probs_of: LogProbsOf = log_probs_of


def _parts_for(model: LlamaModel) -> _Parts:
    if not model.uses_kernels:
        return _Parts()
    # These import Triton, which a run without a GPU does not need.
    from ifbbench.execution.kernel_sampling import KernelSampler
    from ifbbench.execution.kernel_windows import KernelCacheWindows
    from ifbbench.kernels.log_probs import log_probs_of

    return _Parts(KernelCacheWindows, KernelSampler, log_probs_of)
