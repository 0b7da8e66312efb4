"""The weights of a decoder: drawn from a seed, or read from safetensors or GGUF files under Hugging Face's names."""

import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifbbench.errors import InputError
from ifbbench.fields import located, table, text, unexpected
from ifbbench.model.config import GPT2, ModelConfig
from ifbbench.model.gguf_file import GgufFile
from ifbbench.model.linear import MakeProduct, Product, make_linear
from ifbbench.model.named_models import GGUF_SUFFIX

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Safetensors files of GPT-2 have names with or without it.
GPT2_PREFIX = "transformer."
NORMS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight")
# Values per random generator. Threads draw pieces in parallel; one piece takes about 15 ms.
PIECE = 1 << 22

# Returns the tensor of a name in the shape asked for, on its final device and in its final data type.
TensorSource = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one product, gate and up another (GPT-2 has no gate, only up).

    query_norm, key_norm: [head size], where heads are normalised. The biases of norms are GPT-2's.
    """

    attention_norm: Tensor
    query_key_value: Product
    attention_output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder. embedding: [vocabulary, hidden]; norms: [hidden]; position_embedding: [positions,
    hidden], GPT-2's."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Product
    final_norm_bias: Tensor | None = None
    position_embedding: Tensor | None = None


def random_weights(
    config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype, make_product: MakeProduct = make_linear
) -> ModelWeights:
    """Weights drawn from `seed`, the same on every device. make_product: for the matrices of layers.

    Matrices have the standard deviation 1/√inputs, so that a product keeps the size of its input, and attention and MLP
    change the hidden state as much as the token's embedding does. With the usual 0.02 they would have little effect,
    and greedy output would repeat a few tokens.
    """

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif name.endswith(NORMS):
            tensor = torch.ones(shape)
        else:
            inputs = shape[0] if name.startswith(GPT2_PREFIX) else shape[-1]
            scale = 1.0 if name.endswith(EMBEDDINGS) else 1.0 / math.sqrt(inputs)
            tensor = normal_values(shape, seed, name).mul_(scale)
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, draw, make_product)


def normal_values(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Standard normal float32 values of `shape` on the CPU, determined by `seed` and `name` alone.

    Drawn by PyTorch's number of threads, which does not change the values.
    """
    values = torch.empty(shape)

    def draw(number: int, piece: Tensor) -> None:
        digest = hashlib.sha256(f"{seed} {name} {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        with torch.inference_mode():  # the mode is local to a thread
            piece.normal_(generator=generator)

    pieces = torch.split(values.view(-1), PIECE)
    if len(pieces) == 1:
        draw(0, pieces[0])
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(draw, range(len(pieces)), pieces))
    return values


def load_weights(
    config: ModelConfig, path: str | Path, device: torch.device, dtype: torch.dtype,
    make_product: MakeProduct = make_linear,
) -> ModelWeights:
    """The weights at `path`: a GGUF file, or a directory with model.safetensors, or with shards and
    model.safetensors.index.json. make_product: for the matrices of layers.

    InputError if a file or a tensor is missing, or a tensor's shape does not match `config`.
    """
    path = Path(path)
    files = GgufFile(path) if path.suffix == GGUF_SUFFIX else SafetensorsFiles(path)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor, file = files.read(name)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{file}: {name} has the shape {list(tensor.shape)}; config.json asks for {list(shape)}. "
                             "Use the config.json that belongs to these weights.")
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, read, make_product)


class SafetensorsFiles:
    """The tensors of model.safetensors in a directory, or of the shards that model.safetensors.index.json lists.

    InputError if there is neither, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards = self._shards_of_tensors()

    def read(self, name: str) -> tuple[Tensor, Path]:
        """The tensor `name` in host memory and its file; InputError if it is missing."""
        found = next((key for key in (name, name.removeprefix(GPT2_PREFIX)) if key in self._shards), None)
        if found is None:
            raise InputError(f"{self._directory}: the tensor {name!r} is missing from the safetensors files. Expected "
                             "the weights that config.json describes; download the model again.")
        path = self._directory / self._shards[found]
        with _open(path) as file:
            if found not in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                raise InputError(f"{path}: the tensor {found!r} is missing, but {INDEX_FILE} lists it in this file. "
                                 "Download the model again.")
            return file.get_tensor(found), path

    def _shards_of_tensors(self) -> dict[str, str]:
        """Tensor name to file name."""
        index, single = self._directory / INDEX_FILE, self._directory / SINGLE_FILE
        if index.exists():
            return _read_index(index)
        if not single.exists():
            raise InputError(f"--model: {self._directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Expected "
                             "safetensors weights beside config.json; download or convert them.")
        with _open(single) as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to the name of a file in the same folder. A path to elsewhere is refused: the index may come from
    anywhere."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as a weight index ({error}); download the file again.") from error
    with located(str(path), "Download the file again."):
        shards = table(table(index, "the index", None, ("weight_map",))["weight_map"], "weight_map")
        for name, file in shards.items():
            if Path(text(file, f"weight_map[{name!r}]")).name != file:
                raise unexpected(f"weight_map[{name!r}]", file, "the name of a file beside the index")
    return shards


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error}). Download the file again.") from error


def _assemble(config: ModelConfig, source: TensorSource, make_product: MakeProduct) -> ModelWeights:
    """make_product: for the matrices of layers. Embeddings, norms and the output layer keep the source's data type."""
    return (_gpt2 if config.architecture == GPT2 else _llama)(config, source, make_product)


def _llama(config: ModelConfig, source: TensorSource, make_product: MakeProduct) -> ModelWeights:
    hidden = config.hidden_size
    embedding = source("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = tuple(_layer(config, source, make_product, f"model.layers.{index}") for index in range(config.num_layers))
    final_norm = source("model.norm.weight", (hidden,))
    head = embedding if config.tie_word_embeddings else source("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(embedding, layers, final_norm, make_linear(head))


def _layer(config: ModelConfig, source: TensorSource, make_product: MakeProduct, prefix: str) -> LayerWeights:
    def fused(block: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Product:
        names = {f"{prefix}.{block}.{part}_proj": size for part, size in outputs.items()}
        weight = torch.cat([source(f"{name}.weight", (size, inputs)) for name, size in names.items()])
        if not has_bias:
            return make_product(weight, None)
        return make_product(weight, torch.cat([source(f"{name}.bias", (size,)) for name, size in names.items()]))

    def head_norm(part: str) -> Tensor | None:
        return source(f"{prefix}.self_attn.{part}_norm.weight", (config.head_dim,)) if config.query_key_norm else None

    hidden, ffn, kv = config.hidden_size, config.intermediate_size, config.kv_size
    return LayerWeights(
        attention_norm=source(f"{prefix}.input_layernorm.weight", (hidden,)),
        query_key_value=fused("self_attn", {"q": config.query_size, "k": kv, "v": kv}, hidden, config.attention_bias),
        attention_output=fused("self_attn", {"o": hidden}, config.query_size, config.attention_output_bias),
        mlp_norm=source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=fused("mlp", {"gate": ffn, "up": ffn}, hidden, config.mlp_bias),
        down=fused("mlp", {"down": hidden}, ffn, config.mlp_bias),
        query_norm=head_norm("q"), key_norm=head_norm("k"),
    )


def _gpt2(config: ModelConfig, source: TensorSource, make_product: MakeProduct) -> ModelWeights:
    hidden, ffn = config.hidden_size, config.intermediate_size

    def vector(name: str, size: int = hidden) -> Tensor:
        return source(f"{GPT2_PREFIX}{name}", (size,))

    def linear(name: str, inputs: int, outputs: int) -> Product:
        """GPT-2 stores its matrices as [inputs, outputs]."""
        weight = source(f"{GPT2_PREFIX}{name}.weight", (inputs, outputs))
        return make_product(weight.t().contiguous(), vector(f"{name}.bias", outputs))

    def layer(prefix: str) -> LayerWeights:
        return LayerWeights(
            attention_norm=vector(f"{prefix}.ln_1.weight"), attention_norm_bias=vector(f"{prefix}.ln_1.bias"),
            query_key_value=linear(f"{prefix}.attn.c_attn", hidden, 3 * hidden),
            attention_output=linear(f"{prefix}.attn.c_proj", hidden, hidden),
            mlp_norm=vector(f"{prefix}.ln_2.weight"), mlp_norm_bias=vector(f"{prefix}.ln_2.bias"),
            gate_up=linear(f"{prefix}.mlp.c_fc", hidden, ffn),
            down=linear(f"{prefix}.mlp.c_proj", ffn, hidden),
        )

    embedding = source(f"{GPT2_PREFIX}wte.weight", (config.vocab_size, hidden))
    head = embedding if config.tie_word_embeddings else source("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(
        embedding=embedding,
        position_embedding=source(f"{GPT2_PREFIX}wpe.weight", (config.max_position_embeddings, hidden)),
        layers=tuple(layer(f"h.{index}") for index in range(config.num_layers)),
        final_norm=vector("ln_f.weight"), final_norm_bias=vector("ln_f.bias"),
        lm_head=make_linear(head),
    )
