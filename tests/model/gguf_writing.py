"""Small GGUF files, written with the package `gguf`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.model.gguf_file import _stored_name


def write_gguf(path: Path, reference: Any, architecture: str, **changes: object) -> None:
    """The Llama-like model `reference` of transformers as a GGUF file. changes: metadata to replace."""
    gguf = pytest.importorskip("gguf")
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, object] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": 10_000.0,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
    }  # fmt: skip
    for key, value in (metadata | changes).items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    _add_tokenizer(writer, gguf)
    for name, tensor in reference.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            values = _permuted(name, tensor, config) if architecture == "llama" else tensor
            writer.add_tensor(_stored_name(name), np.ascontiguousarray(values.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows as llama.cpp has them: the values that are turned together are neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add_tokenizer(writer: Any, gguf: Any) -> None:
    """All letters, one merge and an end token."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = ["<|end|>", *letters, "\u0120", "he", "\u0120he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["h e", "\u0120 he"])
    writer.add_eos_token_id(0)
