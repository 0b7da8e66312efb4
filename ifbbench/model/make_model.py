"""The model class of a shape."""

from ifbbench.model.config import ModelConfig
from ifbbench.model.cpu_operations import operations_for
from ifbbench.model.families import GPT2
from ifbbench.model.gpt2 import Gpt2Model
from ifbbench.model.llama import LlamaModel
from ifbbench.model.weights import ModelWeights


def make_model(config: ModelConfig, weights: ModelWeights) -> LlamaModel:
    """The model of `config.architecture` with these weights, and the fastest operations for where they are."""
    operations = operations_for(weights.embedding.device, weights.embedding.dtype)
    return (Gpt2Model if config.architecture == GPT2 else LlamaModel)(config, weights, operations)
