"""Hardware profiles: a device's data sheet, and the fractions of it that kernels on its architecture reach."""

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.files import replace_file
from ifbbench.settings.config import HARDWARE_PROFILES
from ifbbench.settings.fields import choice, did_you_mean, located, number, table, text

ARCHITECTURES = Path(__file__).parent / "architectures"
SUFFIX = ".toml"
# Bytes per second in each direction of 16 lanes; of profiles that do not say.
PCIE_4 = 3.2e10
OPTIONAL = ("host_link_bandwidth", "price_per_hour")
MAY_BE_ZERO = (
    "host_iteration_s",
    "host_request_s",
    "all_reduce_s",
    "one_shot_s",
    "one_shot_gpu_s",
    "kernel_s",
    "launch_s",
    "context_s",
)
# Comments in the files that write_profile writes, by key and by table.
UNITS = {
    "memory_bytes": "bytes",
    "memory_bandwidth": "bytes/s",
    "cache_bytes": "bytes",
    "link_bandwidth": "bytes/s in each direction",
    "host_link_bandwidth": "bytes/s from host memory to the device",
    "price_per_hour": "USD for one GPU, rented on demand",
    "host_iteration_s": "seconds of the host for each iteration",
    "host_request_s": "the same for each request in it",
}
TITLES = {
    "peak_flops": "FLOP/s",
    "constants": "shares of these peaks, and seconds (*_s)",
    "calibration": "what was measured, and errors as shares of the measured time",
}


@dataclass(frozen=True, slots=True)
class Constants:
    """What kernels reach on an architecture: shares of the data sheet's figures (0 to 1), and fixed times in seconds.

    matmul, matmul_fp8: of peak FLOP/s, in large matrix products of 16 (or 32) bits and of 8.
    context_attention: of peak 16-bit FLOP/s, in context attention.
    memory: of memory bandwidth, for weights and activations.
    generation_attention: of memory bandwidth, for the keys and values that generation reads.
    network: of interconnect bandwidth, in large all-reduces.
    all_reduce_s: time of the smallest all-reduce of a ring, for each doubling of the number of GPUs.
    one_shot: of interconnect bandwidth, in all-reduces in which each GPU reads the whole message of all others.
    one_shot_s, one_shot_gpu_s: time of the smallest such all-reduce, and what each GPU adds to it.
    kernel_s: time on the device from the end of one kernel to the full speed of the next.
    launch_s: time of the host to launch one kernel without a CUDA graph.
    context_s: time that an iteration with context takes besides its operations.
    """

    matmul: float
    matmul_fp8: float
    context_attention: float
    memory: float
    generation_attention: float
    network: float
    all_reduce_s: float
    one_shot: float
    one_shot_s: float
    one_shot_gpu_s: float
    kernel_s: float
    launch_s: float
    context_s: float


CONSTANTS = tuple(field.name for field in dataclasses.fields(Constants))


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One device as the cost model needs it.

    title: the vendor's name of it. architecture: names the file that the constants come from.
    peak_flops: FLOP/s by data type, dense (without sparsity). memory_bytes: as CUDA reports it.
    memory_bandwidth: bytes per second. cache_bytes: of the last-level cache. link_bandwidth: bytes per second in each
    direction to the other devices of a server. host_iteration_s, host_request_s: seconds of the host to schedule an
    iteration, and for each request in it. calibration: how well a calibrated profile fits; empty for others.
    price_per_hour: USD for one GPU, rented on demand; None if unknown.
    host_prompt_token_s: the same for each token of context chunks; see EngineOverhead. host_link_bandwidth: bytes per
    second from host memory to the device, by the data sheet.
    """

    name: str
    title: str
    architecture: str
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    cache_bytes: int
    link_bandwidth: float
    host_iteration_s: float
    host_request_s: float
    constants: Constants
    calibration: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    host_prompt_token_s: float = 0.0
    host_link_bandwidth: float = PCIE_4
    price_per_hour: float | None = None

    @property
    def is_cpu(self) -> bool:
        return self.architecture == "cpu"

    def check_dtype(self, dtype: str) -> None:
        """InputError if the hardware has no matrix products for weights in `dtype`."""
        # Weights of 4 bits are multiplied in 16, and so is the output layer beside weights of 8.
        needed = {"int4": ["bf16"], "fp8": ["fp8", "bf16"]}.get(dtype, [dtype])
        if any(name not in self.peak_flops for name in needed):
            others = [*self.peak_flops, *(["int4"] if "bf16" in self.peak_flops else [])]
            raise InputError(
                f"--dtype: {self.title} has no matrix products in {dtype}; choose one of {', '.join(others)} (int4: "
                "weights only), or another --device."
            )

    def matmul_flops_per_s(self, dtype: str) -> float:
        """FLOP/s that large matrix products with inputs in `dtype` reach."""
        self.check_dtype(dtype)
        return self.peak_flops[dtype] * (self.constants.matmul_fp8 if dtype == "fp8" else self.constants.matmul)


def hardware_names() -> list[str]:
    """Names of the built-in profiles."""
    return sorted(path.stem for path in HARDWARE_PROFILES.glob(f"*{SUFFIX}"))


def load_hardware(name_or_path: str) -> HardwareProfile:
    """The built-in profile of this name, with or without `sim:`, or the profile in a .toml file.

    InputError for an unknown name, and for a file with a missing or invalid value.
    """
    name = name_or_path.removeprefix("sim:")
    path = Path(name) if name.endswith(SUFFIX) else HARDWARE_PROFILES / f"{name.lower().replace('_', '-')}{SUFFIX}"
    if not path.is_file():
        names = hardware_names()
        raise InputError(
            f"--device: no hardware profile {name!r}; expected one of {', '.join(names)}, or the path of a {SUFFIX} "
            f"file.{did_you_mean(name, names)}"
        )
    with located(str(path), "Correct the file."):
        values = _read(path)
        architectures = sorted(file.stem for file in ARCHITECTURES.glob(f"*{SUFFIX}"))
        architecture = choice(values.get("architecture"), "architecture", architectures)
        own_constants = table(values.get("constants", {}), "constants", CONSTANTS)
        constants = _numbers(_read(ARCHITECTURES / f"{architecture}{SUFFIX}"), CONSTANTS)
        constants |= _numbers(own_constants, own_constants, "constants.")
        peak_flops = table(values.get("peak_flops"), "peak_flops")
        if not peak_flops:
            raise InputError("peak_flops has no key; expected a data type.")
        figures = _numbers(
            values,
            ("memory_bytes", "memory_bandwidth", "cache_bytes", "link_bandwidth", "host_iteration_s", "host_request_s"),
        )
        figures |= _numbers(values, [name for name in OPTIONAL if name in values])
        return HardwareProfile(
            name=path.stem,
            title=text(values.get("title"), "title"),
            architecture=architecture,
            peak_flops=_numbers(peak_flops, peak_flops, "peak_flops."),
            memory_bytes=int(figures.pop("memory_bytes")),
            cache_bytes=int(figures.pop("cache_bytes")),
            constants=Constants(**constants),
            calibration=table(values.get("calibration", {}), "calibration"),
            **figures,
        )


# Every run of a process reads the same few files.
_parsed = lru_cache(maxsize=64)(tomllib.loads)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as TOML ({error}).") from error


def _numbers(values: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> dict[str, float]:
    """The values of `names`, checked."""
    return {
        name: number(values.get(name), prefix + name, 0.0)
        if name in MAY_BE_ZERO
        else number(values.get(name), prefix + name, above=0)
        for name in names
    }


def write_profile(profile: HardwareProfile, path: Path, remark: str) -> None:
    """Write `profile` to a file that `load_hardware` reads; its name becomes that of the file. remark: first line."""
    values = dataclasses.asdict(profile)
    del values["name"], values["host_prompt_token_s"]
    if profile.price_per_hour is None:
        del values["price_per_hour"]
    tables = {name: values.pop(name) for name in TITLES}
    lines = [f"# {remark}", *_pairs(values)]
    for name, pairs in tables.items():
        if pairs:
            lines += ["", f"[{name}]  # {TITLES[name]}", *_pairs(pairs)]
    replace_file(path, "\n".join(lines) + "\n")


def _pairs(values: Mapping[str, object]) -> Iterator[str]:
    """JSON of each value, which TOML reads; measured numbers to four digits, more than their accuracy."""
    for name, value in values.items():
        written = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
        yield f"{name} = {written}" + (f"  # {UNITS[name]}" if name in UNITS else "")
