"""Communication between ranks by torch.distributed: tensors within the model (NCCL on GPUs, gloo on CPUs), and messages
between the processes (gloo)."""

import os
import pickle
import platform
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ifbbench.errors import InputError
from ifbbench.models.config import ModelConfig
from ifbbench.settings.config import RunConfig
from ifbbench.torch.device import is_out_of_memory
from ifbbench.torch.model.part import ModelPart
from ifbbench.torch.ranks import Place, RankFailed, place_in_environment

# For what may take long on one rank only: importing, loading a model, reading a trace.
START_TIMEOUT_S = 1800.0
SHORTEST_RENDEZVOUS_S = 60.0
DEFAULT_TIMEOUT_S = 300.0
# Bytes of the first piece of a message, its header included. A longer message has a second piece.
FIRST_PIECE = 1024
# The length of the message, the run, and the number of the message in that run from this rank to the other.
HEADER = struct.Struct("<QQQ")
ROOM = FIRST_PIECE - HEADER.size
# Messages and hidden states that were sent and may not have arrived.
MAX_PENDING = 16
TIMED_OUT_TEXTS = ("timed out", "timeout")
# Where a rank stores why it ends.
FAILURE = "ifbbench/failure"

Group = Any  # torch.distributed's type is not public


class RankLost(RankFailed):
    """Another rank does not answer: its process has ended, or hangs."""

    is_lost = True


class RankTimedOut(RankLost):
    """Another rank did not answer in time."""

    is_timed_out = True


class MessageOutOfOrder(RankFailed):
    """A message of another run, or another one of this run, than the one that is expected."""

    def __init__(self, rank: int, source: int, found: list[int], expected: list[int]) -> None:
        super().__init__(
            f"rank {rank} received message {found[1]} of run {found[0]} from rank {source}, and expected message "
            f"{expected[1]} of run {expected[0]}. All ranks must run the same version of ifbbench."
        )


class Communicator:
    """The ranks of a batch manager that runs a model on several devices. All ranks make it at the same time.

    Rank r is rank r mod `tp_size` of those that share each layer of pipeline stage r // `tp_size`. The processes find
    each other by the environment that torchrun or mpirun sets, unless torch.distributed is initialised already.

    device: auto, cpu or cuda; on CUDA a rank has the GPU of its number on its machine.
    timeout_s: a rank that does not answer for so long has failed.
    ranks: where each rank is, for `run.json`.

    InputError if the number of processes does not match, or there are too few GPUs.
    """

    def __init__(
        self, tp_size: int = 1, pp_size: int = 1, *, device: str = "auto", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.tp_size, self.pp_size, self.timeout_s = tp_size, pp_size, timeout_s
        place = join(timeout_s)
        self.rank, self.world_size, self.local_size = place.rank, place.world_size, place.local_size
        if tp_size * pp_size != self.world_size:
            raise InputError(
                f"tp_size {tp_size} and pp_size {pp_size} need {tp_size * pp_size} processes, and there "
                f"are {self.world_size}; launch as many."
            )
        self.stage, self.tp_rank = divmod(self.rank, tp_size)
        self.device = _device(device, place)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._start = _new_group(range(self.world_size), "gloo", START_TIMEOUT_S)
        self._messages = _new_group(range(self.world_size), "gloo", timeout_s)
        # Every rank takes part in the making of every group.
        of_stages = [
            _new_group(range(stage * tp_size, (stage + 1) * tp_size), backend, timeout_s) for stage in range(pp_size)
        ]
        self._layer = of_stages[self.stage]
        # From each rank to the one in the next stage: NCCL sends and receives in groups of two.
        pairs = [_new_group((rank, rank + tp_size), backend, timeout_s) for rank in range(self.world_size - tp_size)]
        self._next = pairs[self.rank] if self.stage < pp_size - 1 else None
        self._previous = pairs[self.rank - tp_size] if self.stage else None
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()
        self._run = 0
        # Messages of this run to and from each rank.
        self._num_sent, self._num_received = Counter[int](), Counter[int]()
        own = {
            "rank": self.rank,
            "stage": self.stage,
            "tp_rank": self.tp_rank,
            "device": str(self.device),
            "host": platform.node(),
            "pid": os.getpid(),
        }
        self.ranks: list[dict[str, Any]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(self.ranks, own, group=self._start)

    def part(self, model: ModelConfig, ep_size: int = 1) -> ModelPart:
        """This rank's part of `model`, with experts in `ep_size` parts. InputError if the ranks cannot share it."""
        return ModelPart(model, self, self.tp_size, self.tp_rank, self.pp_size, self.stage, ep_size)

    def begin_run(self, run: int) -> None:
        """Messages from now on are of this run. Those of another run are refused."""
        self._wait_for_pending(0)
        self._run = run
        self._num_sent.clear()
        self._num_received.clear()

    def close(self) -> None:
        """Leave: other ranks get an error as soon as they wait for this one."""
        for group in (self._start, self._messages, self._layer, self._next, self._previous):
            if group is not None:
                dist.destroy_process_group(group)

    # Before the run, when ranks may be minutes apart.

    def smallest(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value over all ranks."""
        smallest = torch.tensor(values, dtype=torch.int64)
        with self._answered("all ranks"):
            dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._start)
        return [int(value) for value in smallest]

    # Tensors: `ifbbench.torch.model.part.Links`.

    def sum(self, partial: Tensor) -> Tensor:
        if partial.numel():
            with self._answered("the ranks of a layer"):
                dist.all_reduce(partial, group=self._layer)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        if not part.numel():
            return part.new_empty((len(part), part.shape[1] * self.tp_size))
        parts = [torch.empty_like(part) for _ in range(self.tp_size)]
        with self._answered("the ranks of a layer"):
            dist.all_gather(parts, part.contiguous(), group=self._layer)
        return torch.cat(parts, dim=1)

    def send(self, hidden: Tensor) -> None:
        self._send(hidden.contiguous(), self.rank + self.tp_size, self._next)

    def receive(self, hidden: Tensor) -> None:
        source = self.rank - self.tp_size
        with self._answered(f"rank {source}"):
            dist.recv(hidden, source, group=self._previous)

    def send_outputs(self, outputs: bytes) -> None:
        if self.tp_rank == 0:
            self._send_message(outputs, range(self._last_rank))

    def receive_outputs(self) -> bytes:
        return self.receive_message(self._last_rank)

    # Messages.

    def publish(self, message: bytes) -> None:
        """Send `message` from rank 0 to all others, without waiting for them."""
        self._send_message(message, range(1, self.world_size))

    def wait_for_received(self) -> None:
        """Wait until the others have received what was published. RankTimedOut if one does not."""
        self._wait_for_pending(0)

    def answer(self, message: bytes) -> None:
        """Send `message` to rank 0."""
        self._send_message(message, [0])
        self._wait_for_pending(0)

    def receive_message(self, source: int) -> bytes:
        """The next message from this rank. MessageOutOfOrder if it is another than the one that is expected."""
        first = torch.empty(FIRST_PIECE, dtype=torch.uint8)
        with self._answered(f"rank {source}"):
            dist.recv(first, source, group=self._messages)
            packed = first.numpy().tobytes()
            length, *found = HEADER.unpack_from(packed)
            expected = [self._run, self._num_received[source]]
            if found != expected:
                raise MessageOutOfOrder(self.rank, source, found, expected)
            self._num_received[source] += 1
            if length <= ROOM:
                return packed[HEADER.size : HEADER.size + length]
            rest = torch.empty(length - ROOM, dtype=torch.uint8)
            dist.recv(rest, source, group=self._messages)
        return packed[HEADER.size :] + rest.numpy().tobytes()

    @property
    def _last_rank(self) -> int:
        """The first rank of the last stage, which has the outputs."""
        return self.world_size - self.tp_size

    def _send_message(self, message: bytes, ranks: Sequence[int]) -> None:
        first = message[:ROOM].ljust(ROOM, b"\0")
        rest = torch.frombuffer(bytearray(message[ROOM:]), dtype=torch.uint8) if len(message) > ROOM else None
        for rank in ranks:
            header = HEADER.pack(len(message), self._run, self._num_sent[rank])
            self._num_sent[rank] += 1
            self._send(torch.frombuffer(bytearray(header + first), dtype=torch.uint8), rank, self._messages)
            if rest is not None:
                self._send(rest, rank, self._messages)

    def _send(self, tensor: Tensor, rank: int, group: Group) -> None:
        """Send without waiting. The memory is kept until the tensor has been sent."""
        with self._answered(f"rank {rank}"):
            work = dist.isend(tensor, rank, group=group)
        assert work is not None
        self._pending.append((work, tensor))
        self._wait_for_pending(MAX_PENDING * self.world_size)

    def _wait_for_pending(self, allowed: int) -> None:
        with self._answered("another rank"):
            while len(self._pending) > allowed:
                self._pending.popleft()[0].wait()

    @contextmanager
    def _answered(self, by: str) -> Iterator[None]:
        """Convert the errors of torch.distributed. They name no rank."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            timed_out = any(text in str(error).lower() for text in TIMED_OUT_TEXTS)
            if timed_out:
                if self.rank == 0:
                    report_failure("no answer in time")
                raise RankTimedOut(
                    f"rank {self.rank} waits for {by}: no answer for {self.timeout_s:g} s (--rank_timeout)"
                ) from error
            raise _lost(f"rank {self.rank} waits for {by}: the connection is lost") from error


def _new_group(ranks: Sequence[int], backend: str, timeout_s: float) -> Group:
    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)


def _device(name: str, place: Place) -> torch.device:
    count = torch.cuda.device_count() if name in ("auto", "cuda") else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if place.local_rank >= count:
        raise InputError(
            f"--device {name}: {place.local_size} ranks on this machine need as many GPUs, and PyTorch "
            f"finds {count}. Choose a smaller --tp_size or --pp_size, or --device cpu."
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


# All ranks of a launcher.


def join(timeout_s: float) -> Place:
    """Find the other ranks of the launcher, at the first call; returns the place of this process. InputError if there
    is no launcher, or a rank is missing."""
    place = place_in_environment()
    if not dist.is_initialized():
        if place is None:
            raise InputError(
                "a communicator needs several processes: start them with torchrun or mpirun, or let "
                "`ifbbench run` do so."
            )
        if place.local_size == place.world_size and platform.system() == "Linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout_s = max(timeout_s, SHORTEST_RENDEZVOUS_S)
        try:
            dist.init_process_group(
                "gloo",
                init_method=place.address(),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"rank {place.rank} of {place.world_size}: the other ranks were not found within "
                f"{timeout_s:g} s at {place.address()}; check that all were started ({error})."
            ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    if place is None:  # initialised by the program
        return Place(rank, size, rank, size)
    return Place(rank, size, place.local_rank, place.local_size)


@cache
def communicator_for(tp_size: int, pp_size: int, device: str, timeout_s: float) -> Communicator:
    """The communicator of these ranks, made at the first call."""
    return Communicator(tp_size, pp_size, device=device, timeout_s=timeout_s)


def communicator_of(config: RunConfig) -> Communicator:
    """The communicator of a run with `config`. RankLost if a rank fails to make it."""
    try:
        return communicator_for(config.tp_size, config.pp_size, config.device, config.rank_timeout)
    except RuntimeError as error:
        raise _lost(f"rank {dist.get_rank()} cannot connect to the others: {error}") from error


def leave() -> None:
    """Close all connections to other ranks. At exit PyTorch would do so too late, and abort the process."""
    dist.destroy_process_group()


def report_failure(reason: str) -> bool:
    """Store why this rank ends, for rank 0, before the connections of this rank are closed. Whether that succeeded."""
    with suppress(RuntimeError, ValueError):
        _store().set(FAILURE, f"in rank {dist.get_rank()}, {reason}")
        return bool(_store().check([FAILURE]))
    return False


def rank_0_reports(within_s: float) -> bool:
    """Whether rank 0 has noticed a failure."""
    noticed = threading.Event()

    def look() -> None:
        while not _store().check([FAILURE]):
            noticed.wait(within_s / 20)
        noticed.set()

    threading.Thread(target=look, daemon=True).start()  # for ever, if the process of rank 0 is stopped
    return noticed.wait(within_s)


def _lost(reason: str) -> RankLost:
    """The error of a lost connection: on rank 0, what a rank has reported before it closed its own; else `reason`."""
    if dist.get_rank() == 0 and _store().check([FAILURE]):
        reason = _store().get(FAILURE).decode()
    return RankLost(reason)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@cache
def _world() -> Group:
    return _new_group(range(dist.get_world_size()), "gloo", START_TIMEOUT_S)


def share(content: Any) -> Any:
    """The `content` of rank 0, on all ranks of the launcher. RankLost if one has ended."""
    message = [pickle.dumps(content)]
    try:
        dist.broadcast_object_list(message, src=0, group=_world())
    except RuntimeError as error:
        raise _lost("the connection to another rank is lost") from error
    return pickle.loads(message[0])
