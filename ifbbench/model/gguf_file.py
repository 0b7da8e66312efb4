"""Models in GGUF files: shape, weights (dequantised when they are loaded) and tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The optional package `gguf` reads it.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ifbbench.errors import InputError
from ifbbench.model.config import DEFAULT_ROPE_THETA, LinearRopeScaling, ModelConfig, RopeFactors, RopeScaling

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from torch import Tensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
LAYERS = "model.layers."
# Names of tensors: Hugging Face's to GGUF's, without the layer's prefix and the suffix.
TENSORS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
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
        if self.architecture not in ARCHITECTURES:
            raise InputError(f"{path}: general.architecture is {self.architecture!r}; expected one of "
                             f"{', '.join(ARCHITECTURES)}. Choose another model.")

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata `key`. InputError if it is missing and there is no default."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise InputError(f"{self.path}: the metadata {key!r} is missing. Download or convert the file again.")
        return default

    def model_config(self) -> ModelConfig:
        """The model's shape."""
        hidden_size = self._of_model("embedding_length")
        num_heads = self._of_model("attention.head_count")
        head_dim = self._of_model("attention.key_length", hidden_size // num_heads)
        if (value_dim := self._of_model("attention.value_length", head_dim)) != head_dim:
            raise self._error("attention.value_length", value_dim, f"attention.key_length ({head_dim})")
        if (rotated := self._of_model("rope.dimension_count", head_dim)) != head_dim:
            raise self._error("rope.dimension_count", rotated, f"all of a head ({head_dim})")
        if experts := self._of_model("expert_count", 0):
            raise self._error("expert_count", experts, "a model without experts")
        return ModelConfig(
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden_size, num_layers=self._of_model("block_count"),
            num_heads=num_heads, num_kv_heads=self._of_model("attention.head_count_kv", num_heads), head_dim=head_dim,
            intermediate_size=self._of_model("feed_forward_length"),
            max_position_embeddings=self._of_model("context_length"),
            rms_norm_eps=self._of_model("attention.layer_norm_rms_epsilon"),
            rope_theta=self._of_model("rope.freq_base", DEFAULT_ROPE_THETA), rope_scaling=self._rope_scaling(),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            attention_output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_up.bias" in self._tensors,
            eos_token_ids=(self.value("tokenizer.ggml.eos_token_id"),),
            query_key_norm="blk.0.attn_q_norm.weight" in self._tensors,
        )

    def read(self, name: str) -> "tuple[Tensor, Path]":
        """The tensor with Hugging Face's name `name`, float32, and the file; rows of queries and keys in its order."""
        import torch
        from gguf import dequantize

        tensor = self._tensors.get(stored_name := _stored_name(name))
        if tensor is None:
            raise InputError(f"{self.path}: the tensor {stored_name!r} is missing. Download or convert the file again.")
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = self._in_halves(values, "head_count" if ".q_proj." in name else "head_count_kv")
        return values, self.path

    def tokenizer(self) -> "tuple[Tokenizer, tuple[int, ...]]":
        """Byte-level byte-pair encoding with the file's vocabulary and merges, and the tokens to put before a text."""
        from tokenizers import AddedToken, Tokenizer, decoders
        from tokenizers.models import BPE

        if (kind := self.value("tokenizer.ggml.model")) != "gpt2":
            raise InputError(f"{self.path}: tokenizer.ggml.model is {kind!r}; expected gpt2 (byte-pair encoding). "
                             "Choose a model of which you have the tokenizer.json.")
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = self._pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        types = self.value("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token, type in zip(tokens, types, strict=True)
                                      if type == CONTROL_TOKEN])
        adds_bos = self.value("tokenizer.ggml.add_bos_token", False)
        return tokenizer, (self.value("tokenizer.ggml.bos_token_id"),) if adds_bos else ()

    def _pre_tokenizer(self) -> "PreTokenizer":
        from tokenizers import Regex, pre_tokenizers

        rule = self.value("tokenizer.ggml.pre")
        if rule == SINGLE_DIGITS:
            split: PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
        elif rule in WORD_PATTERNS:
            split = pre_tokenizers.Split(Regex(WORD_PATTERNS[rule]), behavior="isolated")
        else:
            raise InputError(f"{self.path}: tokenizer.ggml.pre is {rule!r}; expected one of "
                             f"{', '.join([SINGLE_DIGITS, *WORD_PATTERNS])}. Choose another model.")
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == SINGLE_DIGITS)
        return pre_tokenizers.Sequence([split, bytes_of_words])

    def _in_halves(self, rows: "Tensor", count: str) -> "Tensor":
        """Rotary pairs moved from neighbouring rows, GGUF's order for Llama, to the two halves of a head."""
        heads = self._of_model(f"attention.{count}", self._of_model("attention.head_count"))
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _rope_scaling(self) -> RopeScaling | None:
        if ROPE_FACTORS in self._tensors:
            return RopeFactors(tuple(self._tensors[ROPE_FACTORS].data.tolist()))
        kind = self._of_model("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind != "linear":
            raise self._error("rope.scaling.type", kind, "none or linear")
        return LinearRopeScaling(self._of_model("rope.scaling.factor"))

    def _of_model(self, key: str, default: Any = None) -> Any:
        return self.value(f"{self.architecture}.{key}", default)

    def _error(self, key: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self.path}: {self.architecture}.{key} is {value!r}; expected {expected}. Choose another "
                          "model.")


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
        raise InputError(f"--model: to read {path.name}, the Python package gguf is needed. Run "
                         "`pip install ifbbench[gguf]`.") from error
    try:
        return GGUFReader(path)
    except FileNotFoundError as error:
        raise InputError(f"--model: there is no file {path}; check the path.") from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path}: cannot be read as GGUF ({error}). Download the file again.") from error
