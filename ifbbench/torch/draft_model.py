"""The draft model: a small model that proposes draft tokens for a large one (`--draft_model`).

It runs the same batches before the large model does, over a KV cache of its own with the block tables of the large
one: the engine manages one set of blocks, each with room in both. So prompts, chunks, pauses, reuse and copies of
blocks need nothing else. Of the newest token before a pause or an end, keys and values may be missing where a block is
found again, which costs no more than a rejected draft.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ifbbench.engine.batch import Batch
from ifbbench.engine.drafts import DraftInputs
from ifbbench.kv.sizing import CacheLayout, WindowLayout
from ifbbench.torch.cache_windows import CacheWindows
from ifbbench.torch.model.llama import ForwardInputs, LlamaModel
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.packing import Int64Array, PackedBatch, pack
from ifbbench.torch.sampling import Sampler, most_likely
from ifbbench.torch.verification import Proposals, Verified, draw

# The stream of random numbers from which draft tokens are drawn; the verification has others.
DRAFT_STREAM = 0xD6E8_FEB8_6659_FD93

Propose = Callable[[Proposals, Tensor], None]


class DraftModel:
    """Proposes the unknown draft tokens of batches."""

    def __init__(
        self,
        model: LlamaModel,
        layout: CacheLayout,
        num_slots: int,
        sampler: Sampler,
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        """layout: layout of the large model's cache, which has one attention window.
        sampler: sampler of the requests in each slot.
        """
        (window,) = layout.windows
        layers = tuple(range(model.config.num_layers))
        own = WindowLayout(layers, window.attention_window, window.num_blocks, window.num_host_blocks)
        self._model = model
        self._sampler = sampler
        self._cache = CacheWindows(model, CacheLayout((own,), layout.is_contiguous), num_slots, kv_cache_dtype)
        # The token before the newest of each slot: where the last step accepted all drafts, this model has not seen it.
        self._previous = torch.zeros(num_slots, dtype=torch.int64, device=model.device)

    def prepare(self, batch: Batch) -> Propose:
        """The passes for `batch`. The result fills in its unknown drafts, given the newest token of each generation
        request, int64 [requests].

        The first pass runs context chunks and the two newest tokens of each generation request; each further one runs
        the draft before. Reads the block tables before it returns."""
        assert batch.drafts is not None
        num_last = batch.num_last_chunks
        of_prompts, of_generation = batch.drafts.counts[:num_last], batch.drafts.counts[num_last:]
        counts = np.concatenate([of_prompts, np.ones(len(batch.slots), np.int32)])
        tokens = np.concatenate([batch.drafts.tokens[: of_prompts.sum()], np.zeros(len(batch.slots), np.int32)])
        first = batch._replace(positions=batch.positions - 1, drafts=DraftInputs(counts, tokens))
        packed = pack(first, self._cache.max_beams(first))
        # Virtual tokens have embeddings of the large model only: here they are token 0, which costs accepted drafts.
        packed.context_tokens[packed.context_tokens >= self._model.config.vocab_size] = 0
        moves = self._cache.plan_moves(first, packed)
        # Generation requests need the logits behind their newest token.
        newest_rows = packed.output_rows[counts.cumsum() + np.arange(len(counts))][num_last:]
        passes = [self._pass(first, packed, newest_rows)] if first.num_tokens else []
        members = []
        for step in range(int(of_generation.max(initial=0))):
            members.append(np.flatnonzero(of_generation > step))
            if step:
                chosen = members[-1]
                further = batch._replace(
                    context=(), slots=batch.slots[chosen], drafts=None, positions=batch.positions[chosen] + step
                )
                packed_step = pack(further, self._cache.max_beams(further))
                passes.append(self._pass(further, packed_step, packed_step.output_rows))
        context_tokens, slots = packed.context_tokens, batch.slots.astype(np.int64)

        def propose(proposals: Proposals, newest: Tensor) -> None:
            self._cache.move_before(moves)
            if not passes:
                return
            previous = self._previous.index_select(0, to_device(slots, newest.device))
            tokens = torch.stack([previous, newest], dim=1).flatten()
            logits = passes[0](torch.cat([to_device(context_tokens, newest.device), tokens]))
            of_before = np.arange(len(slots))
            for step, chosen in enumerate(members):
                kept = to_device(np.searchsorted(of_before, chosen), newest.device)
                logits = passes[step](tokens.index_select(0, kept)) if step else logits.index_select(0, kept)
                drafts = proposals.firsts[num_last + chosen] + step
                positions = batch.positions[chosen].astype(np.int64) + step + 1
                tokens, of_before = self._choose(logits, slots[chosen], positions, drafts, proposals), chosen

        return propose

    def note(self, slots: Int64Array, newest_before: Tensor, verified: Verified) -> None:
        """Keep the token before the newest of each output of a batch, once its drafts are verified.

        slots: [outputs].
        newest_before: int64 [outputs], the newest tokens before the batch, of prompts their last.
        """
        indices, device = np.maximum(verified.accepted - 1, 0), newest_before.device
        last_draft = to_device(verified.tokens[np.arange(len(indices)), indices], device)
        previous = torch.where(to_device(verified.accepted > 0, device), last_draft, newest_before)
        self._previous.index_copy_(0, to_device(slots, device), previous)

    def _choose(
        self, logits: Tensor, slots: Int64Array, positions: Int64Array, drafts: Int64Array, proposals: Proposals
    ) -> Tensor:
        """One draft of each row, int64 [rows]: the most likely token, or one drawn at random for requests that sample.

        drafts: [rows], index of each in `proposals`, which keeps the token and the distribution."""
        tokens = most_likely(logits)
        (sampled,) = self._sampler.is_sampled(slots).nonzero()
        if len(sampled):
            rows = to_device(sampled, logits.device)
            probabilities = self._sampler.probabilities(logits.index_select(0, rows), slots[sampled]).float()
            uniform = self._sampler.uniforms(slots[sampled], positions[sampled], DRAFT_STREAM)
            tokens.index_copy_(0, rows, draw(probabilities, to_device(uniform, logits.device)))
            proposals.probabilities.update(zip(drafts[sampled].tolist(), probabilities, strict=True))
        proposals.tokens[drafts] = tokens.cpu().numpy()
        return tokens

    def _pass(self, batch: Batch, packed: PackedBatch, output_rows: Int64Array) -> Callable[[Tensor], Tensor]:
        """From all tokens of the batch, int64 [rows], to the logits of `output_rows`."""
        device = self._model.device
        positions, wanted = to_device(packed.positions, device), to_device(output_rows, device)
        layers = self._cache.layer_inputs(batch, packed)
        return lambda tokens: self._model.forward(ForwardInputs(tokens, positions, wanted, layers))
