"""Small GGUF files, written with the package `gguf`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.torch.model.gguf_file import _stored_name


def write_gguf(path: Path, reference: Any, architecture: str, **changes: object) -> None:
    """The Llama-like model `reference` of transformers as a GGUF file. changes: metadata to replace."""
    _write(path, reference, architecture, changes, "F32", _add_tokenizer)


def write_gguf_without_texts(path: Path, reference: Any, kind: str) -> None:
    """The Llama model `reference` of transformers as a GGUF file without a tokenizer. kind: GGUF's type of
    its matrices; norms are float32."""
    changes = {"vocab_size": reference.config.vocab_size}
    _write(path, reference, "llama", changes, kind, lambda writer: writer.add_tokenizer_model("no_vocab"))


def _write(
    path: Path,
    reference: Any,
    architecture: str,
    changes: Mapping[str, object],
    kind: str,
    add_tokenizer: Callable[[Any], None],
) -> None:
    gguf = pytest.importorskip("gguf")
    config, kinds = reference.config, gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10_000.0,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    for key, value in {**metadata, **changes}.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    add_tokenizer(writer)
    for name, tensor in reference.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            values = _permuted(name, tensor, config) if architecture == "llama" else tensor
            stored_kind = kinds[kind] if values.ndim == 2 else kinds.F32
            stored = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), stored_kind)
            writer.add_tensor(_stored_name(name), stored, raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows in the order of llama.cpp, where the values of a rotary pair are neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add_tokenizer(writer: Any) -> None:
    """All letters, one merge and an end token."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = ["<|end|>", *letters, "\u0120", "he", "\u0120he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["h e", "\u0120 he"])
    writer.add_eos_token_id(0)
