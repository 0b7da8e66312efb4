"""What lookup, allocation, release and storing cost with few blocks and with many, and how much memory the books take.

`python -m benchmarks.kv_cache` prints one JSON object. A cache of 1,000 and one of 1,000,000 blocks are filled
until every block is in the tree; then the same conversations go on in both: each finds its old blocks, evicts others
for its new ones, and leaves. Elementary steps are calls of functions, Python's and built in, counted by the
interpreter.
"""

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import numpy as np

from ifbbench.clock import WallClock
from ifbbench.engine.tokens import KnownTokens, TokenIds
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.manager import KvCacheManager
from ifbbench.kv.sequence import ReuseRules
from ifbbench.rundir import run_directory

TOKENS_PER_BLOCK = 32
BLOCKS_PER_CONVERSATION = 20
NEW_BLOCKS = 5
FEW, MANY = 1_000, 1_000_000
CONVERSATIONS = 40
REPEATS = 3
MAX_SEQ_LEN = 4096
KIB = 1024


@dataclass(frozen=True, slots=True)
class Filled:
    """A full cache, and the conversations that were last in it."""

    cache: KvCacheManager
    recent: list[np.ndarray]


def fill(num_blocks: int) -> Filled:
    """Conversations one after the other until every block holds known tokens. Half of each one's first block is the
    same in all, as a system prompt is."""
    attention_window = AttentionWindow(TOKENS_PER_BLOCK, MAX_SEQ_LEN, MAX_SEQ_LEN)
    cache = KvCacheManager(attention_window, num_blocks, slots=1, reuse=ReuseRules(enabled=True))
    draw = np.random.default_rng(0)
    length = BLOCKS_PER_CONVERSATION * TOKENS_PER_BLOCK
    prompts: list[np.ndarray] = []
    for _ in range(num_blocks // BLOCKS_PER_CONVERSATION + 1):
        tokens = draw.integers(0, 32_000, length, dtype=np.int32)
        tokens[: TOKENS_PER_BLOCK // 2] = 7
        serve(cache, tokens)
        prompts = [*prompts[-CONVERSATIONS + 1 :], tokens]
    return Filled(cache, prompts)


def serve(cache: KvCacheManager, tokens: np.ndarray) -> int:
    """A prompt comes, is computed, and goes; returns how many of its tokens were found."""
    known = KnownTokens(TokenIds(tokens), "conversations")
    reused = cache.add_sequence(0, len(tokens), known=known)
    cache.store_context(0)
    cache.remove_sequence(0, store=len(tokens) - 1)
    return reused


def next_turns(filled: Filled) -> list[np.ndarray]:
    """Each recent conversation with a few blocks more."""
    draw = np.random.default_rng(1)
    new = NEW_BLOCKS * TOKENS_PER_BLOCK
    return [np.concatenate([tokens, draw.integers(0, 32_000, new, dtype=np.int32)]) for tokens in filled.recent]


def steps_of(action: Callable[[], Any]) -> int:
    """How many functions `action` calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def measure(num_blocks: int) -> dict[str, float]:
    """Steps and microseconds of one turn, and what is found."""
    filled = fill(num_blocks)
    turns = next_turns(filled)
    # The first half of the turns for counting, the other for the clock.
    half = len(turns) // 2
    found = [serve(filled.cache, turns[0])]
    steps = [steps_of(partial(serve, filled.cache, tokens)) for tokens in turns[1:half]]
    clock = WallClock()
    times = []
    for tokens in turns[half:]:
        start_s = clock.now()
        found.append(serve(filled.cache, tokens))
        times.append((clock.now() - start_s) * 1e6)
    filled.cache.check_consistency()
    return {"steps": median(steps), "us": median(times), "tokens_found": float(np.mean(found))}


def books_mib() -> float:
    """Resident memory that a full cache of MANY blocks takes besides the token ids themselves, MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filled = fill(MANY)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    token_bytes = len(filled.cache.blocks.memory) * TOKENS_PER_BLOCK * np.dtype(np.int32).itemsize
    return ((after - before) * KIB - token_bytes) / KIB**2


def main() -> None:
    """Memory first, while the process is small; then both sizes in turns."""
    memory = books_mib()
    few, many = [], []
    for _ in range(REPEATS):
        few.append(measure(FEW))
        many.append(measure(MANY))
    row = {
        name: {key: median(sample[key] for sample in samples) for key in samples[0]}
        for name, samples in ((f"{FEW:,} blocks", few), (f"{MANY:,} blocks", many))
    }
    print(
        json.dumps(
            {
                "benchmark": "KV cache books",
                "turn": f"{BLOCKS_PER_CONVERSATION} known blocks and {NEW_BLOCKS} new ones",
                **row,
                "time_ratio": round(
                    median(sample["us"] for sample in many) / median(sample["us"] for sample in few), 2
                ),
                "memory_mib_besides_tokens": round(memory),
                "hardware": run_directory.hardware(),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
