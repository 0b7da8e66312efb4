"""The model class of a shape, for where its weights are."""

from importlib.util import find_spec

from ifbbench.model.config import ModelConfig
from ifbbench.model.cpu_operations import operations_for
from ifbbench.model.families import GPT2
from ifbbench.model.gpt2 import Gpt2Model
from ifbbench.model.llama import LlamaModel
from ifbbench.model.weights import ModelWeights


def make_model(config: ModelConfig, weights: ModelWeights) -> LlamaModel:
    """The model of `config.architecture` in the fastest way for where `weights` are: with kernels in C on a CPU, and
    on a GPU with those of Triton, where that is installed, as it is on Linux."""
    device = weights.embedding.device
    operations = operations_for(device, weights.embedding.dtype)
    if config.architecture == GPT2:
        return Gpt2Model(config, weights, operations)
    if device.type != "cuda" or find_spec("triton") is None:
        return LlamaModel(config, weights, operations)
    from ifbbench.model.kernel_llama import KernelLlama

    return KernelLlama(config, weights)
