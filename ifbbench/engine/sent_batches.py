"""Batches in a form that can be sent to an executor in another process: with all that it reads of requests and tables.

Needs `ifbbench.engine.pickling`, by which both sides pickle."""

from typing import Any, NamedTuple

import numpy as np

from ifbbench.engine.arrays import Int64Array, IntArray
from ifbbench.engine.batch import Batch
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions, SamplingParams, StopConditions

NO_TABLE = np.zeros((0, 0, 0), np.int32)


class SentRequest(Request):
    """A request as an executor reads it.

    tokens: tokens from position `first` on.
    """

    first: int
    tokens: IntArray

    def tokens_between(self, start: int, stop: int) -> IntArray:
        return self.tokens[start - self.first : stop - self.first]


class SentChunk(NamedTuple):
    """A context chunk with what an executor reads of its request.

    tokens: tokens of the request from position `first` on.
    """

    slot: int
    start: int
    length: int
    prompt_len: int
    original_prompt_len: int
    first: int
    tokens: IntArray
    sampling: SamplingParams
    options: OutputOptions
    stop: StopConditions
    beam_width: int
    lora_task_id: int | None

    @classmethod
    def of(cls, chunk: ContextChunk) -> "SentChunk":
        request, first = chunk.request, chunk.start
        if chunk.is_last and request.sampling.changes_logits:  # the executor counts the tokens of the whole prompt
            first = 0
        return cls(
            request.slot,
            chunk.start,
            chunk.length,
            request.prompt_len,
            request.original_prompt_len,
            first,
            request.tokens_between(first, chunk.start + chunk.length),
            request.sampling,
            request.options,
            request.stop,
            request.beam_width,
            request.lora_task_id,
        )

    def chunk(self) -> ContextChunk:
        request = SentRequest(
            0,
            self.original_prompt_len,
            1,
            beam_width=self.beam_width,
            lora_task_id=self.lora_task_id,
            sampling=self.sampling,
            options=self.options,
            stop=self.stop,
        )
        request.slot, request.prompt_len = self.slot, self.prompt_len
        request.first, request.tokens = self.first, self.tokens
        return ContextChunk(request, self.start, self.length)


class SentBatch(NamedTuple):
    """A batch.

    rest: the batch without its chunks and block tables.
    rows: the slots of the requests.
    tables: the block table rows of these slots, for each attention window.
    num_slots: number of rows of the whole tables.
    """

    rest: Batch
    chunks: tuple[SentChunk, ...]
    rows: Int64Array
    tables: tuple[IntArray, ...]
    num_slots: int

    @classmethod
    def of(cls, batch: Batch) -> "SentBatch":
        rows = np.concatenate([[chunk.request.slot for chunk in batch.context], batch.slots]).astype(np.int64)
        return cls(
            batch._replace(context=(), block_tables=NO_TABLE, window_tables=()),
            tuple([SentChunk.of(chunk) for chunk in batch.context]),
            rows,
            tuple([table[rows] for table in (batch.block_tables, *batch.window_tables)]),
            len(batch.block_tables),
        )


class BatchReader:
    """Makes batches of what is sent. Their block tables have the rows of requests that run."""

    def __init__(self) -> None:
        self._tables: list[Any] = []

    def batch(self, sent: SentBatch) -> Batch:
        if not self._tables:
            self._tables = [np.zeros((sent.num_slots, *rows.shape[1:]), rows.dtype) for rows in sent.tables]
        for table, rows in zip(self._tables, sent.tables, strict=True):
            table[sent.rows] = rows
        first, *others = self._tables
        chunks = tuple([chunk.chunk() for chunk in sent.chunks])
        return sent.rest._replace(context=chunks, block_tables=first, window_tables=tuple(others))
