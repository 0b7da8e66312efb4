"""How large the attention kernels' tiles are. Chosen by arithmetic, not by trial at run time, so that a start is quick.

What bounds them on a multiprocessor: 227 KiB of shared memory on Hopper (9.0), 163 KiB on A100 (8.0), about 99 KiB on
other chips of 8.x; 255 registers a thread, of which the float32 result tile, rows × head size, takes the most.
"""

from dataclasses import dataclass

from ifbbench.kernels.launch import SMALLEST_DOT, padded_size

# A split shorter than this costs more in the reduction than it wins.
SMALLEST_SPLIT = 256
MOST_SPLITS = 64
# Programs of the generation kernel that share a multiprocessor; two, for one waits for memory while one computes.
PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """rows: queries times grouped heads of a program. keys: how many at a time. warps: of 32 threads. stages: how many
    tiles of keys and values are loaded or computed at once. Rows and keys are powers of two of at least 16."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def cached_stages(self) -> int:
        """What Triton has to be told for keys in the cache: their block ids are loaded before them, which takes every
        other stage."""
        return 2 * self.stages - 1


def context_tiles(head_size: int, value_bytes: int, capability: tuple[int, int]) -> AttentionTiles:
    """Tiles for context chunks, bound by arithmetic: as many rows as the registers hold, for each key that is loaded
    is then used by all of them.

    value_bytes: of a query. capability: of the GPU, such as (9, 0).

    128 rows × 128 float32 results are 64 KiB, a quarter of the registers; 8 warps hold them with 64 registers a thread,
    and make the two groups of four warps that Hopper's matrix instruction wants, of 64 rows each. Keys and values of a
    stage take 2 · keys · head size · bytes: 64 × 128 in 16 bits are 32 KiB, so three stages and the queries take
    128 KiB. Before Hopper, keys go through registers on their way to the matrix units, so there are half as many.
    Float32 has no matrix unit of full precision: sums of products in registers, so tiles are small.

    With other choices the compiler spilled registers (`tests.kernels.compile_only` shows them).
    """
    width = padded_size(head_size)
    is_hopper = capability[0] >= 9
    if value_bytes == 4:
        return AttentionTiles(rows=32, keys=32 if width <= 64 else 16, warps=4 if width <= 64 else 8, stages=1)
    if width <= 64:
        return AttentionTiles(rows=128, keys=64, warps=8, stages=3)
    if width <= 128:
        return AttentionTiles(rows=128, keys=64 if is_hopper else 32, warps=8, stages=3)
    return AttentionTiles(rows=128 if is_hopper else 64, keys=32, warps=8, stages=2)


def generation_tiles(head_size: int, group: int, value_bytes: int) -> AttentionTiles:
    """Tiles for generation tokens, bound by memory: rows for the `group` heads that share a KV head, and enough loads
    under way to hide the memory's latency.

    value_bytes: of a cached key. An H100 needs about 3.3 TB/s · 0.7 µs / 132 = 18 KB under way on each multiprocessor.
    Keys and values of a stage take 2 · keys · head size · bytes, here at most 32 KiB. One stage is computed while the
    other is under way, and with 70 KiB a program, two or three share a multiprocessor of Hopper.
    """
    width = padded_size(head_size)
    keys = max(SMALLEST_DOT, min(128, 16_384 // (width * value_bytes)))
    return AttentionTiles(rows=padded_size(group), keys=keys, warps=4 if value_bytes < 4 else 8, stages=3)


def choose_num_splits(num_kv_heads: int, longest: int, total_keys: int, num_multiprocessors: int) -> int:
    """Into how many parts the keys of a sequence are cut, so that every multiprocessor has work.

    longest: most keys of a sequence. total_keys: of all sequences together. A part is at most as long as an equal share
    of all the work: of 64 like sequences with 8 KV heads none is cut, of one alone each multiprocessor gets a part, and
    a very long one among many short ones does not keep the others' multiprocessors waiting.
    """
    share = -(-total_keys * num_kv_heads // (num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR))
    return max(1, min(MOST_SPLITS, -(-longest // max(share, SMALLEST_SPLIT))))
