"""Hardware profiles: a device's data sheet, and the fractions of it that kernels on its architecture reach."""

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ifbbench.errors import InputError
from ifbbench.files import replace_file
from ifbbench.settings.devices import HARDWARE_PROFILES, profile_names
from ifbbench.settings.fields import choice, did_you_mean, located, number, table, text

ARCHITECTURES = Path(__file__).parent / "architectures"
SUFFIX = ".toml"
# Matrix products of 4 bits in floating point, in `peak_flops`.
FP4 = "fp4"
# Bytes per second in each direction of 16 lanes; of profiles that do not say.
PCIE_4 = 3.2e10
# A profile that does not say is of a server of 8, with one 400 Gb/s port (InfiniBand NDR) for each GPU; a small message
# takes so long through a switch and the adapters of both servers.
LINK_DOMAIN = 8
NETWORK_BANDWIDTH = 5e10
NETWORK_LATENCY_S = 1e-5
OPTIONAL = ("host_link_bandwidth", "price_per_hour", "link_domain", "network_bandwidth", "network_latency_s")
MAY_BE_ZERO = (
    "host_iteration_s",
    "host_request_s",
    "all_reduce_s",
    "one_shot_s",
    "one_shot_gpu_s",
    "kernel_s",
    "launch_s",
    "context_s",
    "quantize_s",
    "all_to_all_s",
    "expert_row_s",
    "listed_row_s",
    "expert_kernel_s",
    "expert_launch_s",
)
# Comments in the files that write_profile writes, by key and by table.
UNITS = {
    "memory_bytes": "bytes",
    "memory_bandwidth": "bytes/s",
    "cache_bytes": "bytes",
    "link_bandwidth": "bytes/s in each direction",
    "host_link_bandwidth": "bytes/s from host memory to the device",
    "link_domain": "devices that these links connect",
    "network_bandwidth": "bytes/s of a device in each direction to devices of other domains",
    "network_latency_s": "seconds of the smallest message there",
    "price_per_hour": "USD for one GPU, rented on demand",
    "host_iteration_s": "seconds of the host for each iteration",
    "host_request_s": "the same for each request in it",
}
TITLES = {
    "peak_flops": "FLOP/s",
    "constants": "shares of these peaks, and seconds (*_s)",
    "watts": "of one GPU: idle, what all of memory_bandwidth and of peak_flops add, and the limit",
    "calibration": "what was measured, and errors as shares of the measured time",
}


@dataclass(frozen=True, slots=True)
class Constants:
    """What kernels reach on an architecture: shares of the data sheet's figures (0 to 1), and fixed times in seconds.

    matmul, matmul_fp8: shares of peak FLOP/s, in large matrix products of 16 (or 32) bits and of 8.
    matmul_fp8_block, matmul_fp4: the same of 8 bits with a scale for each block, and of 4 bits in floating point.
    quantize_s: time to quantize one value of activations before a product with a scale for each block, where kernels do
        so more slowly than they read and write memory.
    experts: share of what large matrix products reach, in the grouped ones of experts.
    expert_row_s: time to copy one value of a hidden state to an expert, and to add the expert's output to the others of
        its token.
    listed_row_s: the same for each expert of a token, on whichever device the expert is.
    experts_memory: share of memory bandwidth, for the weights of experts.
    context_attention: share of peak 16-bit FLOP/s, in context attention.
    latent_attention: share of peak FLOP/s, in generation with latent attention in its absorbed form.
    memory: share of memory bandwidth, for weights and activations.
    generation_attention: share of memory bandwidth, for the keys and values that generation reads.
    network: share of interconnect bandwidth, in large all-reduces.
    all_reduce_s: time of the smallest all-reduce of a ring, for each doubling of the number of GPUs.
    one_shot: share of interconnect bandwidth, in all-reduces in which each GPU reads the whole message of all others.
    one_shot_s, one_shot_gpu_s: time of the smallest such all-reduce, and what each GPU adds to it.
    all_to_all: share of link bandwidth, in the exchange of tokens between experts.
    all_to_all_s: time of the smallest exchange.
    kernel_s: time on the device from the end of one kernel to the full speed of the next.
    expert_kernel_s: the same in layers with experts.
    launch_s: time of the host to launch one kernel without a CUDA graph.
    expert_launch_s: time of the host to launch a layer with experts without a CUDA graph, beside that of its kernels.
    context_s: time that an iteration with context takes besides its operations.
    """

    matmul: float
    matmul_fp8: float
    matmul_fp8_block: float
    matmul_fp4: float
    quantize_s: float
    experts: float
    expert_row_s: float
    listed_row_s: float
    experts_memory: float
    context_attention: float
    latent_attention: float
    memory: float
    generation_attention: float
    network: float
    all_reduce_s: float
    one_shot: float
    one_shot_s: float
    one_shot_gpu_s: float
    all_to_all: float
    all_to_all_s: float
    kernel_s: float
    expert_kernel_s: float
    launch_s: float
    expert_launch_s: float
    context_s: float


@dataclass(frozen=True, slots=True)
class Watts:
    """The power of one GPU by its use, in watts.

    It is `idle`, and more in proportion to the shares of the data sheet's memory bandwidth (`memory`, at all of it) and
    FLOP/s (`compute`, at the peak of the data type) that it reaches, but at most `limit`."""

    idle: float
    memory: float
    compute: float
    limit: float


WATTS = tuple(field.name for field in dataclasses.fields(Watts))
CONSTANTS = tuple(field.name for field in dataclasses.fields(Constants))


class Links(NamedTuple):
    """What connects the devices that share a model.

    per_node: number of devices in one node.
    within, between: bytes per second in each direction, from each device to others in its node, and to those of other
        nodes.
    between_s: further seconds of a message to another node.
    """

    per_node: int
    within: float
    between: float
    between_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One device as the cost model needs it.

    title: the vendor's name of the device.
    architecture: names the file that the constants come from.
    peak_flops: FLOP/s by data type, dense (without sparsity).
    memory_bytes: memory as CUDA reports it.
    memory_bandwidth: bytes per second.
    cache_bytes: size of the last-level cache.
    link_bandwidth: bytes per second in each direction to the other devices of a domain, which has `link_domain` of
        them: a server, or a rack.
    host_iteration_s, host_request_s: seconds of the host to schedule an iteration, and for each request in it.
    calibration: how well a calibrated profile fits; empty for others.
    host_prompt_token_s: seconds of the host for each token of context chunks; see EngineOverhead.
    host_link_bandwidth: bytes per second from host memory to the device, by the data sheet.
    price_per_hour: USD for one GPU, rented on demand; None if unknown.
    network_bandwidth, network_latency_s: bytes per second of a device in each direction to devices of other domains,
        and seconds of the smallest message.
    watts: power, None if unknown.
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
    link_domain: int = LINK_DOMAIN
    network_bandwidth: float = NETWORK_BANDWIDTH
    network_latency_s: float = NETWORK_LATENCY_S
    watts: Watts | None = None

    @property
    def is_cpu(self) -> bool:
        return self.architecture == "cpu"

    def check_dtype(self, dtype: str) -> None:
        """InputError if the hardware has no matrix products for weights in `dtype`."""
        # Beside weights of fewer bits the output layer is multiplied in 16.
        needed = {self.product_dtype(dtype)} | ({"bf16"} if dtype not in ("float32", "fp16") else set())
        if not needed <= self.peak_flops.keys():
            others = [name for name in self.peak_flops if name != FP4]
            others += ["int4"] if "bf16" in self.peak_flops else []
            raise InputError(
                f"--dtype: {self.title} has no matrix products in {dtype}; choose one of {', '.join(others)} (int4: "
                "weights only), or another --device."
            )

    def product_dtype(self, dtype: str) -> str:
        """The data type that products with weights in `dtype` are multiplied in. Without products of 4 bits these are
        converted to 16; with them MXFP4 is multiplied by activations of 8 bits."""
        match dtype:
            case "fp8_block":
                return "fp8"
            case "int4":
                return "bf16"
            case "nvfp4":
                return FP4 if FP4 in self.peak_flops else "bf16"
            case "mxfp4":
                return "fp8" if FP4 in self.peak_flops else "bf16"
            case _:
                return dtype

    def matmul_flops_per_s(self, dtype: str) -> float:
        """FLOP/s that large matrix products with weights in `dtype` reach."""
        self.check_dtype(dtype)
        share, product = self.constants.matmul, self.product_dtype(dtype)
        if product == FP4:
            share = self.constants.matmul_fp4
        elif product == "fp8":
            share = self.constants.matmul_fp8_block if dtype == "fp8_block" else self.constants.matmul_fp8
        return self.peak_flops[product] * share

    def links(self, devices: int) -> Links:
        """The network among so many devices that share a model."""
        return Links(
            min(self.link_domain, devices), self.link_bandwidth, self.network_bandwidth, self.network_latency_s
        )


def hardware_names() -> list[str]:
    """Names of the built-in profiles."""
    return list(profile_names())


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
        constants = checked_numbers(_read(ARCHITECTURES / f"{architecture}{SUFFIX}"), CONSTANTS)
        constants |= checked_numbers(own_constants, own_constants, "constants.")
        peak_flops = table(values.get("peak_flops"), "peak_flops")
        if not peak_flops:
            raise InputError("peak_flops has no key; expected a data type.")
        figures = checked_numbers(
            values,
            ("memory_bytes", "memory_bandwidth", "cache_bytes", "link_bandwidth", "host_iteration_s", "host_request_s"),
        )
        figures |= checked_numbers(values, [name for name in OPTIONAL if name in values])
        watts = table(values.get("watts", {}), "watts", WATTS)
        return HardwareProfile(
            name=path.stem,
            title=text(values.get("title"), "title"),
            architecture=architecture,
            peak_flops=checked_numbers(peak_flops, peak_flops, "peak_flops."),
            memory_bytes=int(figures.pop("memory_bytes")),
            cache_bytes=int(figures.pop("cache_bytes")),
            link_domain=int(figures.pop("link_domain", LINK_DOMAIN)),
            constants=Constants(**constants),
            calibration=table(values.get("calibration", {}), "calibration"),
            watts=Watts(**checked_numbers(watts, WATTS, "watts.")) if watts else None,
            **figures,
        )


# Every run of a process reads the same few files.
_parsed = lru_cache(maxsize=64)(tomllib.loads)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as TOML ({error}).") from error


def checked_numbers(values: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> dict[str, float]:
    """The values of `names`, each within the range of that number."""
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
