"""The parts of decoder layers that differ from Llama's: latent attention, recurrent layers, and experts."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# Tokens that the kernels of recurrent layers compute together in the context phase.
SCAN_CHUNK = 64


class Mixer(StrEnum):
    """What mixes the tokens of a sequence in a layer."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NONE = "none"


class Mlp(StrEnum):
    """What computes on each token of a layer by itself. SHARED: the part of EXPERTS that every token passes."""

    DENSE = "dense"
    EXPERTS = "experts"
    SHARED = "shared experts"
    NONE = "none"


class LayerKind(NamedTuple):
    mixer: Mixer = Mixer.ATTENTION
    mlp: Mlp = Mlp.DENSE


@dataclass(frozen=True, slots=True)
class Routing:
    """How DeepSeek-V3 chooses experts (arXiv:2412.19437, section 2.1.2).

    groups: number of groups of experts.
    groups_per_token: number of groups that the experts of a token are in.
    normalises: whether the weights of a token's experts are divided by their sum.
    scale: factor of the weights.
    """

    groups: int
    groups_per_token: int
    normalises: bool
    scale: float


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); sizes in elements.

    query_rank: size of the compressed query, 0 if queries are not compressed.
    kv_rank: size of the latent vector, from which the keys and values of all heads follow.
    nope, rope: sizes of a head's query and key without and with rotary embedding; the latter part of the key is the
        same for all heads.
    value: size of a head's value.

    The cache has the latent vector and the rotated key of each token. Expanded form: keys and values of all heads are
    computed from it. Absorbed form: queries and outputs are multiplied by these matrices instead, so that all heads
    attend to the latent vector itself.
    """

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def cached(self) -> int:
        """Values of one token in the cache of a layer."""
        return self.kv_rank + self.rope

    def matrices(self, hidden: int, heads: int) -> int:
        """Weights in the matrices of a layer whose attention has so many heads."""
        queries = heads * (self.nope + self.rope)
        of_query = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        return of_query + hidden * self.cached + heads * (self.kv_rank * (self.nope + self.value) + self.value * hidden)

    @property
    def vectors(self) -> int:
        """Weights of the norms of compressed queries and latent vectors in a layer."""
        return self.query_rank + self.kv_rank


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer that keeps a state of fixed size for each sequence (Mamba, gated delta net); sizes in elements.

    projected: outputs of the products with the hidden state.
    inner: inputs of the output product.
    between: inputs and outputs of the products between them.
    conv_channels, conv_width: sizes of the short convolution.
    state: number of values of the state.
    key_value: size of the keys and values of a token, all heads together.
    vectors: number of weights that are in no matrix.
    num_heads: number of heads, which tensor parallelism divides.
    state_bytes: bytes of one value of the state.
    """

    projected: int
    inner: int
    between: tuple[tuple[int, int], ...]
    conv_channels: int
    conv_width: int
    state: int
    key_value: int
    vectors: int
    num_heads: int
    state_bytes: int = 4

    def matrices(self, hidden: int) -> int:
        """Weights in the matrices of a layer."""
        return hidden * (self.projected + self.inner) + sum(inputs * outputs for inputs, outputs in self.between)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the state in the context phase: it is updated and read, and the tokens of a chunk see each other."""
        return 4.0 * self.state + 2.0 * SCAN_CHUNK * self.key_value

    def bytes_per_request(self, value_bytes: float) -> float:
        """Bytes of state and inputs that the convolution keeps, in one layer. value_bytes: of an activation."""
        return self.state * self.state_bytes + self.conv_channels * (self.conv_width - 1) * value_bytes


def gated_delta_net(key_heads: int, value_heads: int, key_size: int, value_size: int, conv_width: int) -> Recurrent:
    """A layer of Qwen3-Next (`Qwen3NextGatedDeltaNet` of transformers)."""
    keys, values = key_heads * key_size, value_heads * value_size
    channels = 2 * keys + values
    return Recurrent(
        projected=channels + values + 2 * value_heads,
        inner=values,
        between=(),
        conv_channels=channels,
        conv_width=conv_width,
        state=value_heads * key_size * value_size,
        key_value=2 * keys + values,
        vectors=channels * conv_width + 2 * value_heads + value_size,
        num_heads=key_heads,
    )


def mamba(inner: int, state_size: int, conv_width: int, step_rank: int, conv_bias: bool, bias: bool) -> Recurrent:
    """A layer of Jamba: Mamba (arXiv:2312.00752) with norms of step, B and C (`JambaMambaMixer` of transformers).

    bias: not counted for the hidden state's products, because the size of that is not known here."""
    selected = step_rank + 2 * state_size
    return Recurrent(
        projected=2 * inner,
        inner=inner,
        between=((inner, selected), (step_rank, inner)),
        conv_channels=inner,
        conv_width=conv_width,
        state=inner * state_size,
        key_value=2 * inner,
        vectors=inner * (conv_width + conv_bias + state_size + 2) + selected + 2 * inner * bias,
        num_heads=inner,
    )


def mamba_2(
    heads: int, head_size: int, groups: int, state_size: int, conv_width: int, conv_bias: bool, state_bytes: int
) -> Recurrent:
    """A layer of Nemotron-H: Mamba-2 (arXiv:2405.21060; `NemotronHMamba2Mixer` of transformers)."""
    inner = heads * head_size
    channels = inner + 2 * groups * state_size
    return Recurrent(
        projected=inner + channels + heads,
        inner=inner,
        between=(),
        conv_channels=channels,
        conv_width=conv_width,
        state=inner * state_size,
        key_value=channels,
        vectors=channels * (conv_width + conv_bias) + 3 * heads + inner,
        num_heads=groups,
        state_bytes=state_bytes,
    )
