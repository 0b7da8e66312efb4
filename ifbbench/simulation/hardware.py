"""Hardware profiles: what a device's data sheet says, and the shares of it that its architecture's kernels reach."""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifbbench.config import HARDWARE_PROFILES
from ifbbench.errors import InputError

PROFILES = HARDWARE_PROFILES
ARCHITECTURES = Path(__file__).parent / "architectures"
MAY_BE_ZERO = ("host_iteration_s", "host_request_s", "all_reduce_s", "kernel_s", "launch_s", "context_s")
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Constants:
    """What kernels reach on an architecture: shares of the data sheet's figures (0 to 1), and fixed times.

    matmul, matmul_fp8: of peak FLOP/s, in large matrix products of 16 (or 32) bits and of 8.
    context_attention: of peak 16-bit FLOP/s, in the attention of prompts.
    memory: of memory bandwidth, for weights and activations.
    generation_attention: of memory bandwidth, for the keys and values that generation reads.
    network: of interconnect bandwidth, in large all-reduces.
    all_reduce_s: seconds that the smallest all-reduce takes for each doubling of its GPUs.
    kernel_s: seconds on the device from one kernel's end to the next one's full speed.
    launch_s: seconds of the host to launch one kernel, where no CUDA graph does it.
    context_s: seconds that an iteration with context takes beside its operations: what is made ready for it alone.
    """

    matmul: float
    matmul_fp8: float
    context_attention: float
    memory: float
    generation_attention: float
    network: float
    all_reduce_s: float
    kernel_s: float
    launch_s: float
    context_s: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One device, as the cost model sees it.

    title: as its maker calls it. architecture: whose constants it has.
    peak_flops: FLOP/s by data type, dense (without sparsity). memory_bytes: as CUDA reports it.
    memory_bandwidth: bytes a second. cache_bytes: of the last-level cache. link_bandwidth: bytes a second and direction
    to the other devices of a server. host_iteration_s, host_request_s: seconds that the host's scheduling of one
    iteration takes, and of each request in it. constants: what its kernels reach. calibration: what a calibrated
    profile says of its own fit, empty elsewhere.
    """

    name: str
    title: str
    architecture: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    cache_bytes: int
    link_bandwidth: float
    host_iteration_s: float
    host_request_s: float
    constants: Constants
    calibration: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        return self.architecture == "cpu"

    @property
    def default_dtype(self) -> str:
        """Of weights, where nothing else is said."""
        return "float32" if self.is_cpu else "bf16"

    def check_dtype(self, dtype: str) -> None:
        """InputError if matrix products in `dtype` (of the weights) are not to be had on this hardware."""
        # Weights of 4 bits are multiplied in 16, and so is the output layer beside weights of 8.
        needed = {"int4": ["bf16"], "fp8": ["fp8", "bf16"]}.get(dtype, [dtype])
        if any(name not in self.peak_flops for name in needed):
            others = [*self.peak_flops, *(["int4"] if "bf16" in self.peak_flops else [])]
            raise InputError(
                f"--dtype: {self.title} has no matrix products in {dtype}; choose one of {', '.join(others)} (int4: "
                "weights alone), or another --device."
            )

    def peak(self, dtype: str) -> float:
        """FLOP/s by the data sheet, in the data type of a matrix product's inputs."""
        self.check_dtype(dtype)
        return self.peak_flops[dtype]

    def matmul_flops_per_s(self, dtype: str) -> float:
        """FLOP/s that large matrix products reach."""
        return self.peak(dtype) * (self.constants.matmul_fp8 if dtype == "fp8" else self.constants.matmul)

    def kv_dtype(self, dtype: str) -> str:
        """The KV cache's data type beside weights in `dtype`, where nothing else is said."""
        return "bf16" if dtype == "int4" else dtype


def hardware_names() -> list[str]:
    """The built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob(f"*{SUFFIX}"))


def load_hardware(name_or_path: str) -> HardwareProfile:
    """The built-in profile of this name, or that of a .toml file.

    Raises InputError for an unknown name, with the one that is near it, and for a file with a missing or bad value.
    """
    text = name_or_path.removeprefix("sim:")
    path = Path(text) if text.endswith(SUFFIX) else PROFILES / f"{text.lower().replace('_', '-')}{SUFFIX}"
    if not path.is_file():
        near = difflib.get_close_matches(text.lower(), hardware_names(), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(
            f"--device: no hardware profile {text!r}; expected one of {', '.join(hardware_names())}, or the path of a "
            f"{SUFFIX} file.{hint}"
        )
    return _Reader(path).profile()


class _Reader:
    """One profile file, with errors that name file and key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as TOML ({error}). Correct the file.") from error

    def profile(self) -> HardwareProfile:
        architecture = self._text("architecture")
        peaks = self._table("peak_flops")
        return HardwareProfile(
            name=self._path.stem,
            title=self._text("title"),
            architecture=architecture,
            peak_flops={dtype: self._number(peaks, dtype, "peak_flops.") for dtype in peaks},
            memory_bytes=int(self._number(self._values, "memory_bytes")),
            memory_bandwidth=self._number(self._values, "memory_bandwidth"),
            cache_bytes=int(self._number(self._values, "cache_bytes")),
            link_bandwidth=self._number(self._values, "link_bandwidth"),
            host_iteration_s=self._number(self._values, "host_iteration_s"),
            host_request_s=self._number(self._values, "host_request_s"),
            constants=self._constants(architecture),
            calibration=self._table("calibration") if "calibration" in self._values else {},
        )

    def _constants(self, architecture: str) -> Constants:
        """The architecture's, with what the profile says of its own in their place."""
        path = ARCHITECTURES / f"{architecture}{SUFFIX}"
        known = sorted(file.stem for file in ARCHITECTURES.glob(f"*{SUFFIX}"))
        if architecture not in known:
            raise InputError(f"{self._path}: architecture is {architecture!r}; expected one of {', '.join(known)}.")
        values = _Reader(path)._values
        names = [field.name for field in dataclasses.fields(Constants)]
        own = self._table("constants") if "constants" in self._values else {}
        for name in own:
            if name not in names:
                raise InputError(f"{self._path}: unknown key constants.{name}; expected {', '.join(names)}.")
        values |= {name: self._number(own, name, "constants.") for name in own}
        return Constants(**{name: float(values[name]) for name in names})

    def _text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or not value:
            raise InputError(f"{self._path}: {name} is {value!r}; expected a text. Correct the file.")
        return value

    def _table(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if not isinstance(value, dict) or not value:
            raise InputError(f"{self._path}: the table [{name}] is missing or empty. Correct the file.")
        return value

    def _number(self, values: Mapping[str, Any], name: str, prefix: str = "") -> float:
        value = values.get(name)
        may_be_zero = name in MAY_BE_ZERO
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if 0 < number < math.inf or (number == 0 and may_be_zero):
                return number
        expected = "a number of at least 0" if may_be_zero else "a number above 0"
        raise InputError(f"{self._path}: {prefix}{name} is {value!r}; expected {expected}. Correct the file.")
