"""Random numbers by the billion, the same whoever draws them."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Each piece has a generator of its own, so that threads can draw pieces at once: some 15 ms of work.
PIECE = 1 << 22


def normal_values(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Standard normal float32 values of `shape` on the CPU, decided by `seed` and `name`.

    All threads that PyTorch computes with draw; how many they are makes no difference.
    """
    values = torch.empty(shape)

    def draw(number: int, piece: Tensor) -> None:
        digest = hashlib.sha256(f"{seed} {name} {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        with torch.inference_mode():  # which is each thread's own
            piece.normal_(generator=generator)

    pieces = torch.split(values.view(-1), PIECE)
    if len(pieces) == 1:
        draw(0, pieces[0])
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(draw, range(len(pieces)), pieces))
    return values
