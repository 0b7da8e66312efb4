"""The work of one iteration in the few sums that its time depends on, the cost of an operation, and the least that any
device must do for it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.batch import Batch
from ifbbench.models.layers import Mlp
from ifbbench.simulated.shard import Shard


@dataclass(slots=True)  # not frozen, which makes it take ten times as long to create; a cost model makes many
class OperationCost:
    """The cost of one operation in an iteration, on each device, summed over all layers. It does not change.

    flops: number of additions and multiplications.
    bytes: bytes moved through memory, or the network for all-reduces and pipeline transfers.
    limit: what takes most of the seconds: compute, memory, network, latency or launch.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    limit: str


class StepWork(NamedTuple):
    """The work of one batch, summed over its requests. Its cost is linear or constant in each of these sums.

    context_tokens, context_requests: tokens and requests of all context chunks.
    attention_pairs: query-key pairs of context attention. A chunk of n tokens that starts at position s has
        n·s + n·(n + 1) / 2 of them: every token attends to all tokens before it and to itself.
    context_kv_tokens: keys that the chunks read, the sum of start plus length.
    generation_tokens: generation requests times their beams, and draft tokens.
    generation_kv_tokens: keys that these read, new tokens included.
    outputs: rows that need logits: generation tokens, and one for each chunk that ends its prompt.
    """

    context_tokens: int = 0
    context_requests: int = 0
    attention_pairs: int = 0
    context_kv_tokens: int = 0
    generation_tokens: int = 0
    generation_kv_tokens: int = 0
    outputs: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the layers."""
        return self.context_tokens + self.generation_tokens

    @classmethod
    def of_lengths(
        cls, context: Iterable[tuple[int, int, bool]] = (), kv_lengths: Iterable[int] = (), window: int | None = None
    ) -> "StepWork":
        """The work of chunks and generation requests given by their lengths in tokens.

        context: start, length and whether it is the last of its prompt, for each chunk.
        kv_lengths: KV length of each generation request, its new token included.
        window: the attention window; None if a query attends to all tokens.
        """
        lengths = [length if window is None else min(length, window) for length in kv_lengths]
        return cls.of_sums(context, len(lengths), sum(lengths), window)

    @classmethod
    def of_batch(cls, batch: Batch, window: int | None = None) -> "StepWork":
        """The work of `batch` in a layer with this attention window. Padded prompts are as long as the longest."""
        chunks = [(chunk.start, chunk.length, chunk.is_last) for chunk in batch.context]
        if batch.padded and chunks:
            longest = max(length for _, length, _ in chunks)
            chunks = [(start, longest, is_last) for start, _, is_last in chunks]
        cached = batch.positions if window is None else np.minimum(batch.positions, window - 1)
        tokens = len(batch.slots) * batch.beam_width
        if batch.drafts is not None:  # each one is a token whose key is read, and has logits
            tokens += len(batch.drafts.tokens)
        kv_tokens = int(np.add.reduce(cached, dtype=np.int64)) * batch.beam_width + tokens
        return cls.of_sums(chunks, tokens, kv_tokens, window)

    @classmethod
    def of_windows(cls, batch: Batch, windows: Sequence[tuple[int | None, float]]) -> "StepWork":
        """The work of `batch` in a mean layer. windows: attention windows and the share of the layers with each."""
        if len(windows) == 1:
            return cls.of_batch(batch, windows[0][0])
        return cls.mean([(cls.of_batch(batch, window), share) for window, share in windows])

    @classmethod
    def mean(cls, works: Sequence[tuple["StepWork", float]]) -> "StepWork":
        """The work in a mean layer, from the work in each kind of layer and its share of the layers (0 to 1).

        The kinds differ in their attention only."""
        first = works[0][0]
        if len(works) == 1:
            return first
        return first._replace(
            attention_pairs=round(sum([work.attention_pairs * share for work, share in works])),
            context_kv_tokens=round(sum([work.context_kv_tokens * share for work, share in works])),
            generation_kv_tokens=round(sum([work.generation_kv_tokens * share for work, share in works])),
        )

    @classmethod
    def of_sums(
        cls,
        chunks: Iterable[tuple[int, int, bool]],
        generation_tokens: int,
        generation_kv_tokens: int,
        window: int | None,
    ) -> "StepWork":
        """The work of chunks, and of generation given by its sums. chunks: as in `of_lengths`."""
        tokens = count = pairs = kv_tokens = num_last = 0
        for start, length, is_last in chunks:
            tokens += length
            count += 1
            num_last += is_last
            if window is None:
                pairs += length * start + length * (length + 1) // 2
                kv_tokens += start + length
            else:
                # Queries before position `window` attend to all keys, the others to `window` keys each.
                growing = min(max(window - start, 0), length)
                pairs += growing * start + growing * (growing + 1) // 2 + (length - growing) * window
                kv_tokens += min(start, window - 1) + length
        return cls(
            tokens, count, pairs, kv_tokens, generation_tokens, generation_kv_tokens, generation_tokens + num_last
        )


class WorkDone:
    """The work of all iterations of a run so far, in the sums that its energy depends on.

    iterations_by_tokens, iterations_by_outputs: how many iterations had so many tokens, and rows with logits. The
    others: see StepWork."""

    def __init__(self) -> None:
        self.iterations_by_tokens: dict[int, int] = {}
        self.iterations_by_outputs: dict[int, int] = {}
        self.attention_pairs = self.context_kv_tokens = self.generation_kv_tokens = 0

    def copy(self) -> "WorkDone":
        """The same sums, which do not change with these."""
        other = WorkDone()
        other.iterations_by_tokens = dict(self.iterations_by_tokens)
        other.iterations_by_outputs = dict(self.iterations_by_outputs)
        other.attention_pairs, other.context_kv_tokens = self.attention_pairs, self.context_kv_tokens
        other.generation_kv_tokens = self.generation_kv_tokens
        return other

    def add(self, work: StepWork) -> None:
        """Take in one iteration."""
        self.add_iterations(work.context_tokens + work.generation_tokens, work.outputs, 1)
        self.attention_pairs += work.attention_pairs
        self.context_kv_tokens += work.context_kv_tokens
        self.generation_kv_tokens += work.generation_kv_tokens

    def add_iterations(self, tokens: int, outputs: int, count: int) -> None:
        """Take in `count` iterations but for their attention."""
        self.iterations_by_tokens[tokens] = self.iterations_by_tokens.get(tokens, 0) + count
        self.iterations_by_outputs[outputs] = self.iterations_by_outputs.get(outputs, 0) + count


def mtp_passes(batch: Batch, draft_len: int) -> Iterator[StepWork]:
    """The work of a layer for multi-token prediction beside `batch`, pass by pass: prompts, and the tokens that each
    generation request had verified, which is always a full step; then one draft token of each request after the
    other."""
    requests = len(batch.slots)
    first = StepWork.of_batch(batch._replace(drafts=None))
    yield first._replace(generation_tokens=(draft_len + 1) * requests, outputs=first.outputs)
    keys = int(np.add.reduce(batch.positions, dtype=np.int64))
    for step in range(1, draft_len if requests else 1):
        yield StepWork(generation_tokens=requests, generation_kv_tokens=keys + requests * (step + 1), outputs=requests)


def draft_passes(batch: Batch) -> Iterator[StepWork]:
    """The work of a draft model before `batch`, pass by pass: prompts and the two newest tokens of each generation
    request, then one draft after the other of the requests that have so many."""
    requests = len(batch.slots)
    first = StepWork.of_batch(batch._replace(drafts=None))
    yield first._replace(generation_tokens=2 * requests, outputs=requests)
    if batch.drafts is None or not requests:
        return
    counts = batch.drafts.counts[-requests:]
    for step in range(1, int(counts.max())):
        keys = batch.positions[counts > step].astype(np.int64) + step + 1
        yield StepWork(generation_tokens=len(keys), generation_kv_tokens=int(keys.sum()), outputs=len(keys))


class StepWorks(NamedTuple):
    """The work of many iterations: the fields of StepWork, [iterations] each."""

    context_tokens: NDArray[np.int64]
    context_requests: NDArray[np.int64]
    attention_pairs: NDArray[np.int64]
    context_kv_tokens: NDArray[np.int64]
    generation_tokens: NDArray[np.int64]
    generation_kv_tokens: NDArray[np.int64]
    outputs: NDArray[np.int64]


class LeastWork(NamedTuple):
    """The least that a device must do for a batch: FLOPs, and bytes moved through memory."""

    flops: float
    bytes: float


def least_work(shard: Shard, work: StepWork) -> LeastWork:
    """The least work of a batch, however it is computed.

    FLOPs: two for each weight and token, and four for each value of a query and key that it attends to. Bytes: each
    weight once (embeddings not at all), keys and values read, and those written. Activations are not counted, because
    they may stay in a cache.
    """
    if not work.num_tokens:
        return LeastWork(0.0, 0.0)
    model, per_pair = shard.model, 4.0 * shard.query_size
    if model.latent is not None:
        per_pair = 2.0 * shard.heads * (model.latent.nope + model.latent.rope + model.latent.value)
    weights = used = 0.0
    for kind, count in model.kinds.items():
        mixer = shard.mixer_weights(kind.mixer)
        used += count * mixer
        weights += count * mixer * shard.weight_bytes_of(kind.mixer)
        if kind.mlp is Mlp.DENSE:
            used += count * shard.mlp_weights
            weights += count * shard.mlp_weights * shard.weight_bytes_of(kind.mlp)
        elif kind.mlp is Mlp.EXPERTS:
            others = shard.shared_expert_weights + shard.router_weights
            used += count * (others + model.experts_per_token / shard.ep_size * shard.expert_weights)
            read = shard.experts.hit(work.num_tokens) if shard.ep_size == 1 else 0.0
            weights += count * (others + read * shard.expert_weights) * shard.weight_bytes_of(kind.mlp)
    output_layer = model.hidden_size * shard.vocab_size
    attention_layers = len(model.attention_layers)
    pairs = work.attention_pairs + work.generation_kv_tokens
    flops = 2.0 * (work.num_tokens * used + work.outputs * output_layer) + attention_layers * per_pair * pairs
    keys = work.context_kv_tokens + work.generation_kv_tokens + work.num_tokens
    moved = weights + keys * attention_layers * shard.kv_bytes_per_token_and_layer
    return LeastWork(flops, moved + (output_layer * shard.compute_bytes if work.outputs else 0.0))
