"""The tensors in the files of a model."""

import json
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ifbbench.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Some files have it, some not.
GPT2_PREFIX = "transformer."


class ModelFiles(Protocol):
    """The weights of one model, under Hugging Face's names."""

    def read(self, name: str) -> tuple[Tensor, Path]:
        """The tensor called `name` in host memory, and the file that it comes from. InputError if there is none."""
        ...


class SafetensorsFiles:
    """One model.safetensors in a directory, or shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path) -> None:
        """InputError if there is neither, or the one that is there cannot be read."""
        self._directory = directory
        self._shards = _shards(directory)

    def read(self, name: str) -> tuple[Tensor, Path]:
        """The tensor called `name`, with or without GPT-2's prefix."""
        found = next((key for key in (name, name.removeprefix(GPT2_PREFIX)) if key in self._shards), None)
        if found is None:
            raise InputError(f"{self._directory}: the tensor {name!r} is missing from the safetensors files. Expected "
                             "the weights that config.json describes; download the model again.")
        path = self._directory / self._shards[found]
        return _read_tensor(path, found), path


def _shards(directory: Path) -> dict[str, str]:
    """Tensor name to file name."""
    index = directory / INDEX_FILE
    if index.exists():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index}: cannot be read as a weight index ({error!r}). Expected a JSON object with "
                             "weight_map; download the file again.") from error
    single = directory / SINGLE_FILE
    if not single.exists():
        raise InputError(f"--model: {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Expected safetensors "
                         "weights beside config.json; download or convert them.")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _read_tensor(path: Path, name: str) -> Tensor:
    with _open(path) as file:
        if name not in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            raise InputError(f"{path}: the tensor {name!r} is missing, though {INDEX_FILE} places it here. Download "
                             "the model again.")
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error}). Download the file again.") from error
