"""What a recording scheduler sends to the process that writes the recording: one frame of MessagePack for each event.

A frame is its length in 4 bytes, little-endian, and the event. Requests are named by the engine's own ids. Times are
seconds: of the engine process's monotonic clock, but for arrivals, which front ends stamp with the time since 1970.
"""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct, field

_LENGTH = struct.Struct("<I")


class Begin(Struct, frozen=True, array_like=True, tag=True):
    """The first event of a recording.

    settings: settings of the engine, by the names of its command line.
    facts: facts of the process, for `run.json`.
    monotonic_s, epoch_s: the same moment on both clocks.
    num_blocks: KV cache blocks that requests can hold.
    """

    engine: str
    version: str
    settings: dict[str, Any]
    facts: dict[str, Any]
    monotonic_s: float
    epoch_s: float
    num_blocks: int


class Added(Struct, frozen=True, array_like=True, tag=True):
    """A request entered the queue.

    in_flight: iterations whose outputs had not come back when the scheduler first saw it.
    computed, is_running: state of a request that is in the engine already, when a recording begins or goes on after
        iterations were lost; its outputs so far are then part of the prompt.
    ignores_end: whether it generates until its maximum, whatever the model says.
    """

    name: str
    arrival_s: float
    prompt_len: int
    max_new_tokens: int
    priority: int = 0
    in_flight: int = 0
    computed: int = 0
    is_running: bool = False
    ignores_end: bool = False


class Ended(Struct, frozen=True, array_like=True, tag=True):
    """A request left.

    outcome: completed, stopped (by its client) or failed.
    hashes: hashes of the full blocks of `hash_size` tokens of prompt and output, each of which depends on the blocks
        before.
    tokens: prompt and output, if they are recorded.
    unhashed: prompt and output as 64-bit integers, where the engine has no hashes; they are not written.
    in_flight: iterations that were decided by then, and whose outputs had not come back.
    """

    name: str
    outcome: str
    num_outputs: int
    hash_size: int
    hashes: list[bytes]
    tokens: list[int] | None = None
    unhashed: bytes = b""
    in_flight: int = 0


class End(Struct, frozen=True, array_like=True, tag=True):
    """The server ends as it should.

    changes: those since the latest iteration.
    """

    changes: list[Added | Ended] = field(default_factory=list)


class Started(Struct, frozen=True, array_like=True):
    """A waiting request runs.

    computed: tokens found in the cache.
    known: tokens to compute, those included.
    """

    name: str
    computed: int
    known: int


class Preempted(Struct, frozen=True, array_like=True):
    """A running request that lost its blocks: for which other one, and for what limit."""

    victim: str
    beneficiary: str
    limit: str = "kv_blocks"


class Head(Struct, frozen=True, array_like=True):
    """The first waiting request that was left in the queue.

    limit: why, as far as the engine's counters say it at once; None if the blocks decide.
    hits: hits of its prefix in the cache, in tokens.
    free_hits: number of the blocks with these hits that no other request holds.
    known: its number of tokens.
    cap: maximum number of tokens of a prompt in one iteration, 0 for no maximum.
    is_alone: whether no request ran beside it.
    """

    name: str
    limit: str | None
    hits: int = 0
    free_hits: int = 0
    known: int = 0
    cap: int = 0
    is_alone: bool = False


class Step(Struct, frozen=True, array_like=True, tag=True):
    """One iteration, sent when its outputs have come back.

    changes: requests that were added, or stopped from outside, since the iteration before was scheduled.
    tokens: tokens of each scheduled request, in the order of scheduling.
    free_blocks: number of free blocks after it was scheduled.
    num_outputs: tokens of each request that got other than one at the end of its prompt or in a generation step; empty
        without draft tokens.
    ended: requests that its outputs ended.
    num_lost: number of iterations before it that were not sent because the queue was full; `present` then describes
        every request that is in the engine after it.
    held: the first running request that gets no token because prompts run, if the engine runs them apart.
    """

    begun_s: float
    submitted_s: float
    ended_s: float
    changes: list[Added | Ended]
    tokens: dict[str, int]
    started: list[Started]
    preempted: list[Preempted]
    head: Head | None
    free_blocks: int
    num_outputs: dict[str, int]
    ended: list[Ended]
    num_lost: int = 0
    present: list[Added] = field(default_factory=list)
    held: str | None = None


Event = Begin | Step | End
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


def write(file: BinaryIO, event: Event) -> None:
    """Write one frame. OSError if the other side is gone."""
    content = _encoder.encode(event)
    file.write(_LENGTH.pack(len(content)))
    file.write(content)


def take(buffer: bytearray) -> Iterator[Event]:
    """The events whose frames are complete in `buffer`, from which they are removed."""
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        event: Event = _decoder.decode(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        yield event
