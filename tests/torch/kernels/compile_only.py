"""Compiles kernels for GPUs that are not present, as a launch would, and runs none.

`python -m tests.torch.kernels.compile_only` prints one JSON object: for each kernel, GPU and case the shared memory in
bytes, the registers of a thread and the bytes of its stack, which holds spilled registers. Triton must not interpret.
"""

import json
import re
import subprocess
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.torch.kernels.context_attention import TILE_FIELDS, context_attention
from ifbbench.torch.kernels.generation_attention import generation_attention
from ifbbench.torch.kernels.launch import context_tiles, generation_tiles
from ifbbench.torch.kernels.rows import add_rms_norm, copy_rows, quantise_rows, rotate_and_write, swiglu
from ifbbench.torch.kernels.token_choice import choose_tokens, log_probs_of

OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
}
LARGE = 2**31
# Matrix instructions of several warps: of Hopper, and of sm_100.
GROUP_PRODUCTS = "wgmma.mma_async", "tcgen05.mma"
NO_WINDOW = AttentionWindow(32)
FIRST_WITH_FP8 = 89
HOPPER = 90


@dataclass
class Compiler:
    """Compiles instead of launching, for the GPU of a compute capability such as 90."""

    capability: int
    compiled: list[dict[str, object]] = field(default_factory=list)

    def run(self, kernel: JITFunction, *args: object, **kwargs: object) -> None:
        """Compile the kernel for these arguments."""
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        source = _source(kernel, values)
        result = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        self.compiled.append(
            {
                "kernel": kernel.__name__,
                "gpu": self.capability,
                "shared": result.metadata.shared,
                **_resources(result.asm["cubin"]),
                "group_products": sum(result.asm["ptx"].count(name) for name in GROUP_PRODUCTS),
            }
        )


def _source(kernel: JITFunction, values: dict[str, object]) -> ASTSource:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_special and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i64" if abs(value) >= LARGE else "i32"
        else:
            signature[parameter.name] = "fp32"
        if isinstance(value, Tensor) or (is_special and isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, which holds spilled registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found, text.stdout
    return {"registers": int(found[1]), "stack": int(found[2])}


@contextmanager
def instead_of_launches(compiler: Compiler) -> Iterator[None]:
    """Compile instead of launching in this context."""

    def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        compiler.run(kernel, *args, **kwargs)

    launch: Callable[..., object] = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def attention(
    capability: int,
    dtype: torch.dtype,
    head_size: int,
    cache_dtype: torch.dtype | None = None,
    window: AttentionWindow = NO_WINDOW,
    splits: tuple[int, ...] = (1, 16),
) -> None:
    """Both attention kernels and the write, for 8 query heads on 2 KV heads."""
    major_minor = divmod(capability, 10)
    heads = torch.zeros((4, 12, head_size), dtype=dtype)
    queries, keys, values = heads.split([8, 2, 2], dim=1)
    cache = torch.zeros((4, 32, 2, head_size), dtype=cache_dtype or dtype)
    tables = torch.zeros((2, 32), dtype=torch.int32)
    numbers = torch.zeros(4, dtype=torch.int32)
    shape = context_tiles(head_size, dtype.itemsize, major_minor)
    tiles = torch.zeros((1, TILE_FIELDS), dtype=torch.int32)
    context_attention(queries, keys, values, cache, cache, tables, tiles, torch.empty_like(queries), shape, window)
    for num_splits in splits:
        generation_attention(
            queries,
            cache,
            cache,
            tables,
            numbers,
            numbers,
            torch.empty_like(queries),
            generation_tiles(head_size, 4, dtype.itemsize),
            num_splits,
            window,
        )
    angles = torch.zeros((16, head_size // 2))
    rotate_and_write(heads, angles, angles, numbers, numbers, cache, cache)


def others(capability: int, dtype: torch.dtype) -> None:
    """The other kernels."""
    rows = torch.zeros((4, 4096), dtype=dtype)
    add_rms_norm(rows, rows, rows[0], 1e-5)
    add_rms_norm(rows, None, rows[0], 1e-5)
    swiglu(rows)
    logits = torch.zeros((4, 32_000), dtype=dtype)
    numbers = torch.zeros(4)
    choose_tokens(logits, numbers, numbers.int(), numbers, numbers.double())
    log_probs_of(logits, numbers.long())
    pointers = torch.zeros(4, dtype=torch.int64)
    copy_rows(pointers, pointers, torch.zeros((4, 3), dtype=torch.int64), 4096, 32)
    for size in (4096, 14_336) if capability >= FIRST_WITH_FP8 else ():
        quantise_rows(torch.zeros((4, size), dtype=dtype), torch.float8_e4m3fn, 1e-12)


def compile_all(capability: int, head_sizes: list[int]) -> Iterator[dict[str, object]]:
    """What each kernel takes on a GPU of this compute capability, such as 90. Without head sizes, attention is compiled
    with a window and in several splits only, and the other kernels for Hopper only: their tiles do not depend on the
    GPU."""

    def case(name: str, work: Callable[[], None]) -> list[dict[str, object]]:
        compiler = Compiler(capability)
        with instead_of_launches(compiler):
            work()
        return [{"case": name, **row} for row in compiler.compiled]

    for dtype, size in product((torch.bfloat16, torch.float32), head_sizes):
        yield from case(f"{dtype}, head size {size}", partial(attention, capability, dtype, size))
    window, splits = AttentionWindow(32, size=4100, sink=4), (1, 16) if head_sizes else (16,)
    yield from case("window", partial(attention, capability, torch.bfloat16, 128, window=window, splits=splits))
    if head_sizes and capability >= FIRST_WITH_FP8:
        yield from case("fp8", partial(attention, capability, torch.bfloat16, 128, torch.float8_e4m3fn))
    if head_sizes or capability == HOPPER:
        yield from case("others", partial(others, capability, torch.bfloat16))


def main() -> None:
    """Compile what is asked for, and print the result as JSON."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[90, 80, 86, 100, 120], help="compute capabilities")
    parser.add_argument("--head_sizes", type=int, nargs="*", default=[32, 64, 80, 96, 128, 256])
    asked = parser.parse_args()
    results = [row for capability in asked.gpus for row in compile_all(capability, asked.head_sizes)]
    print(json.dumps({"triton": triton.__version__, "results": results}, indent=2))


if __name__ == "__main__":
    main()
