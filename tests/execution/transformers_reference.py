"""Small random checkpoints, as this project's model and as transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ifbbench.model.config import load_model_config
from ifbbench.model.weights import load_weights
from tests.execution.driving import CPU, RecordingModel

# transformers' LlamaForCausalLM: called, it gives an object with `logits`; it also has `generate`.
Reference = Any


SHAPE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip


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
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SHAPE, sliding_window=sliding_window)
    reference = transformers.MistralForCausalLM(config).float().eval()
    return _saved(directory, reference), reference


def _saved(directory: Path, reference: Reference, shard_size: str = "5GB") -> RecordingModel:
    reference.save_pretrained(directory, max_shard_size=shard_size)
    config = load_model_config(directory)
    return RecordingModel(config, load_weights(config, directory, CPU, torch.float32))


def reference_logits(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
        return logits
