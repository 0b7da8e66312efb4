"""Generation-only batches as CUDA graphs: a pass is one launch instead of a dozen for each layer.

A graph replays the same kernels on the same memory. So there is one for each of a ladder of batch sizes, with static
inputs. A batch takes the smallest graph that it fits in and is padded with sequences of length 0, which read and write
no keys. A few more rows hardly slow down matrix products, which are bound by reading the weights.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ifbbench.engine.arrays import IntArray
from ifbbench.engine.batch import Batch
from ifbbench.torch.cache_windows import CacheWindow, cache_rows
from ifbbench.torch.kernels.context_attention import TILE_FIELDS
from ifbbench.torch.model.kernel_llama import NOWHERE, KernelLlama
from ifbbench.torch.model.llama import ForwardInputs, LayerInputs, PagedBatch
from ifbbench.torch.model.tensors import packed_on_host, unpacked
from ifbbench.torch.packing import ModelPass, PackedBatch, table_rows

# From 8 on, each size is at most 1.5 times the one before, so that at most a third of a batch is padding.
FIRST_SIZES = (1, 2, 4, 8)
# Larger batches keep the GPU busy longer than the host takes to launch their kernels.
LARGEST_SIZE = 256
# Runs some work once and returns a function that repeats it on the same memory.
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
# PyTorch gives its constructor no types.
_new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream


def ladder(max_sequences: int) -> list[int]:
    """Batch sizes with a graph, ascending: 1, 2, 4, 8, 12, 16, 24, 32, 48, … up to the first that holds
    `max_sequences`, and to LARGEST_SIZE."""
    sizes = list(FIRST_SIZES)
    while sizes[-1] < min(max_sequences, LARGEST_SIZE):
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(power * 3 // 2 if sizes[-1] == power else 2 * power)
    return sizes[: bisect_left(sizes, min(max_sequences, LARGEST_SIZE)) + 1]


class CudaGraphRecorder:
    """Records CUDA graphs that share one pool of temporary memory, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _new_stream()

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A graph of `work`; every replay writes its result to the same memory."""
        # The first run compiles kernels and makes library handles, which cannot be recorded. It uses the recording's
        # stream, because libraries have workspaces for each stream. Recording begins when all of it is done.
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


class GenerationGraphs:
    """Graphs of `model` over the cache `windows`, each recorded when first needed, or all by `record_all`.

    max_sequences: maximum number of sequences of a batch.
    max_seq_len: maximum length of a sequence, in tokens.
    record: default: as CUDA graphs.
    """

    def __init__(
        self,
        model: KernelLlama,
        windows: Sequence[CacheWindow],
        max_sequences: int,
        max_seq_len: int,
        record: Recorder | None = None,
    ) -> None:
        self._model = model
        self._windows = windows
        self._sizes = ladder(max_sequences)
        self._max_seq_len = max_seq_len
        self._record = record or CudaGraphRecorder()
        # The width of the block tables of each window; known from the first batch.
        self._table_widths: list[int] = []
        self._graphs: dict[int, _Graph] = {}

    def takes(self, batch: Batch) -> bool:
        """Whether `batch` can run as a graph: generation only, without beams and drafts, and not too large."""
        is_plain = not batch.context and batch.beam_width == 1 and batch.drafts is None
        return is_plain and 0 < len(batch.slots) <= self._sizes[-1]

    def prepare(self, batch: Batch, packed: PackedBatch) -> ModelPass:
        """The pass of a batch that `takes` accepts. Its logits are valid until the next pass.

        Reads the block tables before it returns.
        """
        size = self._sizes[bisect_left(self._sizes, len(batch.slots))]
        tables = [table_rows(window.tables_of(batch)) for window in self._windows]
        if not self._table_widths:
            self._table_widths = [table.shape[1] for table in tables]
        numbers = [
            packed_on_host(_window_numbers(packed, table, window, size), self._model.device)
            for window, table in zip(self._windows, tables, strict=True)
        ]
        return partial(self._graph(size).run, numbers)

    def record_all(self, report: Callable[[int, int], None]) -> None:
        """Record the missing graphs, the largest first, because smaller ones fit in its memory.

        Does nothing before the first batch, because the width of block tables is unknown. report: called with the
        number of graphs recorded and of all.
        """
        if not self._table_widths:
            return
        for number, size in enumerate(reversed(self._sizes)):
            self._graph(size)
            report(number + 1, len(self._sizes))

    def _graph(self, size: int) -> "_Graph":
        if size not in self._graphs:
            self._graphs[size] = _Graph(
                self._model, self._windows, self._table_widths, self._max_seq_len, size, self._record
            )
        return self._graphs[size]


def padded(values: NDArray[np.integer], size: int, filling: int) -> NDArray[np.integer]:
    """`values` [..., rows] followed by `filling`, [..., size]; flat."""
    rows = np.full((*values.shape[:-1], size), filling, np.int32)
    rows[..., : values.shape[-1]] = values
    return rows.ravel()


def _window_numbers(packed: PackedBatch, tables: IntArray, window: CacheWindow, size: int) -> list[NDArray[np.integer]]:
    """The numbers of a window for `_Graph`, padded to `size` sequences, with the blocks that this batch has."""
    used = tables[:, : window.attention.blocks_used(int(packed.ends.max(initial=0)))][packed.spans.table_rows]
    return [
        padded(packed.positions, size, 0),
        padded(packed.ends, size, 0),
        padded(cache_rows(packed, tables, window), size, NOWHERE),
        padded(used.T, size, 0),
    ]


class _Graph:
    """One pass over `size` sequences.

    Its numbers, int32, are one tensor for each window: positions [size], lengths [size], cache rows [size] and block
    tables [blocks, size]. The first blocks of all sequences are adjacent, so that a batch copies only those it has.
    """

    def __init__(
        self,
        model: KernelLlama,
        windows: Sequence[CacheWindow],
        table_widths: Sequence[int],
        max_seq_len: int,
        size: int,
        record: Recorder,
    ) -> None:
        device = model.device
        nothing = np.empty(0, np.int32)
        self._numbers = []
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        everyone = torch.arange(size, device=device)
        inputs: dict[int, LayerInputs] = {}
        for window, width in zip(windows, table_widths, strict=True):
            # All sequences are padding until the first batch.
            empty = [
                padded(nothing, size, 0),
                padded(nothing, size, 0),
                padded(nothing, size, NOWHERE),
                padded(np.empty((width, 0), np.int32), size, 0),
            ]
            numbers = packed_on_host(empty, device).to(device, non_blocking=True)
            self._numbers.append(numbers)
            positions, ends, rows, tables = unpacked(numbers, [size, size, size, width * size])
            max_keys = min(window.attention.size, max_seq_len)
            paged = PagedBatch(
                window.attention,
                0,
                everyone.new_empty((0, TILE_FIELDS), dtype=torch.int32),
                tables.view(width, size).t(),
                everyone.int(),
                ends,
                rows,
                None,
                model.shapes.num_splits(np.full(size, max_keys)),
            )
            inputs.update(dict.fromkeys(window.layers, LayerInputs(window.cache, rows, paged)))
        layers = tuple(inputs[layer] for layer in range(model.config.num_layers))
        forward_inputs = ForwardInputs(self._tokens, positions, everyone, layers)
        self._replay = record(lambda: model.forward(forward_inputs))

    def run(self, numbers: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """Logits of the batch, [tokens, vocabulary]. numbers: of each window, in host memory; a tail may be missing."""
        for static, new in zip(self._numbers, numbers, strict=True):
            static[: len(new)].copy_(new, non_blocking=True)
        self._tokens[: len(tokens)].copy_(tokens)
        return self._replay()[: len(tokens)]
