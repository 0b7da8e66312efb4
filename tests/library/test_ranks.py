"""Batch managers with a communicator: what they refuse, and what each rank decides by. Servers: see test_library.py."""

import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench.build.engine import build_engine
from ifbbench.build.ranks import NOTHING, RankLoop, RanksDiffer
from ifbbench.clock import WallClock
from ifbbench.engine.batch import NO_OUTPUTS, StepOutputs
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.errors import InputError
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import Overlap
from ifbbench.torch.communicator import HEADER, Communicator
from ifbbench.torch.ranks import RankFailed, cause_of
from tests.engine.engine import scheduler_of

WAIT_S = 300
LIMITS = BatchingConfig(
    "max_utilization",
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=128,
    max_input_len=64,
    tokens_per_block=8,
    num_blocks=16,
)


class Wire:
    """Two ranks that send messages to each other."""

    def __init__(self) -> None:
        self.messages: dict[int, deque[bytes]] = {0: deque(), 1: deque()}

    def communicator(self, rank: int) -> Any:
        def receive(source: int) -> bytes:
            return self.messages[rank].popleft()

        return SimpleNamespace(
            rank=rank,
            world_size=2,
            timeout_s=1e9,
            publish=self.messages[1].append,
            close=list,
            answer=self.messages[0].append,
            receive_message=receive,
        )


def lead(wire: Wire, lengths: list[int], stop: int | None = None, interval: int = 1) -> tuple[RankLoop, list[Response]]:
    """Rank 0 runs requests of these output lengths, which arrive one an iteration. stop: ended from outside."""
    waiting = [
        Request(number, 20, length, prompt_tokens=np.arange(20, dtype=np.int32))
        for number, length in enumerate(lengths)
    ]
    responses: list[Response] = []
    loop = RankLoop(
        wire.communicator(0),
        interval,
        LIMITS,
        NullExecutor(),
        WallClock(),
        lambda count: [waiting.pop(0)] if waiting and count else [],
        responses.append,
        poll_stop_signals=lambda: [1] if loop.iteration == 5 else [],
    )
    while loop.step():
        if stop is not None and loop.iteration == 7:
            loop.stop(stop)
    return loop, responses


def follower(wire: Wire, limits: BatchingConfig = LIMITS) -> RankLoop:
    return RankLoop(wire.communicator(1), 1, limits, NullExecutor(), WallClock())


class MeetingExecutor(NullExecutor):
    """Its ranks wait for each other when a batch is collected, as a sum over ranks does."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def collect(self) -> StepOutputs:
        self.barrier.wait(WAIT_S)
        return NO_OUTPUTS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"overlap": Overlap.PARTITIONED},
        {"overlap": Overlap.ASYNC},
        {"pp_size": 3},
        {"overlap": Overlap.PARTITIONED, "num_blocks": 10},
    ],
    ids=str,
)
def test_ranks_that_wait_for_each_other(changes: dict[str, Any]) -> None:
    """Several iterations in flight may be collected one after the other."""
    barrier, queues = threading.Barrier(2), [SimpleQueue[bytes](), SimpleQueue[bytes]()]
    limits = replace(LIMITS, **changes)

    def communicator(rank: int) -> Any:
        return SimpleNamespace(
            rank=rank,
            world_size=2,
            timeout_s=1e9,
            publish=queues[1].put,
            answer=queues[0].put,
            receive_message=lambda source: queues[rank].get(timeout=WAIT_S),
        )

    other = RankLoop(communicator(1), 1, limits, MeetingExecutor(barrier), WallClock())
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(other.follow)
        waiting = [Request(number, 20, 10 + 7 * number) for number in range(8)]
        loop = RankLoop(
            communicator(0),
            1,
            limits,
            MeetingExecutor(barrier),
            WallClock(),
            lambda count: [waiting.pop(0)] if waiting and count else [],
        )
        while loop.step():
            pass
        loop.end_others()
        ended.result(WAIT_S)
    assert other.iteration == loop.iteration > 60


@pytest.mark.parametrize("stop", [None, 0])
def test_the_other_rank_decides_the_same(stop: int | None) -> None:
    """With pauses, stop signals and a request that is stopped between iterations."""
    wire = Wire()
    leader, responses = lead(wire, [30, 40, 50, 10, 20], stop)
    wire.messages[1].append(NOTHING)  # as while rank 0 waits
    other = follower(wire)
    # Rank 0 sends its end, and reads the other's answer.
    leader._log.add("end")
    leader._log.send()
    other.follow()
    assert wire.messages[0].popleft().decode() == leader._digests.digest.hexdigest()
    assert other.iteration == leader.iteration > 20
    assert [response.request.request_id for response in responses if response.is_final].count(1) == 1
    assert scheduler_of(other).kv_cache.num_used == scheduler_of(leader).kv_cache.num_used == 0


def test_a_rank_with_other_limits_differs() -> None:
    wire = Wire()
    leader, _ = lead(wire, [30, 40, 50, 10, 20])
    leader._log.add("end")
    leader._log.send()
    with pytest.raises(Exception, match=r"rank 1 decided otherwise than rank 0 in iteration \d+") as raised:
        follower(wire, replace(LIMITS, num_blocks=12)).follow()
    assert isinstance(cause_of(raised.value), RanksDiffer)


def test_rank_0_compares_whole_schedules_at_the_end() -> None:
    wire = Wire()
    leader, _ = lead(wire, [30, 40])
    wire.messages[0].append(b"another digest")
    with pytest.raises(RanksDiffer, match="rank 1 decided otherwise than rank 0 in the"):
        leader.end_others()


def test_the_end_of_rank_0_ends_the_other() -> None:
    wire = Wire()
    leader, _ = lead(wire, [3])
    leader.fail(ValueError("no more memory"))
    with pytest.raises(RankFailed, match="rank 0 ended early: no more memory"):
        follower(wire).follow()


@pytest.mark.parametrize(("run", "number"), [(3, 0), (4, 1)])
def test_a_message_of_another_run_or_out_of_order_is_refused(run: int, number: int, monkeypatch) -> None:
    def receive(tensor: torch.Tensor, source: int, group: object) -> None:
        packed = HEADER.pack(5, run, number) + b"hello"
        tensor[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    monkeypatch.setattr("torch.distributed.recv", receive)
    communicator = Communicator.__new__(Communicator)
    communicator.rank, communicator._messages = 1, None
    communicator._pending, communicator._num_sent, communicator._num_received = deque(), Counter(), Counter()
    communicator.begin_run(4)
    with pytest.raises(RankFailed, match=f"message {number} of run {run} from rank 0, and expected message 0 of run 4"):
        communicator.receive_message(0)
    communicator.begin_run(3)
    if number == 0:
        assert communicator.receive_message(0) == b"hello"


def test_a_model_for_several_ranks_needs_a_communicator() -> None:
    with pytest.raises(InputError, match="this runs in one process, and they need 2"):
        build_engine(RunConfig(device="cpu", tp_size=2))


def test_a_communicator_needs_several_processes() -> None:
    with pytest.raises(InputError, match="start them with torchrun or mpirun"):
        Communicator(tp_size=2, device="cpu")
