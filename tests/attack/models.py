"""Tries of model files: config.json, engines, indices, safetensors and GGUF files with changed fields or bytes."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.attack import hostile
from tests.attack.commands import Outcomes, fresh
from tests.attack.inputs import SIMULATED, json_lines

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
ENGINE: dict[str, Any] = {
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 2048,
        "dtype": "float16",
        "hidden_act": "silu",
        "norm_epsilon": 1e-5,
        "mapping": {"tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    },
    "build_config": {
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "max_seq_len": 128,
        "max_input_len": 100,
        "max_beam_width": 1,
        "plugin_config": {"tokens_per_block": 16},
    },
}


@cache
def _weights() -> bytes:
    """model.safetensors of MODEL."""
    import torch
    from safetensors.torch import save

    tensors = {"model.embed_tokens.weight": torch.zeros(50, 16), "model.norm.weight": torch.ones(16)}
    for layer in range(2):
        shapes = {
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
        tensors |= {
            f"model.layers.{layer}.{name}.weight": torch.ones(16)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    return save(tensors)


@cache
def _gguf(folder: str) -> dict[str, Any]:
    """Metadata of a small GGUF file by key."""
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 24,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.key_length": 4,
        "llama.attention.value_length": 4,
        "llama.rope.dimension_count": 4,
        "llama.expert_count": 0,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|end|>", "h", "e", "l", "o", "he"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def _write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
        list: gguf.GGUFValueType.ARRAY,
    }
    for key, item in metadata.items():
        if item is None or key == "":
            continue
        kind = kinds.get(type(item), gguf.GGUFValueType.STRING)
        if type(item) is int and not 0 <= item < 2**32:
            kind = gguf.GGUFValueType.INT64 if -(2**63) <= item < 2**63 else gguf.GGUFValueType.STRING
        if kind is gguf.GGUFValueType.STRING:
            item = str(item).encode("utf-8", "replace").decode()
        elif kind is gguf.GGUFValueType.ARRAY and (
            not item
            or len({type(one) for one in item}) > 1
            or type(item[0]) not in (int, float, str)
            or any(type(one) is int and not -(2**31) <= one < 2**31 for one in item)
        ):
            item = [1, 2]
        elif kind is gguf.GGUFValueType.ARRAY and type(item[0]) is str:
            item = [one.encode("utf-8", "replace").decode() for one in item]
        elif kind is gguf.GGUFValueType.FLOAT32 and abs(item) > 3e38:
            kind = gguf.GGUFValueType.FLOAT64
        writer.add_key_value(key.encode("utf-8", "replace").decode(), item, kind)
    shapes = {"token_embd": (50, 16), "output_norm": (16,)}
    for layer in range(2):
        names = {
            "attn_q": (16, 16),
            "attn_k": (8, 16),
            "attn_v": (8, 16),
            "attn_output": (16, 16),
            "ffn_gate": (24, 16),
            "ffn_up": (24, 16),
            "ffn_down": (16, 24),
            "attn_norm": (16,),
            "ffn_norm": (16,),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in names.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """config.json, an index, safetensors and GGUF files with changed fields or bytes."""
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines([{"arrival_s": 0, "prompt_tokens": [3, 4, 5], "output_len": 2}]))
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for old in model.iterdir():
        old.unlink()
    kind, changes = draw.random(), draw.choice((1, 1, 2))
    config: Any = ENGINE if kind < 0.12 else MODEL
    device, note, target = draw.choice(("sim:h100-sxm", "cpu", "cpu")), "", model
    if kind < 0.4:
        for _ in range(changes):
            config = hostile.changed(config, draw)
        note = json.dumps(config)[:600]
        if draw.random() < 0.1:
            config, note = {}, "changed bytes"
            (model / "config.json").write_bytes(hostile.changed_bytes(json.dumps(MODEL).encode(), draw))
    if not (model / "config.json").exists():
        (model / "config.json").write_bytes(json.dumps(config).encode("utf-8", "surrogatepass"))
    if 0.4 <= kind < 0.5:
        index: Any = {
            "metadata": {},
            "weight_map": {"model.embed_tokens.weight": "model.safetensors", "model.norm.weight": "model.safetensors"},
        }
        index = hostile.changed(index, draw)
        (model / "model.safetensors.index.json").write_bytes(json.dumps(index).encode("utf-8", "surrogatepass"))
        (model / "model.safetensors").write_bytes(_weights())
        device, note = "cpu", json.dumps(index)[:600]
    elif kind < 0.7:
        content = _weights()
        if kind > 0.5:
            device = "cpu"
            size = int.from_bytes(content[:8], "little")
            if draw.random() < 0.7:
                header = json.dumps(hostile.changed(json.loads(content[8 : 8 + size]), draw)).encode(
                    "utf-8", "surrogatepass"
                )
                content = len(header).to_bytes(8, "little") + header + content[8 + size :]
            else:
                content = hostile.changed_bytes(content, draw)
        (model / "model.safetensors").write_bytes(content)
    elif kind >= 0.7:
        metadata = dict(_gguf(""))
        for _ in range(changes):
            metadata = hostile.changed(metadata, draw)
            metadata = metadata if isinstance(metadata, dict) else dict(_gguf(""))
        target = folder / "model.gguf"
        target.unlink(missing_ok=True)
        _write_gguf(target, metadata)
        note = str({key: item for key, item in metadata.items() if _gguf("").get(key) != item})[:600]
        if draw.random() < 0.2:
            target.write_bytes(hostile.changed_bytes(target.read_bytes(), draw))
            note += " changed bytes"
    arguments = [
        "run",
        str(trace),
        "--model",
        str(target),
        "--device",
        device,
        "--quiet",
        "--output",
        str(fresh(folder, "run")),
    ]
    if device == "cpu":
        arguments += ["--max_batch_size", "2", "--max_tokens_in_paged_kvcache", "64"]
    if kind < 0.12:
        arguments = ["run", str(trace), "--engine_dir", str(model), *SIMULATED, "--output", str(fresh(folder, "run"))]
    elif draw.random() < 0.15:
        arguments = ["capacity", str(target), "--device", "sim:h100-sxm"]
    elif target.suffix == ".gguf" and draw.random() < 0.3:
        arguments = ["generate", "--model", str(target), "--device", "cpu", "hello"]
    outcomes.attack(arguments, note)
