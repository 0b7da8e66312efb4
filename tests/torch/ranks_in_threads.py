"""Ranks as threads of one process, which exchange tensors through memory."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from ifbbench.models.config import ModelConfig
from ifbbench.torch.model.part import ModelPart

WAIT_S = 300
Result = TypeVar("Result")


class Ranks:
    """`tp_size` · `pp_size` ranks, of which one computes at a time: Triton's interpreter has state of its own.

    sums: how often those of one layer were summed."""

    def __init__(self, tp_size: int, pp_size: int) -> None:
        self.tp_size, self.pp_size = tp_size, pp_size
        self.barriers = [threading.Barrier(tp_size) for _ in range(pp_size)]
        self.parts: list[list[Tensor]] = [[torch.empty(0)] * tp_size for _ in range(pp_size)]
        self.hidden: dict[int, SimpleQueue[Tensor]] = {rank: SimpleQueue() for rank in range(tp_size * pp_size)}
        self.outputs: dict[int, SimpleQueue[bytes]] = {rank: SimpleQueue() for rank in range(tp_size * pp_size)}
        self.computing = threading.Lock()
        self.sums = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Other ranks may compute meanwhile."""
        self.computing.release()
        try:
            yield
        finally:
            self.computing.acquire()

    def run(self, model: ModelConfig, work: Callable[[ModelPart], Result], ep_size: int = 1) -> list[Result]:
        """`work(part)` of each rank, in their order. ep_size: parts of the ranks with whole experts."""
        parts = [
            ModelPart(
                model,
                ThreadLinks(self, rank),
                self.tp_size,
                rank % self.tp_size,
                self.pp_size,
                rank // self.tp_size,
                ep_size,
            )
            for rank in range(self.tp_size * self.pp_size)
        ]

        def compute(part: ModelPart) -> Result:
            with self.computing:
                return work(part)

        with ThreadPoolExecutor(len(parts)) as threads:
            return list(threads.map(compute, parts, timeout=WAIT_S))


class ThreadLinks:
    """`ifbbench.torch.model.part.Links` of a rank."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.stage, self.tp_rank = divmod(rank, ranks.tp_size)

    def _exchange(self, part: Tensor) -> list[Tensor]:
        self.ranks.parts[self.stage][self.tp_rank] = part.clone()
        with self.ranks.waiting():
            self.ranks.barriers[self.stage].wait(WAIT_S)
            parts = list(self.ranks.parts[self.stage])
            self.ranks.barriers[self.stage].wait(WAIT_S)
        return parts

    def sum(self, partial: Tensor) -> Tensor:
        if self.rank == 0:
            self.ranks.sums += 1
        return torch.stack(self._exchange(partial)).sum(0)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchange(part), dim=1)

    def send(self, hidden: Tensor) -> None:
        self.ranks.hidden[self.rank + self.ranks.tp_size].put(hidden.clone())

    def receive(self, hidden: Tensor) -> None:
        with self.ranks.waiting():
            received = self.ranks.hidden[self.rank].get(timeout=WAIT_S)
        hidden.copy_(received)

    def send_outputs(self, outputs: bytes) -> None:
        if self.tp_rank == 0:
            for rank in range(self.rank):
                self.ranks.outputs[rank].put(outputs)

    def receive_outputs(self) -> bytes:
        with self.ranks.waiting():
            return self.ranks.outputs[self.rank].get(timeout=WAIT_S)
