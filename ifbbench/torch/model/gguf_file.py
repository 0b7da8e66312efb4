"""Models in GGUF files: shape, weights (dequantised when they are loaded) and tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The optional package `gguf` reads it.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ifbbench.errors import InputError
from ifbbench.models.config import (
    DEFAULT_ROPE_THETA,
    MAX_LAYERS,
    MAX_SIZE,
    LinearRopeScaling,
    ModelConfig,
    RopeFactors,
    RopeScaling,
)
from ifbbench.settings.fields import boolean, integer, located, number, text, unexpected

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from torch import Tensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
AGAIN = "Download or convert the file again."
T = TypeVar("T")
ROPE_FACTORS = "rope_freqs.weight"
LAYERS = "model.layers."
# Names of tensors: Hugging Face's to GGUF's, without the layer's prefix and the suffix.
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# `tokenizer.ggml.token_type` of special tokens such as `<|endoftext|>`.
CONTROL_TOKEN = 3
# The pattern that splits text into words before pairs are merged, by `tokenizer.ggml.pre`. From the tokenizer.json of
# these models.
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = {"llama-bpe": rf"{_WORD}|\p{{N}}{{1,3}}|{_OTHER}", "qwen2": rf"{_WORD}|\p{{N}}|{_OTHER}"}
SINGLE_DIGITS = "smollm"


class GgufFile:
    """Metadata and tensors of one file. InputError if it is missing, broken or of an unsupported architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.value("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            raise InputError(
                f"{path}: general.architecture is {self.architecture!r}; expected one of "
                f"{', '.join(ARCHITECTURES)}. Choose another model."
            )

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata `key`. InputError if it is missing and there is no default."""
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise InputError(f"{self.path}: the metadata {key!r} is missing. {AGAIN}")
            return default
        try:
            return field.contents()
        except (ValueError, IndexError, KeyError) as error:
            raise InputError(f"{self.path}: the metadata {key!r} cannot be read ({error}). {AGAIN}") from error

    def model_config(self) -> ModelConfig:
        """The model's shape."""
        with located(str(self.path), "Choose another model."):
            hidden_size, num_heads = self._integer("embedding_length"), self._integer("attention.head_count")
            head_dim = self._integer("attention.key_length", hidden_size // num_heads)
            for key, allowed, expected in (
                ("attention.value_length", head_dim, f"attention.key_length ({head_dim})"),
                ("rope.dimension_count", head_dim, f"all of a head ({head_dim})"),
                ("expert_count", 0, "a model without experts"),
            ):
                if (given := self._of_model(key, allowed)) != allowed:
                    raise unexpected(f"{self.architecture}.{key}", given, expected)
            if head_dim < 1 or head_dim % 2:
                raise unexpected(
                    f"{self.architecture}.attention.key_length",
                    head_dim,
                    "an even number of at least 2, because rotary embedding rotates pairs",
                )
            num_kv_heads = self._integer("attention.head_count_kv", num_heads)
            if num_heads % num_kv_heads:
                raise unexpected(
                    f"{self.architecture}.attention.head_count_kv",
                    num_kv_heads,
                    f"a divisor of attention.head_count ({num_heads})",
                )
            return ModelConfig(
                vocab_size=self._vocab_size(),
                hidden_size=hidden_size,
                num_layers=self._integer("block_count", maximum=MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                intermediate_size=self._integer("feed_forward_length"),
                max_position_embeddings=self._integer("context_length"),
                rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
                rope_theta=self._number("rope.freq_base", DEFAULT_ROPE_THETA),
                rope_scaling=self._rope_scaling(),
                tie_word_embeddings="output.weight" not in self._tensors,
                attention_bias="blk.0.attn_q.bias" in self._tensors,
                attention_output_bias="blk.0.attn_output.bias" in self._tensors,
                mlp_bias="blk.0.ffn_up.bias" in self._tensors,
                eos_token_ids=(self._token("eos_token_id"),),
                query_key_norm="blk.0.attn_q_norm.weight" in self._tensors,
            )

    def read(self, name: str) -> "tuple[Tensor, Path]":
        """The tensor with Hugging Face's name `name`, float32, and the file; rows of queries and keys in its order."""
        import torch
        from gguf import dequantize

        tensor = self._tensors.get(stored_name := _stored_name(name))
        if tensor is None:
            raise InputError(f"{self.path}: the tensor {stored_name!r} is missing. {AGAIN}")
        try:
            values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        except (ValueError, NotImplementedError) as error:
            raise InputError(f"{self.path}: the tensor {stored_name!r} cannot be read ({error}). {AGAIN}") from error
        if self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = self._in_halves(values, "head_count" if ".q_proj." in name else "head_count_kv")
        return values, self.path

    def tokenizer(self) -> "tuple[Tokenizer, tuple[int, ...]]":
        """Byte-level byte-pair encoding with the file's vocabulary and merges, and the tokens to put before a text."""
        from tokenizers import AddedToken, Tokenizer, decoders
        from tokenizers.models import BPE

        if (kind := self.value("tokenizer.ggml.model")) != "gpt2":
            raise InputError(
                f"{self.path}: tokenizer.ggml.model is {kind!r}; expected gpt2 (byte-pair encoding). "
                "Choose a model of which you have the tokenizer.json."
            )
        with located(str(self.path), AGAIN):
            tokens = self._listed("tokens", text)
            pairs = (merge.partition(" ") for merge in self._listed("merges", text))
            merges = [(left, right) for left, _, right in pairs]
            types = self._listed("token_type", integer)
            if len(types) != len(tokens):
                raise unexpected(
                    "tokenizer.ggml.token_type", f"{len(types)} types", f"one for each of {len(tokens)} tokens"
                )
            adds_bos = boolean(self.value("tokenizer.ggml.add_bos_token", False), "tokenizer.ggml.add_bos_token")
            first = (self._token("bos_token_id"),) if adds_bos else ()
        tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = self._pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True)
                for token, type in zip(tokens, types, strict=True)
                if type == CONTROL_TOKEN
            ]
        )
        return tokenizer, first

    def _pre_tokenizer(self) -> "PreTokenizer":
        from tokenizers import Regex, pre_tokenizers

        rule = self.value("tokenizer.ggml.pre")
        if rule == SINGLE_DIGITS:
            split: PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
        elif isinstance(rule, str) and rule in WORD_PATTERNS:
            split = pre_tokenizers.Split(Regex(WORD_PATTERNS[rule]), behavior="isolated")
        else:
            raise InputError(
                f"{self.path}: tokenizer.ggml.pre is {rule!r}; expected one of "
                f"{', '.join([SINGLE_DIGITS, *WORD_PATTERNS])}. Choose another model."
            )
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == SINGLE_DIGITS)
        return pre_tokenizers.Sequence([split, bytes_of_words])

    def _in_halves(self, rows: "Tensor", count: str) -> "Tensor":
        """Rotary pairs moved from neighbouring rows, GGUF's order for Llama, to the two halves of a head."""
        heads = self._integer(f"attention.{count}", self._of_model("attention.head_count"))
        if rows.shape[0] % (2 * heads):
            raise InputError(f"{self.path}: {rows.shape[0]} rows are not those of {heads} heads of even size. {AGAIN}")
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _rope_scaling(self) -> RopeScaling | None:
        if ROPE_FACTORS in self._tensors:
            return RopeFactors(tuple(self._tensors[ROPE_FACTORS].data.tolist()))
        kind = self._of_model("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind != "linear":
            raise unexpected(f"{self.architecture}.rope.scaling.type", kind, "none or linear")
        return LinearRopeScaling(self._number("rope.scaling.factor"))

    def _of_model(self, key: str, default: Any = None) -> Any:
        return self.value(f"{self.architecture}.{key}", default)

    def _integer(self, key: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        return integer(self._of_model(key, default), f"{self.architecture}.{key}", 1, maximum, guards=True)

    def _number(self, key: str, default: float | None = None) -> float:
        return number(self._of_model(key, default), f"{self.architecture}.{key}", above=0.0)

    def _token(self, key: str) -> int:
        return integer(self.value(f"tokenizer.ggml.{key}"), f"tokenizer.ggml.{key}", 0, MAX_SIZE, guards=True)

    def _listed(self, key: str, check: Callable[[Any, str], T]) -> list[T]:
        """The list `key` of the tokenizer, each entry checked."""
        values = self.value(f"tokenizer.ggml.{key}")
        if not isinstance(values, list):
            raise unexpected(f"tokenizer.ggml.{key}", values, "a list")
        return [check(value, f"tokenizer.ggml.{key}[{index}]") for index, value in enumerate(values)]

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise InputError("the tensor 'token_embd.weight' is not a matrix.")
        return integer(int(embedding.shape[1]), "rows of 'token_embd.weight'", 1, MAX_SIZE, guards=True)


def _stored_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith(LAYERS):
        return f"{TENSORS[stem]}.{kind}"
    index, _, part = stem.removeprefix(LAYERS).partition(".")
    return f"blk.{index}.{TENSORS[part]}.{kind}"


@lru_cache(1)  # Shape, weights and tokenizer are read from the same file; opening it takes a second or two.
def _reader(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(
            f"--model: to read {path.name}, the Python package gguf is needed. Run `pip install ifbbench[gguf]`."
        ) from error
    try:
        return GGUFReader(path)
    except FileNotFoundError as error:
        raise InputError(f"--model: there is no file {path}; check the path.") from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path}: cannot be read as GGUF ({error}). Download the file again.") from error
