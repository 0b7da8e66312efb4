"""Small random checkpoints, as this project's model and as transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ifbbench.models.named_models import load_model_config
from ifbbench.torch.model.operations import Operations, operations_for
from ifbbench.torch.model.weights import load_weights
from tests.torch.driving import CPU, RecordingGpt2, RecordingModel

# transformers' LlamaForCausalLM: called, it gives an object with `logits`; it also has `generate`.
Reference = Any


SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.15,
}


def checkpoint(directory: Path, **changes: object) -> tuple[RecordingModel, Reference]:
    """A random small checkpoint as our model and as transformers' own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    fields = SHAPE | changes
    shard_size = fields.pop("max_shard_size", "5GB")
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).float().eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return _saved(directory, reference, shard_size), reference


def mistral_checkpoint(directory: Path, sliding_window: int) -> tuple[RecordingModel, Reference]:
    """The same with Mistral's sliding window."""
    return family_checkpoint(directory, "Mistral", sliding_window=sliding_window)


def family_checkpoint(
    directory: Path, family: str, dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[RecordingModel, Reference]:
    """A random small checkpoint of a family as our model, in `dtype` with the fastest operations that there are, and as
    transformers' own, in float32.

    family: the name of its classes in transformers (`Qwen3` of Qwen3Config and Qwen3ForCausalLM). All weights are such
    that `dtype` holds them exactly; norms and biases are random too.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    fields = (GPT2_SHAPE if family == "GPT2" else SHAPE) | changes
    heads = {"GPT2": "GPT2LMHeadModel"}
    config = getattr(transformers, f"{family}Config")(**fields)
    reference = getattr(transformers, heads.get(family, f"{family}ForCausalLM"))(config).float().eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        parameter.data.copy_(parameter.to(dtype))
    return _saved(directory, reference, operations=operations_for(CPU, dtype), dtype=dtype), reference


def _saved(
    directory: Path,
    reference: Reference,
    shard_size: str = "5GB",
    operations: Operations | None = None,
    dtype: torch.dtype = torch.float32,
) -> RecordingModel:
    reference.save_pretrained(directory, max_shard_size=shard_size)
    config = load_model_config(directory)
    kind = RecordingGpt2 if config.architecture == "gpt2" else RecordingModel
    return kind(config, load_weights(config, directory, CPU, dtype), operations)


def reference_logits(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
        return logits
