"""The data types of a quantized checkpoint, from its files or from its name.

Files: `hf_quant_config.json` of NVIDIA ModelOpt, and `quantization_config` in config.json or in the file of a built-in
shape (fp8, fbgemm_fp8, modelopt, compressed-tensors, awq, gptq, bitsandbytes, mxfp4). Names: the words that publishers
put behind the model's own name (`nvidia/Llama-3.1-8B-Instruct-FP8`, `…-AWQ`, `…-quantized.w4a16`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.models.named_models import config_path
from ifbbench.settings.fields import located, table

FP8, FP8_BLOCK, INT4, MXFP4, NVFP4 = "fp8", "fp8_block", "int4", "mxfp4", "nvfp4"
# Formats of weights: the data type of ours that they are simulated in, None if there is none.
FORMATS: Mapping[str, str | None] = {
    "fp8": FP8, "fp8_block": FP8_BLOCK, "int4": INT4, "mxfp4": MXFP4, "nvfp4": NVFP4, "fp4": NVFP4, "int8": None,
}  # fmt: skip
# What is simulated for a format that does not say which of several it is.
NEAREST = {"fp4": "as nvfp4"}
# Formats by the words of a name, of which the first that a name has decides.
NAME_WORDS = (
    ("mxfp4", ("mxfp4",)),
    ("nvfp4", ("nvfp4",)),
    ("fp4", ("fp4",)),
    ("fp8", ("fp8", "w8a8fp8")),
    ("int8", ("int8", "w8a8", "w8a16", "8bit", "smoothquant")),
    ("int4", ("int4", "w4a16", "w4a8", "awq", "gptq", "4bit")),
)
# Formats by the algorithms of ModelOpt and TensorRT-LLM.
ALGORITHMS = {
    "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8_block", "FP8_BLOCK_SCALES": "fp8_block",
    "NVFP4": "nvfp4", "W4A8_NVFP4_FP8": "nvfp4", "W4A16_MXFP4": "mxfp4", "W4A8_MXFP4_FP8": "mxfp4",
    "W4A16": "int4", "W4A16_AWQ": "int4", "W4A16_GPTQ": "int4", "W4A8_AWQ": "int4",
    "INT8": "int8", "W8A16": "int8", "W8A8_SQ_PER_CHANNEL": "int8",
}  # fmt: skip
METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
QUANTIZATION_FILE, CONFIG_FILE = "hf_quant_config.json", "config.json"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint says of its data types.

    dtype: data type that its weights are simulated in, None if they cannot be.
    kv_cache_dtype: data type that its keys and values are made for, None if it does not say.
    format: format of its weights, in its own words.
    source: where that is written.
    """

    dtype: str | None
    kv_cache_dtype: str | None
    format: str
    source: str

    def __str__(self) -> str:
        nearest = f", {NEAREST[self.format]}" if self.format in NEAREST else ""
        cache = f", KV cache in {self.kv_cache_dtype}" if self.kv_cache_dtype else ""
        return f"weights in {self.format}{nearest}{cache}, by {self.source}"


def quantization_of(model: str) -> Quantization | None:
    """The data types of `model`, a value of `--model`; None if neither files nor name say that it is quantized.
    InputError for files with invalid fields."""
    directory = Path(model)
    if directory.is_dir():
        return _of_files(directory)
    if directory.is_file():
        return None
    return _of_name(model) or _of_shape(model)


def _of_shape(model: str) -> Quantization | None:
    """The data types of a built-in shape whose published weights are quantised."""
    try:
        path = config_path(model)
    except InputError:
        return None  # reported when the model is loaded
    return _of_config(path) if path.suffix == ".json" else None


def _quantization(format: str, kv_cache_dtype: str | None, source: str) -> Quantization:
    return Quantization(FORMATS.get(format), kv_cache_dtype, format, source)


def _of_name(model: str) -> Quantization | None:
    words = re.split(r"[-_./]+", model.rpartition("/")[2].lower())
    for format, names in NAME_WORDS:
        if any(word in names for word in words):
            cache = FP8 if format == "fp8" and "kv" in words else None
            return _quantization(format, cache, "the name of the model")
    return None


def _of_files(directory: Path) -> Quantization | None:
    path = directory / QUANTIZATION_FILE
    if (found := _read(path)) is not None:
        with located(str(path)):
            fields = table(found.get("quantization", {}), "quantization")
        if (algorithm := fields.get("quant_algo")) is None:
            return None
        cache = FP8 if fields.get("kv_cache_quant_algo") == "FP8" else None
        format = ALGORITHMS.get(str(algorithm), str(algorithm))
        return _quantization(format, cache, QUANTIZATION_FILE)
    return _of_config(directory / CONFIG_FILE)


def _of_config(path: Path) -> Quantization | None:
    config = _read(path) or {}
    found, of_text = config.get("quantization_config"), config.get("text_config")
    if not found and isinstance(of_text, dict):  # a model of text and images
        found = of_text.get("quantization_config")
    if not found:
        return None
    with located(str(path)):
        fields = table(found, "quantization_config")
        format, cache = _format_of(fields), FP8 if _is_fp8(fields.get("kv_cache_scheme")) else None
    return _quantization(format, cache, f"quantization_config in {path.name}")


def _format_of(fields: Mapping[str, Any]) -> str:
    """The format of `quantization_config` in the form of Hugging Face."""
    method = str(fields.get("quant_method", "")).lower()
    if method == "fp8" and fields.get("weight_block_size"):
        return FP8_BLOCK
    if method in METHODS:
        return METHODS[method]
    if (algorithm := fields.get("quant_algo")) is not None:  # of ModelOpt
        return ALGORITHMS.get(str(algorithm), str(algorithm))
    if (groups := fields.get("config_groups")) is not None:  # of compressed-tensors
        groups = table(groups, "config_groups")
        weights = [table(table(group, name).get("weights") or {}, f"{name}.weights") for name, group in groups.items()]
        formats = {_number_format(one.get("type"), one.get("num_bits")) for one in weights}
        return formats.pop() if len(formats) == 1 else f"{method} of {len(formats)} formats"
    bits = fields.get("bits")
    if method == "bitsandbytes":
        bits = 4 if fields.get("load_in_4bit") else 8
    return _number_format("int", bits) if bits is not None else method or "an unknown format"


def _number_format(kind: Any, bits: Any) -> str:
    return f"{'fp' if kind == 'float' else 'int'}{bits}"


def _is_fp8(scheme: Any) -> bool:
    return isinstance(scheme, Mapping) and _number_format(scheme.get("type"), scheme.get("num_bits")) == "fp8"


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file, or none that can be read, which loading the model reports."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
