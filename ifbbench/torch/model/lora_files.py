"""LoRA adapters as they are stored: PEFT's safetensors, TensorRT-LLM's arrays, and random ones; each checked against
the model."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ifbbench.engine.arrays import IntArray
from ifbbench.errors import InputError
from ifbbench.models.config import LLAMA, ModelConfig
from ifbbench.models.lora_modules import LoraModule, lora_modules
from ifbbench.settings.fields import integer, located, number, shown, table

if TYPE_CHECKING:  # simulated runs need the ranks only, without PyTorch
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TENSORRT_WEIGHTS, TENSORRT_CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(.*\.layers\.([0-9]{1,9})\.\w+\.(\w+))\.lora_([AB])(?:\.default)?\.weight"
)
MAX_ALPHA = 1e6
# Settings of PEFT that change the result, and their values that do not.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# A pair of matrices: index of its layer and module, A [rank, inputs] and B [outputs, rank]; the scale is a part of B.
Pairs = Iterator[tuple[int, int, "Tensor", "Tensor"]]


class Adapter(Protocol):
    """An adapter of the model.

    ranks: [layers, modules], 0 where it changes nothing.
    """

    @property
    def ranks(self) -> IntArray: ...

    def pairs(self) -> Pairs:
        """Its matrices in float32."""
        ...


def find_adapters(directory: str, config: ModelConfig, max_rank: int) -> dict[int, Adapter]:
    """The adapters in `directory` by task id. InputError for what is not an adapter of the model, or has a rank above
    `max_rank`."""
    return {task_id: _open_adapter(path, config, max_rank) for task_id, path in adapter_folders(directory).items()}


def adapter_folders(directory: str) -> dict[int, Path]:
    """The folders of the adapters in `directory` by task id: it is one adapter, of task 0, or has one in each
    subdirectory.

    Subdirectories with numbers as names have these task ids; otherwise all are numbered in the order of their names.
    InputError if there are none.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputError(
            f"--lora_dir: {directory} is not a directory; expected one with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}, or with a subdirectory for each adapter."
        )
    if _is_adapter(root):
        return {0: root}
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    if not folders:
        raise InputError(
            f"--lora_dir: {directory} has neither {CONFIG_FILE} nor subdirectories; expected an adapter "
            "of PEFT, or one in each subdirectory."
        )
    are_numbers = all(path.name.isascii() and path.name.isdigit() for path in folders)
    numbered = dict(enumerate(folders))
    if are_numbers:
        name = f"--lora_dir: the name of a subdirectory of {directory}"
        numbered = {integer(path.name, name, 0, from_text=True): path for path in folders}
    return dict(sorted(numbered.items()))


def _is_adapter(path: Path) -> bool:
    return any((path / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE, TENSORRT_WEIGHTS, TENSORRT_CONFIG))


def _open_adapter(path: Path, config: ModelConfig, max_rank: int) -> Adapter:
    if (path / TENSORRT_WEIGHTS).exists() or (path / TENSORRT_CONFIG).exists():
        weights, rows = (_load_array(path / name) for name in (TENSORRT_WEIGHTS, TENSORRT_CONFIG))
        return TensorRtAdapter(weights, rows, config, max_rank, f"--lora_dir: {path}")
    return PeftAdapter(path, config, max_rank)


def _load_array(path: Path) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array
    except Exception as error:  # of any kind: the header is Python source, which NumPy tokenizes and evaluates
        raise InputError(
            f"--lora_dir: {path} cannot be read as an array ({error}). Expected {TENSORRT_WEIGHTS} and "
            f"{TENSORRT_CONFIG} in each directory."
        ) from error


def _check_ranks(ranks: IntArray, max_rank: int, where: str) -> None:
    if (largest := int(ranks.max())) > max_rank:
        raise InputError(
            f"{where} has rank {largest}; expected at most {max_rank} (--max_lora_rank). Raise it, or "
            "leave the adapter out."
        )


def check_architecture(config: ModelConfig) -> None:
    """InputError if adapters of the model cannot be computed."""
    if config.architecture != LLAMA or config.num_experts:
        raise InputError(
            "--lora_dir, --num_loras, --lora_rank: adapters are available for models of the Llama family "
            "without experts only. Leave them out, or choose another --model."
        )


class PeftAdapter:
    """An adapter that PEFT has saved in the directory `path`. Its weights are read when they are needed."""

    def __init__(self, path: Path, config: ModelConfig, max_rank: int) -> None:
        self.path = path
        self.config = config
        self.settings = self._read_settings()
        self.ranks = self._read_ranks()
        _check_ranks(self.ranks, max_rank, f"--lora_dir: {path}")

    def _read_ranks(self) -> IntArray:
        modules, weights = lora_modules(self.config), self.path / WEIGHTS_FILE
        ranks = np.zeros((self.config.num_layers, len(modules)), np.int32)
        found: dict[tuple[int, int, str], tuple[int, ...]] = {}
        with self._weights("numpy") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                layer, module, _, matrix = self._module_of(name, modules)
                found[layer, module, matrix] = tuple(file.get_slice(name).get_shape())
        if not found:
            raise InputError(
                f"--lora_dir: {weights} has no tensors; expected lora_A and lora_B of the modules "
                f"{', '.join(module.name for module in modules)}. Save the adapter again."
            )
        for layer, module, _ in found:
            lora_a, lora_b = found.get((layer, module, "A")), found.get((layer, module, "B"))
            one = modules[module]
            rank = lora_a[0] if lora_a else 0
            if lora_a != (rank, one.inputs) or lora_b != (one.outputs, rank) or rank < 1:
                raise InputError(
                    f"--lora_dir: {weights}: {one.name} of layer {layer} has lora_A of shape {_shape(lora_a)} and "
                    f"lora_B of shape {_shape(lora_b)}; the model asks for [rank, {one.inputs}] and [{one.outputs}, "
                    "rank]. Choose the model that the adapter was trained for."
                )
            ranks[layer, module] = rank
        return ranks

    def pairs(self) -> Pairs:
        modules = lora_modules(self.config)
        with self._weights("pt") as file:
            names: dict[tuple[int, int], dict[str, tuple[str, str]]] = {}
            for name in file.keys():  # noqa: SIM118
                layer, module, path, matrix = self._module_of(name, modules)
                names.setdefault((layer, module), {})[matrix] = (name, path)
            for (layer, module), of_pair in sorted(names.items()):
                lora_a, lora_b = (file.get_tensor(of_pair[matrix][0]).float() for matrix in "AB")
                yield layer, module, lora_a, lora_b * self.scale(of_pair["A"][1], lora_a.shape[0])

    def scale(self, path: str, rank: int) -> float:
        """lora_alpha / rank, with use_rslora lora_alpha / √rank (Kalajdzievski, arXiv:2312.03732).

        path: path of the module, which `alpha_pattern` may name."""
        alpha = self.settings.get("lora_alpha", 8)
        for pattern, value in (self.settings.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                alpha = value
                break
        return float(alpha) / (sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _module_of(self, name: str, modules: tuple[LoraModule, ...]) -> tuple[int, int, str, str]:
        """Index of layer and module, path of the module, and A or B."""
        match, known = TENSOR_NAME.fullmatch(name), [module.name for module in modules]
        if match is None or match[3] not in known:
            raise InputError(
                f"--lora_dir: {self.path / WEIGHTS_FILE}: {name} is not supported; expected lora_A and "
                f"lora_B of {', '.join(known)}. Train the adapter for these modules only."
            )
        if int(match[2]) >= self.config.num_layers:
            raise InputError(
                f"--lora_dir: {self.path / WEIGHTS_FILE} adapts layer {match[2]}, and the model has "
                f"{self.config.num_layers} layers. Choose the model that the adapter was trained for."
            )
        return int(match[2]), known.index(match[3]), match[1], match[4]

    def _weights(self, framework: str) -> safe_open:
        path = self.path / WEIGHTS_FILE
        try:
            return safe_open(path, framework=framework)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"--lora_dir: {path} is missing or cannot be read as safetensors ({error}). Save the "
                "adapter with PEFT's save_pretrained."
            ) from error

    def _read_settings(self) -> dict[str, Any]:
        path = self.path / CONFIG_FILE
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"--lora_dir: {path} is missing or cannot be read as JSON ({error}). Expected the "
                "directory that PEFT's save_pretrained wrote."
            ) from error
        if not isinstance(settings, dict) or str(settings.get("peft_type", "LORA")).upper() != "LORA":
            raise InputError(f"--lora_dir: {path} does not describe a LoRA adapter; expected peft_type LORA.")
        for name, harmless in HARMLESS.items():
            if settings.get(name) not in harmless:
                raise InputError(
                    f"--lora_dir: {path}: {name} is {json.dumps(settings[name])}, which is not "
                    f"supported; expected {json.dumps(harmless[0])}. Train the adapter without it."
                )
        with located(f"--lora_dir: {path}"):
            patterns = table(settings.get("alpha_pattern") or {}, "alpha_pattern")
            for name, alpha in {"lora_alpha": settings.get("lora_alpha", 8), **patterns}.items():
                number(alpha, name, -MAX_ALPHA, MAX_ALPHA)
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (re.error, RecursionError, OverflowError) as error:
                    raise InputError(f"alpha_pattern: {shown(pattern)} is no regular expression ({error}).") from None
        return settings


def _shape(shape: tuple[int, ...] | None) -> str:
    return "(missing)" if shape is None else str(list(shape))


class TensorRtAdapter:
    """An adapter in the layout of TensorRT-LLM's requests.

    weights: [rows, values] or [1, rows, values]; a row has A [rank, inputs] and B [outputs, rank] of one module, flat,
        one behind the other, with the scale in B.
    rows: int [rows, 3] or [1, rows, 3], number of the module, layer and rank.

    InputError if they do not fit the model.
    """

    def __init__(
        self, weights: Any, rows: Any, config: ModelConfig, max_rank: int, where: str = "lora_weights, lora_config"
    ) -> None:
        """where: the beginning of error messages."""
        self.config = config
        self.where = where
        self.weights, self.rows = self._two_dimensional(weights), self._two_dimensional(rows)
        self._modules = lora_modules(config)
        self._by_number = {module.number: index for index, module in enumerate(self._modules)}
        self.ranks = self._read_ranks()
        _check_ranks(self.ranks, max_rank, where)

    def _read_ranks(self) -> IntArray:
        weights, rows, modules, by_number = self.weights, self.rows, self._modules, self._by_number
        if weights.dtype.kind != "f" or rows.dtype.kind not in "iu" or rows.shape[1] < 3 or len(weights) != len(rows):
            raise InputError(
                f"{self.where}: {weights.dtype} of shape {list(weights.shape)} and {rows.dtype} of shape "
                f"{list(rows.shape)}; expected floats [rows, values] and integers [rows, 3]."
            )
        ranks = np.zeros((self.config.num_layers, len(modules)), np.int32)
        for kind, layer, rank, *others in rows.tolist():
            if kind < 0 or rank <= 0:  # padding
                continue
            if kind not in by_number:
                known = ", ".join(f"{module.number} ({module.name})" for module in modules)
                raise InputError(f"{self.where}: module {kind} is not supported; expected one of {known}.")
            module = modules[by_number[kind]]
            if not 0 <= layer < self.config.num_layers or rank * module.values_of_rank > weights.shape[1]:
                raise InputError(
                    f"{self.where}: layer {layer} with rank {rank} of {module.name} does not fit the "
                    f"model: expected one of {self.config.num_layers} layers, and rows of at least "
                    f"{rank * module.values_of_rank} values, not {weights.shape[1]}."
                )
            if any(others):
                raise InputError(f"{self.where}: DoRA is not supported; expected 0 in the fourth column.")
            ranks[layer, by_number[kind]] = rank
        if not ranks.any():
            raise InputError(f"{self.where}: no module is adapted; expected a row for each module and layer.")
        return ranks

    def _two_dimensional(self, array: Any) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(array)
        if found.ndim == 3 and len(found) == 1:
            found = found[0]
        if found.ndim != 2:
            raise InputError(
                f"{self.where}: an array of shape {list(found.shape)}; expected [rows, values] for the "
                "weights and [rows, 3] for their rows."
            )
        return found

    def pairs(self) -> Pairs:
        import torch  # only where weights are computed with

        modules, by_number = self._modules, self._by_number
        for values, (kind, layer, rank, *_) in zip(self.weights, self.rows.tolist(), strict=True):
            if kind >= 0 and rank > 0:
                module, row = modules[by_number[kind]], torch.from_numpy(values.astype(np.float32))
                border = rank * module.inputs
                lora_b = row[border : border + module.outputs * rank].view(module.outputs, rank)
                yield layer, by_number[kind], row[:border].view(rank, module.inputs), lora_b


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter of this rank for all modules, drawn from a seed. Its products are half as large as the model's."""

    task_id: int
    rank: int
    config: ModelConfig
    seed: int

    @property
    def ranks(self) -> IntArray:
        return np.full((self.config.num_layers, len(lora_modules(self.config))), self.rank, np.int32)

    def pairs(self) -> Pairs:
        from ifbbench.torch.model.weights import normal_values  # needs PyTorch

        for layer in range(self.config.num_layers):
            for index, module in enumerate(lora_modules(self.config)):
                name = f"lora {self.task_id} {layer} {module.name}"
                lora_a = normal_values((self.rank, module.inputs), self.seed, f"{name} A") / sqrt(module.inputs)
                lora_b = normal_values((module.outputs, self.rank), self.seed, f"{name} B") / (2 * sqrt(self.rank))
                yield layer, index, lora_a, lora_b
