"""A log as calibration uses it: measured iterations and load tests, and the work of a batch from its counts."""

import math
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ifbbench.compressed import DamagedFile, open_to_read
from ifbbench.errors import InputError
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.fit import Observation
from ifbbench.studies.measure import Sample

# A batch with so many tokens less than the budget counts as full: chunks are multiples of a block.
SLACK = 64
# Iterations begin in less than this share of their latencies if those of two overlap.
OVERLAPPING = 0.75
# Running requests of successive summaries that differ by less count as constant load.
CONSTANT_LOAD = 0.05
CUT = "the file is cut off: it goes on to where its last complete part ends."
CLOCK_STEP_S = 1.0  # lines of one second may be written in another order
MAX_LINES = 5
COLOURS = re.compile(r"(?:\x1b|\\u001b)\[[0-9;?]*[A-Za-z]")  # of a terminal; the second form is in JSON
MAX_STARTS = 3  # of a short log


def text_of(content: bytes) -> str:
    """The text of a log without the colours of a terminal. UTF-16 is what PowerShell writes."""
    encoding = "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8"
    text = content.decode(encoding, errors="replace").removeprefix("\ufeff")
    return COLOURS.sub("", text) if "\x1b[" in text or "\\u001b[" in text else text


def of_one_engine(path: Path, numbers: Collection[str], rank: int | None) -> str | None:
    """The number of the engine of which lines are read, of those that a log has; None if it has none. rank: the one
    that was asked for. InputError if it is not there, or if there are several and none was asked for."""
    known = ", ".join(sorted(numbers, key=lambda number: (len(number), number)))
    if rank is not None and str(rank) not in numbers:
        raise InputError(f"{path}: --rank {rank}: the log has no iteration of it; expected {known or 'no --rank'}.")
    if rank is None and len(numbers) > 1:
        raise InputError(
            f"{path}: has iterations of {len(numbers)} engines ({known}), ranks of data parallelism that schedule on "
            "their own; add --rank with the number of one."
        )
    return next(iter(numbers), None) if rank is None else str(rank)


@dataclass(slots=True)
class Log:
    """What was read from one file or run directory.

    samples: iterations, and whether the seconds of each include the host's time.
    observations: measurements of several iterations together.
    facts: what the log says about model and engine, by name.
    overlaps: whether iterations were submitted before the one before had ended; None if unknown.
    notes: what limits its use, in sentences.
    """

    path: Path
    format: str = ""
    sha256: str = ""
    samples: list[tuple[Sample, bool]] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    overlaps: bool | None = None
    notes: list[str] = field(default_factory=list)

    def content(self, expected: str, name: str = "") -> bytes:
        """The content of the file or pipe, unpacked if it is compressed; of one that was cut off what is left, and a
        note says so. InputError, with `name` before the path, if it cannot be read."""
        try:
            with open_to_read(self.path, accept_cut=True, on_cut=lambda: self.notes.append(CUT)) as file:
                return file.read()
        except (OSError, DamagedFile) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{name}{self.path}: cannot be read ({reason}); expected {expected}.") from None

    def note_restarts(self, numbers: Iterable[tuple[int, int]]) -> None:
        """Say where the server was started again. numbers: the line and the number of each iteration: numbers begin
        anew with a server. InputError for several servers at the same time."""
        numbers = list(numbers)
        lines = [line for (_, before), (line, one) in pairwise(numbers) if one < before]
        repeated = sum(one == before for (_, before), (_, one) in pairwise(numbers))
        if len(lines) + repeated > max(MAX_STARTS, len(numbers) // 10):
            raise InputError(
                f"{self.path}: the numbers of its iterations go back or stand still {len(lines) + repeated:,} times: "
                "it mixes several servers that ran at the same time. Give the log of one."
            )
        if lines:
            self.notes.append(
                f"the server was started again in {_lines(lines)}: what ran before has no end in the log, and the time "
                "until then is a wait between two iterations."
            )

    def note_gaps(self, numbers: Iterable[tuple[int, int]]) -> None:
        """Say where iterations are missing. numbers: the line and the number of each, idle ones included."""
        gaps = [(line, one - before - 1) for (_, before), (line, one) in pairwise(numbers) if one > before + 1]
        if gaps:
            count = sum(missing for _, missing in gaps)
            self.notes.append(
                f"{count:,} iteration{'s are' if count > 1 else ' is'} not in the log, as the numbers of the others "
                f"say: before {_lines([line for line, _ in gaps])}."
            )

    def note_damaged(self, lines: Sequence[int], num_read: int, num_lines: int, message: str) -> None:
        """Say which lines of iterations are not complete.

        num_read: how many are.
        num_lines: number of lines of the log, empty ones at its end left out.

        InputError with the message if most are not.
        """
        if len(lines) > num_read:
            raise InputError(f"{self.path}, line {lines[0]}: {message}")
        if list(lines) == [num_lines]:
            self.notes.append(f"it is cut in line {num_lines}, which is not used.")
        elif lines:
            self.notes.append(f"what is damaged is not used: {_lines(lines)}.")

    def note_clock(self, times_s: Iterable[tuple[int, float]]) -> None:
        """Say where the clock of the log goes back. times_s: the line and the time of each iteration."""
        lines, latest_s = list[int](), -math.inf
        for line, time_s in times_s:
            if time_s < latest_s - CLOCK_STEP_S:
                lines.append(line)
            latest_s = time_s
        if lines:
            self.notes.append(
                f"its clock goes back in {_lines(lines)}: from there on, iterations follow the latest one before at "
                "once until the clock has caught up."
            )

    def add_facts(self, patterns: Mapping[str, re.Pattern[str]], text: str) -> None:
        """Add what the pattern of each fact finds in `text`. InputError if one finds several values."""
        for name, pattern in patterns.items():
            found = set(pattern.findall(text))
            if len(found) > 1:
                raise InputError(
                    f"{self.path}: {name} is {' and '.join(sorted(found))}: the log mixes several servers. "
                    "Give the log of one."
                )
            self.facts |= dict.fromkeys([name], found.pop()) if found else {}


def _lines(numbers: Sequence[int]) -> str:
    """Lines by number, at most a few of them."""
    shown = ", ".join(f"{number:,}" for number in numbers[:MAX_LINES])
    more = f" and {len(numbers) - MAX_LINES:,} more" if len(numbers) > MAX_LINES else ""
    return f"line{'s' * (len(numbers) > 1)} {shown}{more}"


def overlap_of_periods(periods: Iterable[tuple[float, float]]) -> bool | None:
    """Whether iterations began before the one before had ended, from the seconds to the start of the next one and the
    latency of each; None if there are none."""
    ratios = [period_s / latency_s for period_s, latency_s in periods if latency_s > 0]
    return median(ratios) < OVERLAPPING if ratios else None


class BatchCounts(NamedTuple):
    """Counts of a batch.

    cached_tokens: tokens of the context requests that were computed before.
    """

    context_requests: int
    context_tokens: int
    generation_requests: int
    cached_tokens: int = 0


class BatchTracker:
    """The work of successive batches of which only counts are known, from what their requests have computed before.

    budget: the maximum number of tokens in a batch. After a batch that fills it, one request may have computed only a
    part of its prompt. Requests that end are taken to be as long as the mean of all, prompts of one batch as equally
    long.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._before = BatchCounts(0, 0, 0)
        # Keys of the generation requests of the last batch, and of the prompt that was incomplete before it.
        self._keys = 0.0
        self._partial = 0.0

    def correct(self, tokens: int) -> None:
        """All requests of the last batch have `tokens` in the KV cache."""
        self._keys = max(tokens - self._partial - self._before.context_tokens, float(self._before.generation_requests))

    def work(self, batch: BatchCounts, kv_tokens: int | None = None) -> StepWork:
        """The work of the next batch. kv_tokens: keys that its generation requests read, where known."""
        contexts, tokens, generating, cached = batch
        complete = self._end_prompts(batch)
        requests = self._before.generation_requests + complete
        if kv_tokens is None:
            kv_tokens = round(self._keys * generating / requests if requests else 0.0) + generating
        self._keys, self._before = float(kv_tokens if generating else 0), batch
        start = cached or round(self._partial)
        # The tokens before the chunks belong to the first of them.
        length = tokens / contexts if contexts else 0.0
        pairs = round(length * start + contexts * length * (length + 1) / 2)
        return StepWork(tokens, contexts, pairs, tokens + start, generating, kv_tokens, generating + contexts)

    def _end_prompts(self, batch: BatchCounts) -> int:
        """Move the prompts that the last batch completed to the requests that generate, and return their number."""
        contexts, tokens, generating, _ = self._before
        computed, partial = self._partial + tokens, 0.0
        is_full = tokens + generating >= self._budget - SLACK
        if contexts and batch.context_requests and is_full and batch.generation_requests < generating + contexts:
            partial = computed if contexts == 1 else tokens / contexts
        self._partial = partial
        self._keys += computed - partial
        return contexts - (partial > 0)
