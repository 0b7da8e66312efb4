"""The shape of a Llama-family decoder, read from a Hugging Face `config.json` or built in."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SHAPES = Path(__file__).parent / "shapes"
TINY = "tiny"
DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies (`rope_type` llama3): slow ones are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Names are those of Hugging Face's `LlamaConfig`, shortened; sizes are in elements.

    attention_bias: of all four projections of attention. qkv_bias: of the first three alone (Qwen 2).
    query_key_norm: queries and keys are normed by head (Qwen 3).
    sliding_window: how many positions up to its own a query sees, in all layers; None if all.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    qkv_bias: bool = False
    query_key_norm: bool = False

    @classmethod
    def tiny(cls) -> "ModelConfig":
        """The built-in model of about 5 million parameters, for runs without a checkpoint."""
        return cls(
            vocab_size=4096, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=32,
            intermediate_size=688, max_position_embeddings=16_384, eos_token_ids=(2,),
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Trained values in all weights; tied embeddings count once."""
        qkv_size = self.query_size + 2 * self.kv_size
        attention = self.hidden_size * (qkv_size + self.query_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        biases = self.attention_bias * (qkv_size + self.hidden_size)
        biases += self.qkv_bias * qkv_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.query_key_norm * 2 * self.head_dim
        layer = attention + mlp + biases + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values that one token takes in all layers together."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value


def built_in_models() -> list[str]:
    """The names of the built-in shapes."""
    return [TINY, *sorted(path.stem for path in SHAPES.glob("*.json"))]


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """The shape of a built-in model (`built_in_models()`), of a directory with a Hugging Face `config.json`, or of such
    a file.

    Raises InputError if there is none, it has no such field, or a field asks for something that the decoder does not do
    (another architecture, an unknown rope scaling).
    """
    if str(name_or_path) == TINY:
        return ModelConfig.tiny()
    path = _config_path(Path(name_or_path))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"--model: {path.parent} has no config.json. Expected a Hugging Face model directory; "
                         "download the model with its config.json.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}). Download the file again.") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object. Download the file again.")
    return _HuggingFaceConfig(path, values).model_config()


def _config_path(given: Path) -> Path:
    """The config.json that `given` means: a directory's, itself, or the built-in model's of this name."""
    if given.is_dir():
        return given / "config.json"
    if given.is_file():
        return given
    names = built_in_models()
    if str(given).lower() in names:
        return SHAPES / f"{str(given).lower()}.json"
    near = difflib.get_close_matches(str(given).lower(), names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Check the path."
    raise InputError(f"--model: {str(given)!r} is neither a directory nor a built-in model. Expected a directory with "
                     f"config.json and safetensors, or one of {', '.join(names)}. {hint}")


class _HuggingFaceConfig:
    """The fields of one config.json, with errors that name file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def model_config(self) -> ModelConfig:
        self._check_architecture()
        hidden_size = self._positive_int("hidden_size")
        num_heads = self._positive_int("num_attention_heads")
        num_kv_heads = self._positive_int("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise self._error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
        head_dim = self._positive_int("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise self._error("head_dim", head_dim, "an even number, for rotary embeddings turn pairs")
        return ModelConfig(
            vocab_size=self._positive_int("vocab_size"),
            hidden_size=hidden_size,
            num_layers=self._positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=self._positive_int("intermediate_size"),
            max_position_embeddings=self._positive_int("max_position_embeddings"),
            rms_norm_eps=self._positive_float("rms_norm_eps", 1e-6),
            rope_theta=self._rope_theta(),
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings=bool(self._values.get("tie_word_embeddings", False)),
            attention_bias=bool(self._values.get("attention_bias", False)),
            mlp_bias=bool(self._values.get("mlp_bias", False)),
            eos_token_ids=self._eos_token_ids(),
            sliding_window=self._sliding_window(),
            qkv_bias=self._values["model_type"] == "qwen2",
            query_key_norm=self._values["model_type"] == "qwen3",
        )

    def _check_architecture(self) -> None:
        model_type = self._values.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise self._error("model_type", model_type, f"one of {', '.join(SUPPORTED_MODEL_TYPES)}")
        activation = self._values.get("hidden_act", "silu")
        if activation != "silu":
            raise self._error("hidden_act", activation, "silu")

    def _sliding_window(self) -> int | None:
        """Mistral's window, where it is shorter than the longest sequence; Llama has none, whatever the file says."""
        if self._values["model_type"] != "mistral" or self._values.get("sliding_window") is None:
            return None
        window = self._positive_int("sliding_window")
        return window if window < self._positive_int("max_position_embeddings") else None

    def _rope(self) -> Mapping[str, Any]:
        """The rotary settings: transformers 5 writes `rope_parameters`, older versions `rope_scaling`."""
        rope = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self._error("rope_scaling", rope, "an object or null")
        return rope

    def _rope_theta(self) -> float:
        if "rope_theta" in self._rope():
            return _HuggingFaceConfig(self._path, self._rope())._positive_float("rope_theta")
        return self._positive_float("rope_theta", DEFAULT_ROPE_THETA)

    def _rope_scaling(self) -> Llama3RopeScaling | None:
        rope = self._rope()
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3":
            raise self._error("rope_scaling", kind, "rope_type default or llama3")
        fields = _HuggingFaceConfig(self._path, rope)
        return Llama3RopeScaling(
            factor=fields._positive_float("factor"),
            low_freq_factor=fields._positive_float("low_freq_factor"),
            high_freq_factor=fields._positive_float("high_freq_factor"),
            original_max_position_embeddings=fields._positive_int("original_max_position_embeddings"),
        )

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
        value = self._values.get(name)
        if value is None and default is None:
            raise InputError(f"{self._path}: the field {name!r} is missing. Expected a Llama-family config.json; "
                             "download the file again or add the field.")
        return default if value is None else value

    def _error(self, name: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self._path}: {name} is {value!r}; expected {expected}. Choose another model.")
