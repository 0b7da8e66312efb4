"""What calibration runs: small workloads that together make batches of all kinds and sizes."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ifbbench.engine.config import BatchingConfig
from ifbbench.engine.kv_cache.attention_window import ceil_div
from ifbbench.workload.trace import Trace, TraceRequest

PROMPT_LENS = (16, 64, 192, 512, 1024, 2048, 4096)
QUICK_PROMPT_LENS = (16, 192, 1024)
# Of requests that start together: one makes a context batch, and so many generation batches after it.
GENERATION_STEPS = 8
CHUNK_BUDGETS = (128, 512, 1024)
CHUNKED_PROMPT_LEN = 2048
STREAM_REQUESTS = 24
QUICK_STREAM_REQUESTS = 12
STREAM_PROMPT_LENS = (16, 1024)
STREAM_OUTPUT_LENS = (4, 48)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload of requests that are all there at once.

    lengths: prompt and output length of each request, in tokens. concurrency: how many are active at most, so that
    others join while some generate; None for all. chunk_budget: tokens of an iteration with chunked context, None
    without that.
    """

    lengths: tuple[tuple[int, int], ...]
    concurrency: int | None = None
    chunk_budget: int | None = None

    def trace(self) -> Trace:
        """Its requests as a trace."""
        requests = [
            TraceRequest(index, 0.0, prompt_len, max_new_tokens=output_len, output_len=output_len)
            for index, (prompt_len, output_len) in enumerate(self.lengths)
        ]
        return Trace("calibration", requests, sha256="", source="calibration")

    def fits(self, limits: BatchingConfig) -> bool:
        """Whether no request of it would be refused, or have to wait for a place or blocks."""
        at_once = self.concurrency or len(self.lengths)
        longest = max(prompt_len + output_len for prompt_len, output_len in self.lengths)
        longest_pass = self.chunk_budget or max(prompt_len for prompt_len, _ in self.lengths)
        blocks = at_once * ceil_div(longest, limits.tokens_per_block)
        return (
            at_once <= limits.max_batch_size
            and longest_pass <= limits.max_num_tokens
            and longest <= limits.max_seq_len
            and blocks <= limits.num_blocks
        )


def scenarios(limits: BatchingConfig, seed: int, *, passes: int = 2, quick: bool = False) -> list[Scenario]:
    """Those that fit `limits`: prompts that start together, prompts in chunks, and streams of requests that join while
    others generate.

    passes: how many iterations full of context tokens a scenario may take before it is all in generation, so that
    batches are large and sequences long, but measuring does not take for ever. quick: a few of them.
    """
    candidates = [
        *_together(limits, 1 if quick else passes, quick), *_chunked(limits, quick), *_streams(limits, seed, quick)
    ]  # fmt: skip
    return [scenario for scenario in candidates if scenario.fits(limits)]


def _together(limits: BatchingConfig, most_passes: int, quick: bool) -> Iterator[Scenario]:
    """From one request to a full batch, with prompts of unlike lengths around a mean, as traffic has them: attention
    over unlike lengths takes longer. The first ones generate until the last have their prompt done."""
    for count in _batch_sizes(limits.max_batch_size, step=8 if quick else 2):
        for prompt_len in QUICK_PROMPT_LENS if quick else PROMPT_LENS:
            passes = ceil_div(count * prompt_len, limits.max_num_tokens)
            if passes <= most_passes:
                output_len = passes + GENERATION_STEPS
                yield Scenario(tuple((length, output_len) for length in _around(prompt_len, count)))


def _chunked(limits: BatchingConfig, quick: bool) -> Iterator[Scenario]:
    """A long prompt in chunks, alone and beside one that generates."""
    for budget in CHUNK_BUDGETS[1:2] if quick else CHUNK_BUDGETS:
        longest = max(1, min(CHUNKED_PROMPT_LEN, limits.max_seq_len - 1 - GENERATION_STEPS))
        yield Scenario(((longest, 2),), chunk_budget=budget)
        yield Scenario(((64, 64), (longest, 2)), chunk_budget=budget)


def _streams(limits: BatchingConfig, seed: int, quick: bool) -> Iterator[Scenario]:
    """Requests of all lengths, of which the next one starts when one is done."""
    generator = random.Random(seed)
    for at_once in _batch_sizes(limits.max_batch_size, step=8 if quick else 4)[1:]:
        count = QUICK_STREAM_REQUESTS if quick else STREAM_REQUESTS
        lengths = [(_between(generator, STREAM_PROMPT_LENS), _between(generator, STREAM_OUTPUT_LENS))
                   for _ in range(max(count, at_once))]  # fmt: skip
        yield Scenario(tuple(lengths), concurrency=at_once)


def _around(mean: int, count: int) -> list[int]:
    """Lengths at equal distances, from half of `mean` to one and a half of it."""
    return [round(mean * (0.5 + (index + 0.5) / count)) for index in range(count)]


def _batch_sizes(largest: int, step: int) -> list[int]:
    """1, `step`, its square and so on, and the largest."""
    sizes = [1]
    while sizes[-1] * step < largest:
        sizes.append(sizes[-1] * step)
    return [*sizes, largest] if largest > 1 else sizes


def _between(generator: random.Random, bounds: tuple[int, int]) -> int:
    """A length between the bounds, short ones as likely as long ones on a logarithmic scale."""
    low, high = bounds
    return round(low * math.exp(math.log(high / low) * generator.random()))
