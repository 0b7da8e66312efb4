"""Engine overheads: the host's time of one engine and version, apart from the constants of the GPU."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.devices import ENGINE_OVERHEADS
from ifbbench.settings.dtypes import DTYPES
from ifbbench.settings.fields import choice, did_you_mean, located, number, table, text, unexpected
from ifbbench.simulated.hardware import CONSTANTS, HardwareProfile, checked_numbers

SUFFIX = ".toml"
# Names of earlier versions, which run.json and scripts have.
EARLIER_NAMES = {"sglang-0.5.1": "sglang"}
TIMES = (
    "iteration_s",
    "request_s",
    "prompt_token_s",
    "serving_request_s",
    "serving_token_in_s",
    "serving_token_out_s",
    "context_s",
)
# Times that a file need not have.
OPTIONAL_TIMES = {"context_s": 0.0}
KV_SHARES_OF = ("free", "total")
# Keys of a file: tuned kernels of a data type, and their shapes.
TUNED, SHAPES = "tuned", "shapes"


@dataclass(frozen=True, slots=True)
class TunedExperts:
    """Kernels of experts that are tuned for some shapes: experts of a device, and their intermediate size there."""

    shapes: frozenset[tuple[int, int]]
    constants: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """What one engine adds to the GPU's time, and the rules by which it differs from TensorRT-LLM's batch manager.

    iteration_s, request_s, prompt_token_s: the engine's host time of an iteration, of each request in it, and of each
        token of its context chunks. Hidden behind the device with --overlap async.
    serving_request_s, serving_token_in_s, serving_token_out_s: time of the serving process (HTTP, tokenizer,
        detokenizer, streaming) for a request, and for each of its prompt and output tokens. See
        `ServingProcess`.
    context_s: time of the device in an iteration with context besides its operations: the host prepares new prompts and
        launches kernels without a CUDA graph.
    factors: factors of constants of an architecture, because this engine's kernels differ.
    generation_attention: the share of memory bandwidth that attention in generation reaches, by architecture and data
        type of the KV cache, where it is not that of the architecture.
    constants: constants in place of those of an architecture, by architecture, where this engine was measured on it.
    constants_of_dtype: the same by architecture and data type of the weights.
    tuned_experts: by these, shapes of experts that the engine has tuned kernels for, and their constants.
    kv_share_of: what `kv_cache_free_gpu_mem_fraction` is a share of: memory that is `free` once the model is loaded, or
        the `total`, weights included.
    settings: settings of `ifbbench run` that come closest to the engine's defaults.
    """

    name: str
    title: str
    version: str
    iteration_s: float
    request_s: float
    prompt_token_s: float
    serving_request_s: float
    serving_token_in_s: float
    serving_token_out_s: float
    context_s: float
    factors: Mapping[str, float]
    generation_attention: Mapping[str, Mapping[str, float]]
    constants: Mapping[str, Mapping[str, float]]
    constants_of_dtype: Mapping[str, Mapping[str, Mapping[str, float]]]
    tuned_experts: Mapping[str, Mapping[str, TunedExperts]]
    kv_share_of: str
    settings: Mapping[str, Any]

    def applied_to(
        self,
        hardware: HardwareProfile,
        kv_cache_dtype: str,
        dtype: str = "",
        experts: tuple[int, int] | None = None,
    ) -> HardwareProfile:
        """`hardware` as this engine uses it, with weights in `dtype`. A profile that was calibrated has the constants
        of the engine that was measured, and host times of its own where these could be determined.

        experts: number of experts of a device, and their intermediate size there; None without experts.
        """
        base, measured = hardware.constants, hardware.calibration
        determined = measured.get("determined", ("host_iteration_s", "host_request_s")) if measured else ()
        changed: dict[str, float] = {}
        if not measured:
            changed = {name: getattr(base, name) * factor for name, factor in self.factors.items()}
            if self.context_s:
                changed["context_s"] = changed.get("context_s", base.context_s) + self.context_s
            attention = self.generation_attention.get(hardware.architecture, {})
            if kv_cache_dtype in attention:
                changed["generation_attention"] = attention[kv_cache_dtype]
            changed |= self.constants.get(hardware.architecture, {})
            changed |= self.constants_of_dtype.get(hardware.architecture, {}).get(dtype, {})
            tuned = self.tuned_experts.get(hardware.architecture, {}).get(dtype)
            if tuned is not None and experts in tuned.shapes:
                changed |= tuned.constants
        return dataclasses.replace(
            hardware,
            host_iteration_s=hardware.host_iteration_s if "host_iteration_s" in determined else self.iteration_s,
            host_request_s=hardware.host_request_s if "host_request_s" in determined else self.request_s,
            host_prompt_token_s=self.prompt_token_s,
            constants=dataclasses.replace(base, **changed),
        )


def overhead_names() -> list[str]:
    """Names of the built-in engine overheads."""
    return sorted(path.stem for path in ENGINE_OVERHEADS.glob(f"*{SUFFIX}"))


@cache
def load_overhead(name_or_path: str) -> EngineOverhead:
    """The built-in engine overhead of this name, or that of a .toml file. InputError for an unknown name, and for a
    file with a missing or invalid value."""
    path = Path(name_or_path)
    if path.suffix != SUFFIX:
        name = name_or_path.lower()
        path = ENGINE_OVERHEADS / f"{EARLIER_NAMES.get(name, name)}{SUFFIX}"
    if not path.is_file():
        names = overhead_names()
        raise InputError(
            f"--engine_overhead: there is no engine {name_or_path!r}; expected one of {', '.join(names)}, or the path "
            f"of a {SUFFIX} file.{did_you_mean(name_or_path, names)}"
        )
    with located(str(path), "Correct the file."):
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read as TOML ({error}).") from error
        known = (*TIMES, "factors", "title", "version", "generation_attention", "constants", "kv_share_of", "settings")
        table(values, "the file", known)
        factors = table(values.get("factors", {}), "factors", CONSTANTS)
        shares = {
            architecture: {
                dtype: number(share, f"generation_attention.{architecture}.{dtype}", above=0, maximum=1)
                for dtype, share in table(given, f"generation_attention.{architecture}").items()
            }
            for architecture, given in table(values.get("generation_attention", {}), "generation_attention").items()
        }
        constants, of_dtype = dict[str, dict[str, float]](), dict[str, dict[str, dict[str, float]]]()
        tuned = dict[str, dict[str, TunedExperts]]()
        for architecture, given in table(values.get("constants", {}), "constants").items():
            prefix = f"constants.{architecture}"
            tables = {name: value for name, value in table(given, prefix).items() if name in DTYPES}
            constants[architecture] = _constants({name: given[name] for name in given if name not in tables}, prefix)
            tuned[architecture] = {
                name: _tuned(each.pop(TUNED), f"{prefix}.{name}.{TUNED}")
                for name, each in tables.items()
                if isinstance(each, dict) and TUNED in each
            }
            of_dtype[architecture] = {name: _constants(each, f"{prefix}.{name}") for name, each in tables.items()}
        return EngineOverhead(
            name=path.stem,
            title=text(values.get("title"), "title"),
            version=text(values.get("version"), "version"),
            factors={constant: number(factor, f"factors.{constant}", above=0) for constant, factor in factors.items()},
            generation_attention=shares,
            constants=constants,
            constants_of_dtype=of_dtype,
            tuned_experts=tuned,
            kv_share_of=choice(values.get("kv_share_of"), "kv_share_of", KV_SHARES_OF),
            settings=table(values.get("settings", {}), "settings"),
            **{name: number(values.get(name, OPTIONAL_TIMES.get(name)), name, 0.0) for name in TIMES},
        )


def _tuned(given: Any, title: str) -> TunedExperts:
    """Constants of kernels that are tuned for `shapes`, checked."""
    values = table(given, title, (*CONSTANTS, SHAPES), (SHAPES,))
    shapes = values.pop(SHAPES)
    if not isinstance(shapes, list) or not all(_is_shape(one) for one in shapes):
        raise unexpected(f"{title}.{SHAPES}", shapes, "a list of [experts of a device, their intermediate size there]")
    return TunedExperts(frozenset((experts, size) for experts, size in shapes), _constants(values, title))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(one) is int and one > 0 for one in value)


def _constants(given: Any, title: str) -> dict[str, float]:
    """Constants in place of those of an architecture, checked."""
    constants = table(given, title, CONSTANTS)
    return checked_numbers(constants, constants, f"{title}.")
