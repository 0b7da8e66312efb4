"""What every kernel launch needs: whether it is interpreted, and an error that names the kernel and the shapes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

from ifbbench.errors import IfbbenchError

# `tl.dot` wants at least 16 rows, columns and summands; the interpreter would take fewer, a GPU does not.
SMALLEST_DOT = 16
# Whether Triton runs kernels in its interpreter, on the CPU; it decides so when a kernel is defined.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


class KernelError(IfbbenchError, RuntimeError):
    """A kernel that could not be compiled or started. It names the kernel and its tensors."""


def upcasts(*tensors: Tensor) -> bool:
    """Whether dot products must be computed in float32: the interpreter's are silently wrong in bfloat16."""
    return IS_INTERPRETED and any(tensor.dtype == torch.bfloat16 for tensor in tensors)


def padded_size(size: int) -> int:
    """The power of two that a tile needs for `size` values, at least what `tl.dot` takes."""
    return max(SMALLEST_DOT, int(triton.next_power_of_2(size)))


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@contextmanager
def launching(kernel: str, **tensors: Tensor) -> Iterator[None]:
    """KernelError in place of whatever goes wrong inside, with the shapes and data types of `tensors`.

    Out of memory stays what it is: there the answer is a smaller batch.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")
                           for name, tensor in tensors.items())  # fmt: skip
        raise KernelError(f"the kernel {kernel} failed ({type(error).__name__}: {error}); its tensors: {shapes}. "
                          "Run with --device cpu, and report this message.") from error
