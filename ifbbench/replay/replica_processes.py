"""Replicas that compute: the executor of each, with its model and KV cache, is in a process of its own.

The loop and the scheduler of a replica stay here, where the router is; a batch goes to the process and its outputs come
back. Keys and values go from the process of one replica to that of another. Only the processes import torch.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from ifbbench.build.engine import Engine, EngineSizes, build_engine, engine_elsewhere, warm_up
from ifbbench.clock import NANOSECONDS, Clock, WallClock
from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import Batch, BlockCopy, StepOutputs
from ifbbench.engine.interfaces import EngineLost
from ifbbench.engine.pickling import dumps, loads
from ifbbench.engine.sent_batches import BatchReader, SentBatch, SentChunk
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.kv.adapters import AdapterSize, AdapterSource
from ifbbench.processes import death_of, end_with_parent, start_python
from ifbbench.replay.single import unlogged, warn_of_refusals
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.prompts import check_vocabulary
from ifbbench.workload.trace import Trace, columns_of

if TYPE_CHECKING:
    from torch import Tensor

START = (
    "from signal import *; signal(SIGINT, SIG_DFL); pthread_sigmask(SIG_UNBLOCK, [SIGINT])\n"
    "from ifbbench.replay.replica_processes import work; work()"
)
# What a process does without an answer.
DROP = "drop"
# Connections of processes that ended meanwhile may wait beside the one that is expected.
BACKLOG = 8
_transfers = count()
_log = logging.getLogger("ifbbench")


class ReplicaJob(NamedTuple):
    """What the process of a replica builds.

    num_sharing: number of replicas that share the memory of the host.
    address: where it takes keys and values of others; None if it neither sends nor gets any.
    """

    config: RunConfig
    beam_width: int
    num_sharing: int
    address: str | None


class KvPart(NamedTuple):
    """Keys and values of a sequence, of positions `start` to `end` - 1.

    tables: its blocks in each attention window.
    copies: copies of other blocks, to be made before.
    """

    tables: tuple[IntArray, ...]
    start: int
    end: int
    copies: tuple[BlockCopy, ...] = ()


class FirstToken(NamedTuple):
    """The first token of a request, and the last chunk of its prompt, which another engine has computed."""

    chunk: SentChunk
    token: int


# The process of the fleet.


class ReplicaProcess:
    """The process of a replica, which does one thing after another.

    name: name of the replica in messages.
    """

    def __init__(self, job: ReplicaJob, name: str) -> None:
        self.job, self.name = job, name
        self._connection, theirs = Pipe()
        self._process: subprocess.Popen[bytes] = start_python(START, theirs, os.environ)
        theirs.close()
        self.post(job)

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, *message: Any) -> None:
        """Ask for something; the answer is the next `result` that was not taken."""
        with suppress(BrokenPipeError, ConnectionError):  # a process that has died; `result` notices it
            self._connection.send_bytes(dumps(message))

    def result(self) -> Any:
        """The answer to the oldest message that was not answered; its exception is raised here. EngineLost if the
        process has ended."""
        try:
            is_error, answer = loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            status = self._process.wait()
            raise EngineLost(f"the process of {self.name} {death_of(status)}") from error
        if is_error:
            raise answer
        return answer

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class AdaptersElsewhere:
    """The LoRA adapters of the engine in a process: an AdapterSource. The process reads them when they are loaded.

    known: the adapters, without their values."""

    def __init__(self, known: AdapterSource, process: ReplicaProcess) -> None:
        self._known, self._process = known, process

    def tasks(self) -> Iterable[int]:
        return self._known.tasks()

    def size(self, task_id: int) -> AdapterSize | None:
        return self._known.size(task_id)

    def add(self, task_id: int, weights: Any, config: Any) -> None:
        raise InputError("adapters that requests bring are not sent to the processes of replicas.")

    def keep(self, task_id: int) -> None:
        pass

    def drop(self, task_id: int) -> None:
        self._process.post(DROP, task_id)


class ProcessExecutor:
    """An Executor whose batches run in the process of a replica, while this process goes on."""

    def __init__(self, process: ReplicaProcess) -> None:
        self.process = process

    def submit(self, batch: Batch) -> None:
        self.process.post("run", SentBatch.of(batch))

    def collect(self) -> StepOutputs:
        outputs: StepOutputs = self.process.result()[0]
        return outputs

    def close(self) -> None:
        """End the process."""
        self.process.end()


class MeasuredExecutor(ProcessExecutor):
    """A ProcessExecutor on a virtual clock. A batch runs at once, alone on the machine, as no other replica runs one
    meanwhile. On the clock it begins when it is submitted, or when the batch before it ends, and takes the time that
    was measured in the process."""

    def __init__(self, process: ReplicaProcess, clock: VirtualClock) -> None:
        super().__init__(process)
        self._clock, self._free_ns = clock, 0
        self._done: deque[tuple[int, StepOutputs]] = deque()

    def submit(self, batch: Batch) -> None:
        super().submit(batch)
        outputs, seconds = self.process.result()
        self._free_ns = max(self._clock.now_ns, self._free_ns) + max(round(seconds * NANOSECONDS), 1)
        self._done.append((self._free_ns, outputs))

    def collect(self) -> StepOutputs:
        end_ns, outputs = self._done.popleft()
        self._clock.wait_until_ns(end_ns)
        return outputs


class ReplicaEngines:
    """Makes the engines of replicas that compute, which end with `stack`. Processes of all `configs` start at once.

    sends: keys and values go from one to another."""

    def __init__(self, stack: ExitStack, trace: Trace, configs: Sequence[RunConfig], sends: bool = False) -> None:
        self._stack, self._trace, self._sends, self._num_sharing = stack, trace, sends, len(configs)
        self._beam_width = columns_of(trace.requests).max_beam_width
        directory = stack.enter_context(TemporaryDirectory(prefix="ifbbench-fleet-")) if sends else None
        self._directory = None if directory is None else Path(directory)
        self._number = 0
        self._started = deque(map(self._start, configs))
        self.first = self._make(configs[0])
        self._is_first_taken = False

    def make(self, config: RunConfig) -> Engine:
        """The engine of the next replica, once its process is ready; on a clock of its own."""
        if not self._is_first_taken:
            self._is_first_taken = True
            return self.first
        with unlogged():
            return self._make(config)

    def _make(self, config: RunConfig) -> Engine:
        process = self._started.popleft() if self._started else self._start(config)
        assert process.job.config == config
        clock = VirtualClock()
        executor = MeasuredExecutor(process, clock)
        engine = _engine_of(config, self._beam_width, executor, clock, self._sends)
        warn_of_refusals(self._trace, engine)
        check_vocabulary(self._trace, engine.model.vocab_size)
        return engine

    def _start(self, config: RunConfig) -> ReplicaProcess:
        address = None if self._directory is None else str(self._directory / str(self._number))
        job = ReplicaJob(config, self._beam_width, self._num_sharing, address)
        process = ReplicaProcess(job, f"replica {self._number}")
        self._stack.callback(process.end)
        self._number += 1
        return process


def engines_in_processes(stack: ExitStack, config: RunConfig, count: int) -> list[Engine]:
    """Engines for live traffic, each in a process, until `stack` ends."""
    processes = [ReplicaProcess(ReplicaJob(config, 1, count, None), f"replica {number}") for number in range(count)]
    for one in processes:
        stack.callback(one.end)
    return [_engine_of(config, 1, ProcessExecutor(one), WallClock()) for one in processes]


def _engine_of(
    config: RunConfig, beam_width: int, executor: ProcessExecutor, clock: Clock, sends: bool = False
) -> Engine:
    """The engine whose `executor` is in a process, once that is ready."""
    process = executor.process
    adapters_of = partial(AdaptersElsewhere, process=process)
    return engine_elsewhere(config, beam_width, executor, clock, process.result(), sends, adapters_of)


def process_of(engine: Engine) -> ReplicaProcess:
    """The process of a replica that computes."""
    assert isinstance(engine.executor, ProcessExecutor)
    return engine.executor.process


def move_kv(
    source: ReplicaProcess, sent: KvPart, target: ReplicaProcess, received: KvPart, first: FirstToken | None
) -> tuple[float, int]:
    """Copy keys and values from one process to another; returns how many seconds that took, and how many bytes there
    were. first: what the request at `target` goes on with, unless that computes it."""
    clock, number = WallClock(), next(_transfers)
    target.post("receive", received, first, number)
    source.post("send", sent, target.job.address, number)
    try:
        num_bytes: int = source.result()
    except IfbbenchError:
        _end_receiving(target, number)
        raise
    target.result()
    return clock.now(), num_bytes


def _end_receiving(target: ReplicaProcess, number: int) -> None:
    """The process that was to send has failed: `target` waits no longer. EngineLost if that has ended."""
    assert target.job.address is not None
    with suppress(OSError), closing(Client(target.job.address)) as connection:
        connection.send_bytes(_head(number, is_sent=False))
    try:
        target.result()
    except EngineLost:
        raise
    except IfbbenchError:
        return  # it has not got all, which is known


def _head(number: int, is_sent: bool) -> bytes:
    """What comes before keys and values: the number of the transfer, and whether they follow."""
    return b"%d %d" % (number, is_sent)


# The process of a replica.


def work() -> None:
    """Build what is asked for, and do what comes, until the fleet's process has ended or kills this one."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    end_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _log.disabled = True  # the fleet's process says it
    messages: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    # Messages are read while a batch runs, so that neither side waits for the other to read.
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    worker: _Worker | None = None
    while True:
        message = messages.get()
        if worker is not None and message[0] == DROP:
            worker.drop(message[1])
            continue
        try:
            if worker is None:
                worker = _Worker(*message)
                answer: Any = EngineSizes.of(worker.engine)
            else:
                answer = worker.do(*message)
            is_error = False
        except Exception as error:
            kind = InputError if isinstance(error, InputError) else IfbbenchError
            answer, is_error = kind(str(error) or repr(error)), True
        with suppress(BrokenPipeError):
            connection.send_bytes(dumps((is_error, answer)))


def _read(connection: Connection, messages: "SimpleQueue[tuple[Any, ...]]") -> None:
    with suppress(EOFError, OSError):
        while True:
            messages.put(loads(connection.recv_bytes()))
    os._exit(0)


class _Worker:
    """The engine in the process of a replica."""

    def __init__(self, job: ReplicaJob) -> None:
        self.engine = build_engine(
            job.config,
            job.beam_width,
            owns_process=True,
            num_sharing=job.num_sharing,
            sends=job.address is not None,
        )
        if self.engine.device != "cpu":
            raise InputError(
                f"--replicas, --router: device {self.engine.device} has one engine; choose --device cpu, on which each "
                "replica has a process, or a simulated device (--device sim:PROFILE)."
            )
        warm_up(self.engine)
        self._reader = BatchReader()
        self._listener = None if job.address is None else Listener(job.address, backlog=BACKLOG)

    def do(self, what: str, *content: Any) -> Any:
        if what == "run":
            return self._run(*content)
        if what == "send":
            return self._send(*content)
        return self._receive(*content)

    def drop(self, task_id: int) -> None:
        """Free the host memory of an adapter."""
        assert self.engine.limits.lora is not None
        self.engine.limits.lora.source.drop(task_id)

    def _run(self, sent: SentBatch) -> tuple[StepOutputs, float]:
        """The outputs of a batch, and how many seconds it took."""
        batch, clock = self._reader.batch(sent), WallClock()
        self.engine.executor.submit(batch)
        outputs = self.engine.executor.collect()
        return outputs, clock.now()

    def _send(self, part: KvPart, address: str, number: int) -> int:
        """Send keys and values to another replica; returns how many bytes. number: of the transfer."""
        num_bytes = 0
        with closing(Client(address)) as connection:
            connection.send_bytes(_head(number, is_sent=True))
            for tensor in self._model_executor.read_kv(part.tables, part.start, part.end):
                data = _bytes_of(tensor)
                connection.send_bytes(data)
                num_bytes += len(data)
        return num_bytes

    def _receive(self, part: KvPart, first: FirstToken | None, number: int) -> None:
        """Take keys and values of another replica. Copies of other blocks are made whatever becomes of them."""
        with ExitStack() as stack:

            def read(like: "Tensor") -> "Tensor":
                connection = opened[0] if opened else stack.enter_context(closing(self._accept(number)))
                opened[:] = [connection]
                tensor = like.new_empty(like.shape)
                connection.recv_bytes_into(_bytes_of(tensor))
                return tensor

            opened = list[Connection]()
            self._model_executor.write_kv(part.tables, part.start, part.end, read, part.copies)
        if first is not None:
            self._model_executor.begin_generation(first.chunk.chunk(), first.token)

    def _accept(self, number: int) -> Connection:
        """The connection of the replica that sends a transfer. Those of others, which have ended, are closed."""
        assert self._listener is not None
        while True:
            connection = self._listener.accept()
            try:
                head = connection.recv_bytes()
            except (EOFError, OSError):
                head = b""
            if head == _head(number, is_sent=True):
                return connection
            connection.close()
            if head == _head(number, is_sent=False):
                raise IfbbenchError("nothing is sent")

    @property
    def _model_executor(self) -> Any:
        return self.engine.executor


def _bytes_of(tensor: "Tensor") -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data
