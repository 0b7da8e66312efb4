"""What a quantized checkpoint says beside its format: modules that keep 16 bits, and how many weights share a scale.

Lists of modules stand in `quantization_config` of config.json: `ignore` of compressed-tensors and ModelOpt,
`exclude_modules` of the latter, and `modules_to_not_convert` of others. They name modules, parts of names, patterns
with `*`, or regular expressions (`re:`).
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ifbbench.models.layers import Mixer, Mlp
from ifbbench.settings.fields import located, table, unexpected

LISTS = ("ignore", "exclude_modules", "modules_to_not_convert")
EXPRESSION = "re:"
# Matrices that stand for the parts of a layer, under the names that Hugging Face gives them.
MATRICES: Mapping[Mixer | Mlp, tuple[str, ...]] = {
    Mixer.ATTENTION: ("self_attn.o_proj",),
    Mlp.DENSE: ("mlp.gate_proj",),
    Mlp.SHARED: ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj"),
    Mlp.EXPERTS: ("mlp.experts.0.gate_proj",),
}


def unquantized_parts(values: Mapping[str, Any], num_layers: int) -> tuple[Mixer | Mlp, ...]:
    """The parts of layers that keep 16 bits in a quantized checkpoint. values: of config.json.

    Lists name the modules of each layer, or those of all at once: one in the middle stands for all, and the first one
    for those with a dense MLP."""
    quantization = table(values.get("quantization_config") or {}, "quantization_config")
    named = [pattern for name in LISTS for pattern in _strings(quantization.get(name), name)]
    found = []
    for part, matrices in MATRICES.items():
        layer = 0 if part is Mlp.DENSE else num_layers // 2
        modules = [f"model.layers.{layer}.{matrix}" for matrix in matrices]
        if any(_names(pattern, module) for pattern in named for module in modules):
            found.append(part)
    return tuple(found)


def weights_of_scale(values: Mapping[str, Any]) -> int:
    """Weights that share a scale in a quantized checkpoint; 0 if it does not say. values: of config.json."""
    quantization = table(values.get("quantization_config") or {}, "quantization_config")
    groups = table(quantization.get("config_groups") or {}, "config_groups")
    weights = [table(table(group, name).get("weights") or {}, f"{name}.weights") for name, group in groups.items()]
    sizes = {size for one in [quantization, *weights] if isinstance(size := one.get("group_size"), int) and size > 0}
    return sizes.pop() if len(sizes) == 1 else 0


def _strings(value: Any, name: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise unexpected(f"quantization_config.{name}", value, "a list of names of modules")
    return value


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of a list is `module`, or something that it is a part of."""
    if pattern.startswith(EXPRESSION):
        try:
            return re.match(pattern.removeprefix(EXPRESSION), module) is not None
        except re.error as error:
            with located("quantization_config"):
                raise unexpected("ignore", pattern, f"regular expressions ({error})") from error
    pattern = pattern.removeprefix("language_model.")
    return fnmatchcase(module, pattern) or f".{pattern}." in f".{module}."
