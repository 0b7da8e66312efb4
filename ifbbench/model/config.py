"""The shape of a decoder, read from a Hugging Face `config.json` or a GGUF file, or built in."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.model.families import ALWAYS_EXPECTED, FAMILIES, GPT2, LLAMA, Family
from ifbbench.model.model_path import GGUF_SUFFIX, TINY, config_path
from ifbbench.model.rope_scaling import LinearRopeScaling, Llama3RopeScaling, RopeScaling, YarnRopeScaling

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Names are those of Hugging Face's `LlamaConfig`, shortened; sizes are in elements.

    sliding_window: how many positions up to its own a query sees, in all layers; None if all.
    attention_bias: of query, key and value. query_key_norm: each head of queries and keys is normalised before it is
    turned (Qwen 3). architecture: `llama`, or `gpt2` with learned positions, LayerNorm, biases everywhere and an MLP
    without gate; rms_norm_eps and activation are those of its norms and of its MLP.
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
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    attention_output_bias: bool = False
    query_key_norm: bool = False
    architecture: str = LLAMA
    activation: str = "silu"

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
    def gate_up_size(self) -> int:
        """Values that the first product of the MLP makes of a token: gate and up, or up alone (GPT-2)."""
        return (1 if self.architecture == GPT2 else 2) * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Trained values in all weights; tied embeddings count once."""
        is_gpt2 = self.architecture == GPT2
        qkv_size = self.query_size + 2 * self.kv_size
        biases = self.attention_bias * qkv_size + self.attention_output_bias * self.hidden_size
        biases += self.mlp_bias * (self.gate_up_size + self.hidden_size)
        norm = (2 if is_gpt2 else 1) * self.hidden_size
        layer = self.layer_matrix_parameters + biases + 2 * norm + self.query_key_norm * 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        embeddings += is_gpt2 * self.max_position_embeddings * self.hidden_size
        return self.num_layers * layer + embeddings + norm

    @property
    def layer_matrix_parameters(self) -> int:
        """Trained values in the matrices of one layer: those that `--dtype` may make narrower than all others."""
        attention = 2 * (self.query_size + self.kv_size)
        return self.hidden_size * (attention + self.gate_up_size + self.intermediate_size)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values that one token takes in all layers together."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """The shape of a built-in model (`built_in_models()`), of a directory with a Hugging Face `config.json`, of such a
    file, or of a GGUF file.

    Raises InputError if there is none, it has no such field, or a field asks for something that the decoder does not do
    (another architecture, an unknown rope scaling).
    """
    if str(name_or_path) == TINY:
        return ModelConfig.tiny()
    path = config_path(name_or_path)
    if path.suffix == GGUF_SUFFIX:
        # Imported here because the package that reads GGUF is optional.
        from ifbbench.model.gguf_file import GgufFile

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
    return _HuggingFaceConfig(path, values).model_config()


class _HuggingFaceConfig:
    """The fields of one config.json, with errors that name file and field."""

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
            raise self._error("head_dim", head_dim, "an even number, for rotary embeddings turn pairs")
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
        """InputError for what no decoder here does, naming the field that asks for it."""
        model_type = self._values.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise self._error("model_type", model_type, f"one of {', '.join(FAMILIES)}")
        self._family = FAMILIES[model_type]
        activation = self._present("hidden_act", "silu")
        if activation not in self._family.activations:
            raise self._error("hidden_act", activation, " or ".join(self._family.activations))
        for name, expected in {**ALWAYS_EXPECTED, **self._family.expected}.items():
            value = self._values.get(name)
            if value is not None and value != expected:
                raise self._error(name, value, "null" if expected is None else repr(expected))

    def _sliding_window(self) -> int | None:
        """Mistral's window, where it is shorter than the longest sequence; Llama has none, whatever the file says."""
        if not self._family.has_window or self._values.get("sliding_window") is None:
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

    def _rope_scaling(self) -> RopeScaling | None:
        rope = self._rope()
        kind = rope.get("rope_type", rope.get("type", "default"))
        fields = _HuggingFaceConfig(self._path, rope)
        match kind:
            case "default":
                return None
            case "linear":
                return LinearRopeScaling(fields._positive_float("factor"))
            case "llama3":
                return Llama3RopeScaling(
                    factor=fields._positive_float("factor"),
                    low_freq_factor=fields._positive_float("low_freq_factor"),
                    high_freq_factor=fields._positive_float("high_freq_factor"),
                    original_max_position_embeddings=fields._positive_int("original_max_position_embeddings"),
                )
            case "yarn":
                return self._yarn(fields)
        raise self._error("rope_scaling", kind, "rope_type default, linear, llama3 or yarn")

    def _yarn(self, fields: "_HuggingFaceConfig") -> YarnRopeScaling:
        for name, expected in {"mscale": None, "mscale_all_dim": None, "truncate": True}.items():
            if (value := fields._values.get(name)) not in (None, expected):
                raise self._error(f"rope_scaling.{name}", value, "null" if expected is None else repr(expected))
        factor = fields._positive_float("factor")
        return YarnRopeScaling(
            factor=factor,
            original_max_position_embeddings=fields._positive_int(
                "original_max_position_embeddings", self._positive_int("max_position_embeddings")
            ),
            attention_factor=fields._positive_float("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
            beta_fast=fields._positive_float("beta_fast", 32.0),
            beta_slow=fields._positive_float("beta_slow", 1.0),
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
