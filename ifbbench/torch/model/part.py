"""The part of a model that one rank computes: a share of the heads, of the MLP and of the vocabulary (tensor
parallelism; Shoeybi et al., Megatron-LM, arXiv:1909.08053) of the layers of one stage (pipeline parallelism)."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from ifbbench.kv.attention_window import ceil_div
from ifbbench.models.config import ModelConfig, check_ranks

ALL = slice(None)


class Links(Protocol):
    """What the ranks exchange while they compute. A call returns at once on a GPU, where it is queued."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks that share each layer; may be stored in `partial`."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """The parts [rows, size] of the ranks that share each layer side by side, [rows, ranks · size]."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Send the hidden state to the next stage."""
        ...

    def receive(self, hidden: Tensor) -> None:
        """Fill `hidden` with the hidden state of the stage before."""
        ...

    def send_outputs(self, outputs: bytes) -> None:
        """Send the outputs of a batch from the last stage to all others."""
        ...

    def receive_outputs(self) -> bytes:
        """Wait for the next outputs of the last stage."""
        ...


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Rank `tp_rank` of the `tp_size` that share each layer of `stage`, of `pp_size` stages.

    model: the shape of the whole model.
    ep_size: parts of the ranks with whole experts.

    InputError if it cannot be split so.
    """

    model: ModelConfig
    links: Links
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    stage: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        check_ranks(self.model, self.tp_size, self.pp_size, self.ep_size)

    @property
    def config(self) -> ModelConfig:
        """The shape of the part. Its vocabulary is the whole one, because each rank has all logits."""
        model, layers = self.model, self.layers
        return replace(
            model,
            num_layers=len(layers),
            num_heads=model.num_heads // self.tp_size,
            num_kv_heads=self._num_kv_heads,
            intermediate_size=model.intermediate_size // self.tp_size,
            layers=model.layers[layers.start : layers.stop],
        )

    @property
    def is_first(self) -> bool:
        """Whether the part has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the part has the output layer."""
        return self.stage == self.pp_size - 1

    @property
    def layers(self) -> range:
        """Layers of the stage; the numbers of two stages differ by one at most."""
        first, end = (stage * self.model.num_layers // self.pp_size for stage in (self.stage, self.stage + 1))
        return range(first, end)

    @property
    def queries(self) -> slice:
        """The values of a token's queries."""
        return self._share(self.model.query_size)

    @property
    def keys(self) -> slice:
        """The values of a token's keys, and of its values. Ranks have the same head where there are fewer heads."""
        first = self.tp_rank * self.model.num_kv_heads // self.tp_size
        return slice(first * self.model.head_dim, (first + self._num_kv_heads) * self.model.head_dim)

    @property
    def mlp(self) -> slice:
        """The values between the two products of the MLP."""
        return self._share(self.model.intermediate_size)

    @property
    def vocabulary(self) -> slice:
        """The token ids; the last ranks have fewer, or none."""
        size = self.vocabulary_size
        return slice(*(min(number * size, self.model.vocab_size) for number in (self.tp_rank, self.tp_rank + 1)))

    @property
    def vocabulary_size(self) -> int:
        """Token ids of a rank, padding included."""
        return ceil_div(self.model.vocab_size, self.tp_size)

    def embedded(self, embedding: Tensor, tokens: Tensor) -> Tensor:
        """Input of the part's first layer, [tokens, hidden].

        embedding: [own vocabulary, hidden]; of stages after the first its data type and device matter only."""
        if not self.is_first:
            hidden = embedding.new_empty((len(tokens), self.model.hidden_size))
            self.links.receive(hidden)
            return hidden
        if self.tp_size == 1:
            return embedding.index_select(0, tokens)
        own = tokens - self.tp_rank * self.vocabulary_size
        is_other = (own < 0) | (own >= self.vocabulary_size)
        rows = embedding.index_select(0, own.masked_fill(is_other, 0))
        return self.links.sum(rows.masked_fill_(is_other.unsqueeze(1), 0.0))

    def padded_vocabulary(self, weight: Tensor) -> Tensor:
        """`weight` [own vocabulary, hidden] with rows of zeros, so that all ranks have as many."""
        return functional.pad(weight, (0, 0, 0, self.vocabulary_size - len(weight)))

    def all_logits(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary from those of each rank, [rows, vocabulary]."""
        return logits if self.tp_size == 1 else self.links.gather(logits)[:, : self.model.vocab_size]

    @property
    def _num_kv_heads(self) -> int:
        return max(1, self.model.num_kv_heads // self.tp_size)

    def _share(self, size: int) -> slice:
        size //= self.tp_size
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)
