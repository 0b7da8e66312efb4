"""The executor that runs a model with PyTorch."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import Batch, BeamInputs, BlockCopy, StepOutputs
from ifbbench.engine.plan import ContextChunk
from ifbbench.kv.adapters import LoraConfig
from ifbbench.kv.sizing import CacheLayout
from ifbbench.torch.adapters import AdapterPool
from ifbbench.torch.cache_windows import CacheMoves, CacheWindows, copy_rows
from ifbbench.torch.device import needing_memory
from ifbbench.torch.draft_model import DraftModel
from ifbbench.torch.drafted_batches import AcceptDrafts, DraftedBatches
from ifbbench.torch.logits_processors import LogitsProcessors
from ifbbench.torch.model.llama import ForwardInputs, LlamaModel
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.outputs import OutputsInFlight
from ifbbench.torch.packing import (
    ContextRows,
    Int64Array,
    ModelPass,
    PackedBatch,
    beam_inputs,
    pack,
    take_virtual_tokens,
)
from ifbbench.torch.prepared_batch import PreparedBatch, SlotOwner
from ifbbench.torch.sampling import KernelSampler, OptionalOutputs, Sampler, best_candidates, log_probs_of

if TYPE_CHECKING:  # it imports Triton, which is not installed everywhere
    from ifbbench.torch.cuda_graphs import GenerationGraphs, Recorder


class ModelExecutor:
    """An `ifbbench.engine.interfaces.Executor` that runs batches through a model over a KV cache of its own.

    The newest token of each slot stays on the device, so that a batch can start before the host has the tokens of the
    batch before.
    """

    runs_when_collected = True  # on a CPU

    def __init__(
        self,
        model: LlamaModel,
        layout: CacheLayout,
        num_slots: int,
        max_seq_len: int | None = None,
        *,
        kv_cache_dtype: torch.dtype | None = None,
        lora: LoraConfig | None = None,
        draft_model: LlamaModel | None = None,
        normalize_log_probs: bool = False,
    ) -> None:
        """num_slots: maximum number of sequences at a time.
        max_seq_len: maximum length of a sequence, in tokens; the model's positions if None.
        kv_cache_dtype: data type of keys and values; the model's if None.
        lora: adapters, if requests may have them.
        draft_model: proposes draft tokens.
        normalize_log_probs: see `OptionalOutputs`.

        ValueError if `layout` does not fit the model.
        """
        self._model = model
        self._graphs: GenerationGraphs | None = None
        with torch.inference_mode():
            self._cache = CacheWindows(model, layout, num_slots, kv_cache_dtype)
            self._newest = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
            self._adapters = AdapterPool(model, lora) if lora else None
        if model.uses_kernels and model.device.type == "cuda":
            self.use_graphs(num_slots, max_seq_len or model.config.max_position_embeddings)
        self._processors = LogitsProcessors(num_slots, model.config.vocab_size, model.device)
        self._sampler, log_probs = Sampler(num_slots), log_probs_of
        if model.uses_kernels:
            from ifbbench.torch.kernels import token_choice

            self._sampler, log_probs = KernelSampler(num_slots), token_choice.log_probs_of
        self._optional = OptionalOutputs(num_slots, log_probs, self._sampler if normalize_log_probs else None)
        proposer = None
        if draft_model is not None:
            with torch.inference_mode():
                proposer = DraftModel(draft_model, layout, num_slots, self._sampler, kv_cache_dtype)
        self._drafted = DraftedBatches(self._sampler, self._optional, self._choose, self._newest, proposer)
        # One call for each batch in flight, which waits for its outputs and returns them.
        self._in_flight: deque[Callable[[], StepOutputs]] = deque()

    @property
    def tokens_per_block(self) -> int:
        """The block size of the paged KV cache."""
        return self._cache.tokens_per_block

    def use_graphs(self, num_slots: int, max_seq_len: int, record: "Recorder | None" = None) -> None:
        """Run generation-only batches as CUDA graphs, or as what `record` makes of a pass."""
        from ifbbench.torch.cuda_graphs import GenerationGraphs
        from ifbbench.torch.model.kernel_llama import KernelLlama

        assert isinstance(self._model, KernelLlama)
        self._graphs = GenerationGraphs(self._model, self._cache.windows, num_slots, max_seq_len, record)

    def submit(self, batch: Batch) -> None:
        """Start one batch, to run after those submitted before: on a GPU now, on a CPU when it is collected.

        A call that raises has started nothing: OutOfMemory, or KernelError for a kernel that cannot run.
        """
        num_context = batch.num_context_tokens
        doing = f"running {num_context:,} context and {batch.num_tokens - num_context:,} generation tokens"
        with torch.inference_mode(), self._needing_memory(doing):
            prepared = self._prepare(batch)
            if self.runs_when_collected and self._model.device.type == "cpu":
                self._in_flight.append(lambda: self._run_now(prepared, doing))
            else:
                self._in_flight.append(self._launch(prepared))

    def warm_up(self, report: Callable[[int, int], None]) -> None:
        """Record the CUDA graphs of all batch sizes and compile the kernels that copy blocks.

        A generation batch must have run before, and no sequence may be in the KV cache. report: called with the number
        of graphs recorded and of all. OutOfMemory if the graphs do not fit.
        """
        with torch.inference_mode(), self._needing_memory("recording CUDA graphs"):
            self._cache.warm_up()
            if self._graphs is not None:
                self._graphs.record_all(report)

    def collect(self) -> StepOutputs:
        """Wait for the oldest batch in flight, which is lost if this raises. RuntimeError if there is none. With beams
        there are no `log_probs`: the scores of the candidates contain them."""
        if not self._in_flight:
            raise RuntimeError("collect() without submit(): no iteration is in flight")
        outputs_of_oldest = self._in_flight.popleft()
        with torch.inference_mode():
            return outputs_of_oldest()

    def read_kv(self, tables: Sequence[IntArray], start: int, end: int) -> Iterator[Tensor]:
        """Keys and values of a sequence, of positions `start` to `end` - 1, a tensor of each layer and kind. All
        batches were collected. tables: see `CacheWindows.rows_of`."""
        with torch.inference_mode():
            for cache, rows in self._cache.rows_of(tables, start, end):
                yield from cache.read_rows(rows)

    def write_kv(
        self,
        tables: Sequence[IntArray],
        start: int,
        end: int,
        read: Callable[[Tensor], Tensor],
        copies: tuple[BlockCopy, ...] = (),
    ) -> None:
        """Store what `read_kv` of another executor of the same model has yielded; see `PagedKvCache.write_rows`.
        copies: to be made before."""
        with torch.inference_mode():
            self._cache.move_before(CacheMoves(copies))
            for cache, rows in self._cache.rows_of(tables, start, end):
                cache.write_rows(rows, read)

    def begin_generation(self, chunk: ContextChunk, token: int) -> None:
        """The request of `chunk`, the last one of its prompt, goes on in its slot with `token`, its first one."""
        owner = SlotOwner.of(chunk)
        with torch.inference_mode():
            self._assign(owner)
            newest = self._newest.new_tensor([token])
            self._newest[owner.slot] = newest[0]
            self._processors.note(newest, np.array([owner.slot]))

    def close(self) -> None:
        """Free the KV cache. The executor cannot be used afterwards."""
        self._in_flight.clear()
        del self._cache, self._processors, self._graphs, self._adapters, self._drafted

    def _run_now(self, prepared: PreparedBatch, doing: str) -> StepOutputs:
        # OpenMP keeps a number of threads for each calling thread; this call makes PyTorch set its own for this one.
        torch.get_num_threads()
        with self._needing_memory(doing):
            return self._launch(prepared)()

    def _needing_memory(self, doing: str) -> AbstractContextManager[None]:
        advice = (
            "lower --kv_cache_free_gpu_mem_fraction, --max_num_tokens or --max_batch_size, or choose a smaller "
            "model or --dtype"
        )
        return needing_memory(doing, advice, self._model.device)

    # Preparation: reads requests and block tables, and depends on no earlier batch.

    def _prepare(self, batch: Batch) -> PreparedBatch:
        batch = self._drafted.with_drafts(batch)
        packed = pack(batch, self._cache.max_beams(batch))
        context_rows = ContextRows.of(batch, packed)
        return PreparedBatch(
            iteration=batch.iteration,
            owners=tuple([SlotOwner.of(chunk) for chunk in batch.context]),
            packed=packed,
            slots=self._on_device(batch.slots.astype(np.int64)),
            beam_width=batch.beam_width,
            beams=beam_inputs(batch) if batch.beam_width > 1 else None,
            num_candidates=batch.num_candidates,
            context_rows=context_rows,
            moves=self._cache.plan_moves(batch, packed),
            forward=self._pass(batch, packed, context_rows),
            drafts=None if batch.drafts is None else self._drafted.prepare(batch, packed),
        )

    def _pass(self, batch: Batch, packed: PackedBatch, context_rows: ContextRows | None) -> ModelPass:
        if batch.num_tokens == 0:
            return lambda _: self._newest.new_empty((0, self._model.config.vocab_size), dtype=self._model.dtype)
        wanted = packed.output_rows
        if context_rows is not None:
            wanted = np.concatenate([wanted, context_rows.rows])
        adapters = None
        if batch.adapters is not None and self._adapters is not None:
            adapters = self._adapters.plan(batch, packed, wanted)
        if self._graphs is not None and adapters is None and self._graphs.takes(batch):
            return self._graphs.prepare(batch, packed)
        virtual = take_virtual_tokens(batch, packed, self._model.config.vocab_size, self._model.device)
        context_tokens, positions = self._on_device(packed.context_tokens), self._on_device(packed.positions)
        output_rows, layers = self._on_device(wanted), self._cache.layer_inputs(batch, packed)
        return lambda newest: self._model.forward(
            ForwardInputs(
                torch.cat([context_tokens, newest]),
                positions,
                output_rows,
                layers,
                virtual,
                None if adapters is None else adapters.ready(),
            )
        )

    # Launch: work of the device, in the order of submission.

    def _launch(self, batch: PreparedBatch) -> Callable[[], StepOutputs]:
        """Start `batch`. The result waits for its outputs and returns them."""
        for owner in batch.owners:
            self._assign(owner)
        self._cache.move_before(batch.moves)
        if batch.drafts is not None:
            return OutputsInFlight(self._model.device, **self._drafted.run(batch.drafts, batch)).wait
        logits = batch.forward(self._generation_tokens(batch))
        copy_rows(batch.moves.after)
        return self._outputs(batch, logits)

    def _assign(self, owner: SlotOwner) -> None:
        self._sampler.assign(owner.slot, owner.sampling, owner.original_prompt_len)
        self._processors.assign(
            owner.slot, owner.sampling, owner.end_tokens, owner.original_prompt_len, owner.prompt, owner.beam_width
        )
        self._optional.assign(owner.slot, owner.options)

    def _generation_tokens(self, batch: PreparedBatch) -> Tensor:
        """Newest token of each generation request and beam, [requests · beams]."""
        if batch.beams is not None:
            return self._on_device(batch.beams.tokens.astype(np.int64).ravel())
        return self._newest.index_select(0, batch.slots)

    def _outputs(self, batch: PreparedBatch, logits: Tensor) -> Callable[[], StepOutputs]:
        """A function that waits for the outputs and returns them."""
        packed, device, num_output_rows = batch.packed, logits.device, len(batch.packed.output_rows)
        context_logits = {} if batch.context_rows is None else batch.context_rows.split(logits[num_output_rows:])
        logits = logits[:num_output_rows]
        generation_logits = self._optional.generation_logits(logits, packed, batch.beam_width)
        if batch.beams is not None:
            candidates = self._candidates(logits, packed, batch.beams, batch.num_candidates)
            return OutputsInFlight(device, context_logits, generation_logits, candidates=candidates).wait
        tokens, processed = self._choose(logits, packed.output_slots, packed.output_positions)
        self._newest.index_copy_(0, self._on_device(packed.output_slots), tokens)
        log_probs = self._optional.log_probs(logits, processed, tokens, packed)
        return OutputsInFlight(device, context_logits, generation_logits, tokens, log_probs).wait

    def _choose(
        self, logits: Tensor, slots: Int64Array, positions: Int64Array, accept: AcceptDrafts | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next tokens of the requests in `slots`, int64 [rows], and the processed logits that they were chosen
        from. accept: may put accepted drafts at their positions."""
        processed = self._processors.apply(logits, slots, positions)
        tokens = self._sampler.choose(processed, slots, positions)
        if accept is not None:
            accept(processed, tokens)
        self._processors.note(tokens, slots)
        return tokens, processed

    def _candidates(
        self, logits: Tensor, packed: PackedBatch, beams: BeamInputs, num_candidates: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations by processed log-probabilities; see `best_candidates`."""
        # A last chunk is one row, a generation request a row a beam.
        num_chunks, (num_requests, width) = packed.num_last_chunks, beams.tokens.shape
        repeats = np.repeat([1, width], [num_chunks, num_requests])
        slots, positions = packed.output_slots.repeat(repeats), packed.output_positions.repeat(repeats)
        beam_of_row = np.concatenate([np.zeros(num_chunks, np.int64), np.tile(np.arange(width), num_requests)])
        self._processors.follow(beams, packed.output_slots[num_chunks:])
        log_probs = self._sampler.beam_log_probs(logits, slots)
        log_probs = self._processors.apply(log_probs, slots, positions, beam_of_row)
        scores = to_device(beams.scores.copy(), logits.device)
        return best_candidates(log_probs, scores, num_chunks, num_candidates)

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return to_device(array, self._model.device)
