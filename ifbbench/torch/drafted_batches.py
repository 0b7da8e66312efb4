"""Batches with draft tokens in the executor: the drafts are proposed, run through the model, and verified."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ifbbench.clock import WallClock
from ifbbench.engine.batch import Batch
from ifbbench.engine.drafts import DraftInputs
from ifbbench.torch.draft_model import DraftModel
from ifbbench.torch.model.tensors import to_device
from ifbbench.torch.packing import Int64Array, PackedBatch
from ifbbench.torch.prepared_batch import PreparedBatch, PreparedDrafts
from ifbbench.torch.sampling import OptionalOutputs, Sampler
from ifbbench.torch.verification import Proposals, Verified, accept_or_replace, verify

# Streams of random numbers: whether a draft is accepted, and which token replaces a rejected one.
ACCEPT_STREAM, REPLACE_STREAM = 0xA076_1D64_78BD_642F, 0xE703_7ED1_A0B4_28DB

# Takes processed logits [rows, vocabulary] and chosen tokens [rows], and changes the tokens.
AcceptDrafts = Callable[[Tensor, Tensor], None]


class ChooseTokens(Protocol):
    """See `ModelExecutor._choose`."""

    def __call__(
        self, logits: Tensor, slots: Int64Array, positions: Int64Array, accept: AcceptDrafts | None = None
    ) -> tuple[Tensor, Tensor]: ...


class DraftedBatches:
    """Runs batches that have draft tokens.

    choose: the executor's choice of tokens.
    newest: int64 [slots], the newest token of each; it is changed.
    """

    def __init__(
        self,
        sampler: Sampler,
        optional: OptionalOutputs,
        choose: ChooseTokens,
        newest: Tensor,
        draft_model: DraftModel | None,
    ) -> None:
        self._sampler = sampler
        self._optional = optional
        self._choose = choose
        self._newest = newest
        self._draft_model = draft_model
        self._clock = WallClock()

    def with_drafts(self, batch: Batch) -> Batch:
        """`batch`; with inputs for no drafts if it has none but a draft model must see its tokens."""
        if batch.drafts is not None or self._draft_model is None:
            return batch
        return batch._replace(drafts=DraftInputs(np.zeros(batch.num_outputs, np.int32), np.zeros(0, np.int32)))

    def prepare(self, batch: Batch, packed: PackedBatch) -> PreparedDrafts:
        """Reads requests and block tables before it returns."""
        assert batch.drafts is not None
        ends = [int(chunk.tokens()[-1]) for chunk in batch.context if chunk.is_last]
        propose = None if self._draft_model is None else self._draft_model.prepare(batch)
        return PreparedDrafts(batch.drafts, packed.num_last_chunks, np.array(ends, np.int64), propose)

    def run(self, drafts: PreparedDrafts, batch: PreparedBatch) -> dict[str, Any]:
        """Run `batch`; returns the arguments of its `OutputsInFlight`."""
        packed, device = batch.packed, self._newest.device
        proposals, newest = Proposals(drafts.inputs, drafts.num_last_chunks), self._newest.index_select(0, batch.slots)
        start_s = self._clock.now()
        if drafts.propose is not None:
            drafts.propose(proposals, newest)
        draft_s = self._clock.now() - start_s if drafts.propose is not None else 0.0
        logits = batch.forward(proposals.generation_tokens(newest))
        num_rows = len(packed.output_rows)
        context_logits = {} if batch.context_rows is None else batch.context_rows.split(logits[num_rows:])
        logits = logits[:num_rows]
        self._add_client_distributions(proposals, packed, device)
        verified = verify(logits, proposals, self._choice(packed, proposals))
        self._newest.index_copy_(0, to_device(packed.output_slots, device), to_device(verified.newest, device))
        if self._draft_model is not None:
            before = torch.cat([to_device(drafts.prompt_ends, device), newest])
            self._draft_model.note(packed.output_slots, before, verified)
        log_probs, generation_logits = self._numbers(logits, packed, verified, proposals)
        if not proposals.counts.any():  # only the draft model had to see the batch
            tokens = torch.from_numpy(verified.newest)
            log_probs = None if log_probs is None else log_probs.squeeze(1)
            return {
                "context_logits": context_logits,
                "generation_logits": generation_logits,
                "tokens": tokens,
                "log_probs": log_probs,
                "draft_s": draft_s,
            }
        return {
            "context_logits": context_logits,
            "generation_logits": generation_logits,
            "tokens": torch.from_numpy(verified.tokens),
            "log_probs": log_probs,
            "accepted": verified.accepted,
            "draft_s": draft_s,
        }

    def _add_client_distributions(self, proposals: Proposals, packed: PackedBatch, device: torch.device) -> None:
        for output, logits in proposals.client_logits.items():
            slots = np.full(len(logits), packed.output_slots[output])
            if self._sampler.is_sampled(slots).any():
                probabilities = self._sampler.probabilities(to_device(logits, device), slots)
                first = int(proposals.firsts[output])
                proposals.probabilities.update(enumerate(probabilities, start=first))

    def _choice(self, packed: PackedBatch, proposals: Proposals) -> Callable[..., Tensor]:
        """The choice of tokens for `verify`."""

        def choose(logits: Tensor, outputs: Int64Array, step: int, drafts: Int64Array) -> Tensor:
            slots, positions = packed.output_slots[outputs], packed.output_positions[outputs] + step
            drawn = (
                np.array(
                    [index for index, draft in enumerate(drafts.tolist()) if draft in proposals.probabilities], np.int64
                )
                if proposals.probabilities
                else drafts[:0]
            )

            def accept(logits: Tensor, tokens: Tensor) -> None:
                rows, device = to_device(drawn, logits.device), logits.device
                target = self._sampler.probabilities(logits.index_select(0, rows), slots[drawn])
                proposed = torch.stack([proposals.probabilities[draft] for draft in drafts[drawn].tolist()])
                accept_at, replace_at = (
                    to_device(self._sampler.uniforms(slots[drawn], positions[drawn], stream), device)
                    for stream in (ACCEPT_STREAM, REPLACE_STREAM)
                )
                of_drafts = to_device(proposals.tokens[drafts[drawn]], device)
                tokens.index_copy_(0, rows, accept_or_replace(target, proposed, of_drafts, accept_at, replace_at))

            return self._choose(logits, slots, positions, accept if len(drawn) else None)[0]

        return choose

    def _numbers(
        self, logits: Tensor, packed: PackedBatch, verified: Verified, proposals: Proposals
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Log-probabilities [outputs, tokens] and generation logits of the valid tokens, for requests that ask."""
        yielded = verified.accepted.astype(np.int64) + 1
        is_valid = np.arange(verified.tokens.shape[1]) < yielded[:, None]
        rows = to_device(verified.valid_rows(proposals.counts), logits.device)
        flat, tokens = logits.index_select(0, rows), to_device(verified.tokens[is_valid], logits.device)
        slots = np.repeat(packed.output_slots, yielded)
        each = replace(packed, output_slots=slots, num_last_chunks=len(slots))
        log_probs = self._optional.log_probs(flat, flat, tokens, each)
        if log_probs is not None:
            wide = torch.zeros(is_valid.shape, device=logits.device)
            wide[to_device(is_valid, logits.device)] = log_probs
            log_probs = wide
        firsts = yielded.cumsum() - yielded
        asked = self._optional.generation_logits(flat, each, 1)
        ranges = enumerate(zip(firsts.tolist(), (firsts + yielded).tolist(), strict=True))
        return log_probs, {output: flat[first:stop] for output, (first, stop) in ranges if first in asked}
