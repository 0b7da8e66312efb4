"""The weights of a decoder: drawn from a seed, or read from safetensors or GGUF files under Hugging Face's names."""

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifbbench.errors import InputError
from ifbbench.models.config import GPT2, ModelConfig
from ifbbench.models.named_models import GGUF_SUFFIX
from ifbbench.settings.fields import located, table, text, unexpected
from ifbbench.torch.model.deepseek_weights import deepseek_layer
from ifbbench.torch.model.gguf_file import GgufFile
from ifbbench.torch.model.layer_weights import LayerWeights, TensorSource
from ifbbench.torch.model.linear import MakeProduct, Product, make_linear
from ifbbench.torch.model.part import ALL, ModelPart

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Safetensors files of GPT-2 have names with or without it.
GPT2_PREFIX = "transformer."
NORMS = ("norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight")
# Values per random generator. Threads draw pieces in parallel; one piece takes about 15 ms.
PIECE = 1 << 22
# No rows of a tensor: a rank has another stage.
NONE = slice(0, 0)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder.

    embedding: [vocabulary, hidden].
    final_norm, final_norm_bias: [hidden].
    position_embedding: [positions, hidden], GPT-2's.
    part: what of the model these are; None if all. Then tensors of other stages, and of other ranks' vocabulary, have
        no rows.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Product
    final_norm_bias: Tensor | None = None
    position_embedding: Tensor | None = None
    part: ModelPart | None = None


def random_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    make_product: MakeProduct = make_linear,
    part: ModelPart | None = None,
) -> ModelWeights:
    """Weights drawn from `seed`, the same on every device and for every split.

    make_product: makes the products of the matrices of layers.
    part: what to keep of them; all if None.

    Matrices have the standard deviation 1/√inputs, so that a product keeps the size of its input, and attention and MLP
    change the hidden state as much as the token's embedding does. With the usual 0.02 they would have little effect,
    and greedy output would repeat a few tokens.
    """

    def draw(name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        if name.endswith((".bias", "correction_bias")):
            tensor = torch.zeros(shape)
        elif name.endswith(NORMS):
            tensor = torch.ones(shape)
        else:
            inputs = shape[0] if name.startswith(GPT2_PREFIX) else shape[-1]
            scale = 1.0 if name.endswith(EMBEDDINGS) else 1.0 / math.sqrt(inputs)
            tensor = normal_values(shape, seed, name).mul_(scale)
        if part:
            tensor = tensor[part].clone()  # a view would keep the whole tensor
        return tensor.to(device=device, dtype=dtype)

    return _assemble(config, draw, make_product, part)


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
    config: ModelConfig,
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    make_product: MakeProduct = make_linear,
    part: ModelPart | None = None,
) -> ModelWeights:
    """The weights at `path`: a GGUF file, or a directory with model.safetensors, or with shards and
    model.safetensors.index.json.

    make_product: makes the products of the matrices of layers.
    part: what to read of them, all if None; nothing else is read of safetensors files.

    InputError if a file or a tensor is missing, or a tensor's shape does not match `config`.
    """
    path = Path(path)
    files = GgufFile(path) if path.suffix == GGUF_SUFFIX else SafetensorsFiles(path)

    def read(name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        if isinstance(files, SafetensorsFiles):
            return files.read(name, shape, part).to(device=device, dtype=dtype)
        tensor, file = files.read(name)
        _check_shape(file, name, tensor.shape, shape)
        return tensor[part].to(device=device, dtype=dtype)

    return _assemble(config, read, make_product, part)


def _check_shape(file: Path, name: str, found: Sequence[int], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise InputError(
            f"{file}: {name} has the shape {list(found)}; config.json asks for {list(expected)}. "
            "Use the config.json that belongs to these weights."
        )


class SafetensorsFiles:
    """The tensors of model.safetensors in a directory, or of the shards that model.safetensors.index.json lists.

    InputError if there is neither, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards = self._shards_of_tensors()

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> Tensor:
        """The `part` of the tensor `name` of `shape`, in host memory; InputError if it is missing or has another
        shape."""
        found = next((key for key in (name, name.removeprefix(GPT2_PREFIX)) if key in self._shards), None)
        if found is None:
            raise InputError(
                f"{self._directory}: the tensor {name!r} is missing from the safetensors files. Expected "
                "the weights that config.json describes; download the model again."
            )
        path = self._directory / self._shards[found]
        with _open(path) as file:
            if found not in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                raise InputError(
                    f"{path}: the tensor {found!r} is missing, but {INDEX_FILE} lists it in this file. "
                    "Download the model again."
                )
            whole = file.get_slice(found)
            _check_shape(path, name, whole.get_shape(), shape)
            tensor: Tensor = whole[part] if part else file.get_tensor(found)
            return tensor

    def _shards_of_tensors(self) -> dict[str, str]:
        """Tensor name to file name."""
        index, single = self._directory / INDEX_FILE, self._directory / SINGLE_FILE
        if index.exists():
            return _read_index(index)
        if not single.exists():
            raise InputError(
                f"--model: {self._directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Expected "
                "safetensors weights beside config.json; download or convert them."
            )
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


def _assemble(
    config: ModelConfig, source: TensorSource, make_product: MakeProduct, part: ModelPart | None
) -> ModelWeights:
    """make_product: for the matrices of layers. Embeddings, norms and the output layer keep the source's data type."""
    return (_gpt2 if config.architecture == GPT2 else _llama)(config, source, make_product, part)


def _by_vocabulary(config: ModelConfig, source: TensorSource, name: str, part: ModelPart | None) -> Tensor:
    """The embedding or the output layer, [own vocabulary, hidden]."""
    shape = config.vocab_size, config.hidden_size
    return source(name, shape) if part is None else part.padded_vocabulary(source(name, shape, part.vocabulary))


def _embedding(config: ModelConfig, source: TensorSource, name: str, part: ModelPart | None) -> Tensor:
    if part is None or part.is_first or (part.is_last and config.tie_word_embeddings):
        return _by_vocabulary(config, source, name, part)
    return source(name, (config.vocab_size, config.hidden_size), NONE)


def _output_layer(config: ModelConfig, source: TensorSource, embedding: Tensor, part: ModelPart | None) -> Product:
    """embedding: the same matrix in some models."""
    if part is not None and not part.is_last:
        return lambda rows: rows
    is_tied = config.tie_word_embeddings
    head = make_linear(embedding if is_tied else _by_vocabulary(config, source, "lm_head.weight", part))
    return head if part is None else lambda rows: part.all_logits(head(rows))


def _llama(
    config: ModelConfig, source: TensorSource, make_product: MakeProduct, part: ModelPart | None
) -> ModelWeights:
    embedding = _embedding(config, source, "model.embed_tokens.weight", part)
    indices = range(config.num_layers) if part is None else part.layers
    layers: tuple[LayerWeights, ...]
    if config.latent is None:
        layers = tuple(_layer(config, source, make_product, f"model.layers.{index}", part) for index in indices)
    else:
        layers = tuple(deepseek_layer(config, source, make_product, index, part) for index in indices)
    final_norm = source("model.norm.weight", (config.hidden_size,))
    return ModelWeights(embedding, layers, final_norm, _output_layer(config, source, embedding, part), part=part)


def _layer(
    config: ModelConfig, source: TensorSource, make_product: MakeProduct, prefix: str, part: ModelPart | None
) -> LayerWeights:
    # The rank's share of each size; no slices at all for a whole model.
    queries, keys, mlp = ((), (), ()) if part is None else ((part.queries,), (part.keys,), (part.mlp,))

    def by_outputs(
        block: str, outputs: dict[str, tuple[int, tuple[slice, ...]]], inputs: int, has_bias: bool
    ) -> Product:
        """A product of the rank's share of the outputs."""
        names = {f"{prefix}.{block}.{name}_proj": size for name, size in outputs.items()}
        weight = torch.cat([source(f"{name}.weight", (size, inputs), *own) for name, (size, own) in names.items()])
        if not has_bias:
            return make_product(weight, None)
        bias = torch.cat([source(f"{name}.bias", (size,), *own) for name, (size, own) in names.items()])
        return make_product(weight, bias)

    def by_inputs(name: str, inputs: int, own: tuple[slice, ...], has_bias: bool) -> Product:
        """A product of the rank's share of the inputs. Results are summed over ranks; one adds the bias."""
        weight = source(f"{prefix}.{name}_proj.weight", (hidden, inputs), *((ALL, *own) if own else ()))
        is_mine = has_bias and (part is None or part.tp_rank == 0)
        bias = source(f"{prefix}.{name}_proj.bias", (hidden,)) if is_mine else None
        return make_product(weight, bias)

    def head_norm(name: str) -> Tensor | None:
        return source(f"{prefix}.self_attn.{name}_norm.weight", (config.head_dim,)) if config.query_key_norm else None

    hidden, ffn, kv = config.hidden_size, config.intermediate_size, config.kv_size
    return LayerWeights(
        attention_norm=source(f"{prefix}.input_layernorm.weight", (hidden,)),
        query_key_value=by_outputs(
            "self_attn",
            {"q": (config.query_size, queries), "k": (kv, keys), "v": (kv, keys)},
            hidden,
            config.attention_bias,
        ),
        attention_output=by_inputs("self_attn.o", config.query_size, queries, config.attention_output_bias),
        mlp_norm=source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=by_outputs("mlp", {"gate": (ffn, mlp), "up": (ffn, mlp)}, hidden, config.mlp_bias),
        down=by_inputs("mlp.down", ffn, mlp, config.mlp_bias),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
    )


def _gpt2(config: ModelConfig, source: TensorSource, make_product: MakeProduct, part: ModelPart | None) -> ModelWeights:
    hidden, ffn = config.hidden_size, config.intermediate_size

    def vector(name: str, size: int = hidden, *own: slice) -> Tensor:
        return source(f"{GPT2_PREFIX}{name}", (size,), *own)

    def by_outputs(name: str, outputs: int, shares: list[slice]) -> Product:
        """GPT-2 stores its matrices as [inputs, outputs]. shares: the rank's parts of the outputs; all if empty."""
        weights, shape = f"{GPT2_PREFIX}{name}.weight", (hidden, outputs)
        if not shares:
            return make_product(source(weights, shape).t().contiguous(), vector(f"{name}.bias", outputs))
        weight = torch.cat([source(weights, shape, ALL, share).t() for share in shares])
        return make_product(weight, torch.cat([vector(f"{name}.bias", outputs, share) for share in shares]))

    def by_inputs(name: str, inputs: int, *own: slice) -> Product:
        weight = source(f"{GPT2_PREFIX}{name}.weight", (inputs, hidden), *own)
        bias = vector(f"{name}.bias") if part is None or part.tp_rank == 0 else None
        return make_product(weight.t().contiguous(), bias)

    def layer(prefix: str) -> LayerWeights:
        # Queries, keys and values are side by side.
        heads, own_heads, mlp = [], [], []
        if part is not None:
            own_heads, mlp = [part.queries], [part.mlp]
            heads = [slice(first + part.queries.start, first + part.queries.stop) for first in (0, hidden, 2 * hidden)]
        return LayerWeights(
            attention_norm=vector(f"{prefix}.ln_1.weight"),
            attention_norm_bias=vector(f"{prefix}.ln_1.bias"),
            query_key_value=by_outputs(f"{prefix}.attn.c_attn", 3 * hidden, heads),
            attention_output=by_inputs(f"{prefix}.attn.c_proj", hidden, *own_heads),
            mlp_norm=vector(f"{prefix}.ln_2.weight"),
            mlp_norm_bias=vector(f"{prefix}.ln_2.bias"),
            gate_up=by_outputs(f"{prefix}.mlp.c_fc", ffn, mlp),
            down=by_inputs(f"{prefix}.mlp.c_proj", ffn, *mlp),
        )

    embedding = _embedding(config, source, f"{GPT2_PREFIX}wte.weight", part)
    positions = () if part is None or part.is_first else (NONE,)
    return ModelWeights(
        embedding=embedding,
        position_embedding=source(f"{GPT2_PREFIX}wpe.weight", (config.max_position_embeddings, hidden), *positions),
        layers=tuple(layer(f"h.{index}") for index in (range(config.num_layers) if part is None else part.layers)),
        final_norm=vector("ln_f.weight"),
        final_norm_bias=vector("ln_f.bias"),
        lm_head=_output_layer(config, source, embedding, part),
        part=part,
    )
