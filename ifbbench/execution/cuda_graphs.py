"""Generation-only batches as CUDA graphs: a pass is one launch instead of a dozen a layer.

A graph replays the same kernels on the same memory. So there is one for each of a ladder of batch sizes, with inputs of
its own in place; a batch takes the smallest that it fits and fills it up with sequences of length 0, which read no keys
and write none. Matrix products over a few rows more cost next to nothing, for they are bound by reading the weights.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.batch import Batch
from ifbbench.engine.request_table import IntArray
from ifbbench.execution.cache_windows import CacheWindow, cache_rows
from ifbbench.execution.packing import PackedBatch, table_rows
from ifbbench.execution.prepared import ModelPass
from ifbbench.kernels.context_attention import TILE_FIELDS
from ifbbench.model.attention import LayerInputs
from ifbbench.model.kernel_llama import KernelLlama
from ifbbench.model.llama import ForwardInputs
from ifbbench.model.paged_batch import NOWHERE, PagedBatch, host_numbers, parts_of

# Each size is at most half as large again as the one before from here on, so a third of a batch is padding at most.
FIRST_SIZES = (1, 2, 4, 8)
# Larger batches keep the GPU busy longer than the host takes to launch their kernels.
LARGEST_SIZE = 256
# Runs some work once and gives something that does the same again, on the same memory.
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
# PyTorch gives its constructor no types.
_new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream


def ladder(most_sequences: int) -> list[int]:
    """Batch sizes to have graphs for, ascending: 1, 2, 4, 8, 12, 16, 24, 32, 48, … up to the first that holds
    `most_sequences`, and to LARGEST_SIZE."""
    sizes = list(FIRST_SIZES)
    while sizes[-1] < min(most_sequences, LARGEST_SIZE):
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(power * 3 // 2 if sizes[-1] == power else 2 * power)
    return sizes[: bisect_left(sizes, min(most_sequences, LARGEST_SIZE)) + 1]


class CudaGraphRecorder:
    """Makes CUDA graphs that share the memory of what only lives within a pass, for one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _new_stream()

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A graph of `work`, whose result lies at the same place after each replay."""
        # Once beforehand: it compiles kernels and makes handles, which cannot be recorded. On the same stream, for
        # libraries have working memory for each. The recording begins with a wait for all of it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True)
class WindowShape:
    """What a graph needs to know of an attention window. table_width: blocks of a sequence. longest: most keys that a
    query may see."""

    window: CacheWindow
    table_width: int
    longest: int


class GenerationGraphs:
    """Graphs of `model` over the cache `windows`, each made when it is first wanted, or all of them by `record_all`.

    most_sequences: in a batch. max_seq_len: of a sequence, in tokens. record: how work is made repeatable, if not as
    CUDA graphs.
    """

    def __init__(
        self, model: KernelLlama, windows: Sequence[CacheWindow], most_sequences: int, max_seq_len: int,
        record: Recorder | None = None,
    ) -> None:
        self._model = model
        self._windows = windows
        self._sizes = ladder(most_sequences)
        self._max_seq_len = max_seq_len
        self._record = record or CudaGraphRecorder()
        self._shapes: list[WindowShape] = []
        self._graphs: dict[int, _Graph] = {}

    def takes(self, batch: Batch) -> bool:
        """Whether `batch` can be run as a graph: generation only, without beams, and not too many requests."""
        return not batch.context and batch.beam_width == 1 and 0 < len(batch.slots) <= self._sizes[-1]

    def prepare(self, batch: Batch, packed: PackedBatch) -> ModelPass:
        """The pass of a batch that `takes` says yes to. Its logits stay where they are until the next pass.

        Reads the block tables before it returns.
        """
        size = self._sizes[bisect_left(self._sizes, len(batch.slots))]
        tables = [table_rows(window.tables_of(batch, index)) for index, window in enumerate(self._windows)]
        if not self._shapes:
            self._shapes = [WindowShape(window, table.shape[1], min(window.rule.size, self._max_seq_len))
                            for window, table in zip(self._windows, tables, strict=True)]  # fmt: skip
        numbers = [
            host_numbers(_window_numbers(packed, table, window, size), self._model.device)
            for window, table in zip(self._windows, tables, strict=True)
        ]
        return partial(self._graph(size).run, numbers)

    def record_all(self, hear: Callable[[int, int], None]) -> None:
        """Make the graphs that are not there yet, the largest first: smaller ones find room in its memory.

        Nothing is done until a batch has been run, for only then it is known how many blocks a sequence may have. hear:
        is told how many of how many graphs are there.
        """
        if not self._shapes:
            return
        for number, size in enumerate(reversed(self._sizes)):
            self._graph(size)
            hear(number + 1, len(self._sizes))

    def _graph(self, size: int) -> "_Graph":
        if size not in self._graphs:
            self._graphs[size] = _Graph(self._model, self._shapes, size, self._record)
        return self._graphs[size]


def padded(values: NDArray[np.integer], size: int, filling: int) -> NDArray[np.integer]:
    """`values` [..., rows] with `filling` behind them, [..., size]; flat."""
    rows = np.full((*values.shape[:-1], size), filling, np.int32)
    rows[..., : values.shape[-1]] = values
    return rows.ravel()


def _window_numbers(
    packed: PackedBatch, tables: IntArray, window: CacheWindow, size: int
) -> list[NDArray[np.integer]]:
    """What `_Graph` says of a window, for `size` sequences. Of the block tables, so much as this batch has blocks."""
    used = tables[:, : window.rule.blocks_used(int(packed.ends.max(initial=0)))][packed.spans.table_rows]
    return [padded(packed.positions, size, 0), padded(packed.ends, size, 0),
            padded(cache_rows(packed, tables, window), size, NOWHERE), padded(used.T, size, 0)]  # fmt: skip


class _Graph:
    """One pass over `size` sequences. Its numbers, int32, in one piece of memory for each window: positions [size],
    lengths [size], cache rows [size] and block tables [blocks, size]. The first blocks of all sequences lie together,
    so a batch brings no more than it has."""

    def __init__(self, model: KernelLlama, shapes: Sequence[WindowShape], size: int, record: Recorder) -> None:
        self._model = model
        # Until the first batch comes, all of it is padding.
        none = np.empty(0, np.int32)
        self._numbers = [
            host_numbers([padded(none, size, 0), padded(none, size, 0), padded(none, size, NOWHERE),
                          padded(np.empty((shape.table_width, 0), np.int32), size, 0)], model.device)
            .to(model.device, non_blocking=True)
            for shape in shapes
        ]  # fmt: skip
        self._tokens = torch.zeros(size, dtype=torch.int64, device=model.device)
        self._inputs = self._static_inputs(shapes, size)
        self._replay = record(lambda: model.forward(self._inputs))

    def run(self, numbers: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """Logits of the batch, [tokens, vocabulary]. numbers: of each window, in host memory, as far as they go."""
        for here, new in zip(self._numbers, numbers, strict=True):
            here[: len(new)].copy_(new, non_blocking=True)
        self._tokens[: len(tokens)].copy_(tokens)
        return self._replay()[: len(tokens)]

    def _static_inputs(self, shapes: Sequence[WindowShape], size: int) -> ForwardInputs:
        device = self._model.device
        everyone = torch.arange(size, device=device)
        inputs: dict[int, LayerInputs] = {}
        for numbers, shape in zip(self._numbers, shapes, strict=True):
            positions, ends, rows, tables = parts_of(numbers, [size, size, size, shape.table_width * size])
            paged = PagedBatch(
                shape.window.rule, 0, everyone.new_empty((0, TILE_FIELDS), dtype=torch.int32),
                tables.view(shape.table_width, size).t(), everyone.int(), ends, rows, None,
                self._model.shapes.num_splits(np.full(size, shape.longest)),
            )  # fmt: skip
            shared = LayerInputs(shape.window.cache, rows, (), paged=paged)
            inputs.update(dict.fromkeys(shape.window.layers, shared))
        layers = tuple(inputs[layer] for layer in range(self._model.config.num_layers))
        return ForwardInputs(self._tokens, positions, everyone, layers)
