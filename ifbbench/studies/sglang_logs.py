"""Times of iterations from the log lines of SGLang: `Prefill batch`, and `Decode batch` of every 40 decode batches.

A decode line has the tokens a second since the one before. With as many requests before and after, that is the time of
40 decode batches and of the prefill batches between the two lines. A prefill line has the tokens a second since the
prefill line before; if the prompt of that one was cut, nothing ran in between.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ifbbench.errors import InputError
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.fit import Observation
from ifbbench.studies.log import CONSTANT_LOAD, Log
from ifbbench.studies.measure import Sample

# Up to 0.5.0 a full stop stood where a comma stands now, and into 0.5 prefill lines had no throughput. A line may have
# the iteration's number.
PREFILL = re.compile(
    r"Prefill batch(?: \[\d+\])?[.,] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), .*?"
    r"#running-req: (\d+), #queue-req: (\d+)(?:.*?input throughput \(token/s\): ([\d.]+))?"
)
DECODE = re.compile(
    r"Decode batch(?: \[\d+\])?[.,] #running-req: (\d+), #(?:full )?token: (\d+), .*?"
    r"gen throughput \(token/s\): ([\d.]+)(?:.*?#queue-req: (\d+))?"
)
USAGE = re.compile(r"token usage: ([\d.]+)")
# The progress bar of a client, or the stamp of a container, may stand before it.
STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.\d+)?((?: [A-Z_]+\d+)*)\]")
DATA_RANK, STAGE = re.compile(r" DP(\d+)"), re.compile(r" PP(\d+)")
ANY_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
ACCEPTED = re.compile(r"accept len: ([\d.]+)")
INTERVAL = re.compile(r"decode_log_interval=(\d+)")
FACTS = {
    "model": re.compile(r"\bmodel_path='([^']+)'"),
    "tp_size": re.compile(r"\btp_size=(\d+)"),
    "pp_size": re.compile(r"\bpp_size=(\d+)"),
}
DEFAULT_INTERVAL = 40
SETTINGS = "server_args="
ANOTHER_SGLANG = (
    "a batch of another version of SGLang, {!r}; expected `Prefill batch, #new-seq: …` or `Decode batch, "
    "#running-req: …`."
)


class Prefill(NamedTuple):
    """A prefill line.

    cached: tokens of its prompts that were in the cache.
    rate: tokens a second.
    usage: share of the KV cache in use.
    stamp: the time, if the line has one.
    rank: rank of data parallelism, "0" without it.
    """

    requests: int
    tokens: int
    cached: int
    running: int
    queued: int
    rate: float
    usage: float = 0.0
    stamp: str | None = None
    line: int = 0
    rank: str = "0"

    def work(self, computed: int = 0) -> StepWork:
        """Its work, prompts taken as equally long. computed: tokens of the prompt that was cut."""
        length, rest = divmod(self.tokens, self.requests)
        chunks = [(0, length + (number < rest), True) for number in range(self.requests)]
        chunks[0] = (self.cached + computed, chunks[0][1], True)
        return StepWork.of_lengths(chunks)


class Decode(NamedTuple):
    """A decode line.

    tokens: number of tokens of the running requests in the KV cache.
    rate: tokens a second.
    usage, stamp, rank: as in a prefill line.
    accepted: tokens of a request in an iteration, more than 1 with drafts.
    """

    running: int
    tokens: int
    rate: float
    queued: int = 0
    usage: float = 0.0
    stamp: str | None = None
    line: int = 0
    rank: str = "0"
    accepted: float = 1.0


def is_sglang(text: str) -> bool:
    """Whether `text` has log lines of SGLang's batches."""
    return "#running-req:" in text and ("Prefill batch" in text or "Decode batch" in text)


def read_sglang(log: Log, text: str) -> None:
    """Add what the lines in `text` measure to `log`. InputError for drafts, for several servers, and for another
    version."""
    log.add_facts(FACTS, text)
    interval, batches = interval_of(text), sglang_batches(log, text)
    for one in batches:
        if isinstance(one, Decode) and one.accepted != 1:
            raise InputError(f"{log.path}, line {one.line}: speculative decoding is not simulated.")
    log.overlaps = "disable_overlap_schedule=True" not in text
    for rank in sorted({one.rank for one in batches}):
        of_rank = [one for one in batches if one.rank == rank]
        _add_prefills(log, of_rank)
        _add_decodes(log, of_rank, interval)


def interval_of(text: str) -> int:
    """Decode batches for which there is one line."""
    logged = INTERVAL.search(text)
    return int(logged[1]) if logged else DEFAULT_INTERVAL


def sglang_starts(text: str) -> Iterator[tuple[int, int]]:
    """The line of each batch and of the settings with which a server starts, and how many of the batches there were
    since the start."""
    count = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if SETTINGS in line:
            count = 0
        elif "Prefill batch" in line or "Decode batch" in line:
            count += 1
        else:
            continue
        yield number, count


def sglang_batches(log: Log, text: str) -> list[Prefill | Decode]:
    """The lines of batches in `text`, without those of later pipeline stages, which run the same batches. A note says
    which lines are damaged. InputError for another version of SGLang."""
    found, damaged = list[Prefill | Decode](), list[int]()
    lines = text.rstrip().split("\n")
    for number, line in enumerate(lines, start=1):
        if "Prefill batch" not in line and "Decode batch" not in line:
            continue
        usage, begins, drafts = USAGE.search(line), STAMP.search(line), ACCEPTED.search(line)
        ranks = begins[2] if begins else ""
        if (stage := STAGE.search(ranks)) and stage[1] != "0":
            continue
        at, rank = ANY_STAMP.search(begins[0] if begins else line), DATA_RANK.search(ranks)
        more = (float(usage[1]) if usage else 0.0, at[0] if at else None, number, rank[1] if rank else "0")
        if match := PREFILL.search(line):
            requests, tokens, cached, running, queued = map(int, match.groups()[:5])
            found.append(Prefill(requests, tokens, cached, running, queued, float(match[6] or 0), *more))
        elif match := DECODE.search(line):
            accepted = float(drafts[1]) if drafts else 1.0
            found.append(Decode(int(match[1]), int(match[2]), float(match[3]), int(match[4] or 0), *more, accepted))
        else:
            damaged.append(number)
    if damaged:
        log.note_damaged(damaged, len(found), len(lines), ANOTHER_SGLANG.format(lines[damaged[0] - 1][-100:]))
    return found


def _add_prefills(log: Log, batches: list[Prefill | Decode]) -> None:
    """Prefill batches behind one whose prompt was cut: no request has joined the running ones, and all tokens of a
    batch were used."""
    budget = max((one.tokens for one in batches if isinstance(one, Prefill)), default=0)
    computed = 0
    for before, one in pairwise(batches):
        is_cut = (
            isinstance(before, Prefill)
            and isinstance(one, Prefill)
            and (before.requests, before.tokens, before.running) == (1, budget, one.running)
        )
        if not is_cut:
            computed = 0
            continue
        assert isinstance(before, Prefill)
        assert isinstance(one, Prefill)
        computed += before.tokens + before.cached
        if one.rate > 0 and one.requests == 1:
            log.samples.append((Sample(one.work(computed), one.tokens / one.rate, None), True))


def _add_decodes(log: Log, batches: list[Prefill | Decode], interval: int) -> None:
    """The mean iteration between two decode lines of constant load, unless no request ran in between."""
    before: Decode | None = None
    prompts: list[Prefill] = []
    for one in batches:
        if isinstance(one, Prefill):
            prompts.append(one)
            continue
        is_constant = before is not None and abs(one.running - before.running) <= CONSTANT_LOAD * one.running
        if before is not None and is_constant and one.rate > 0 and all(prompt.running for prompt in prompts):
            running, tokens = (before.running + one.running) / 2, (before.tokens + one.tokens) // 2
            batch = round(running)
            kv_tokens = max(tokens // batch, 1)
            decode = StepWork.of_lengths(kv_lengths=[kv_tokens] * batch)
            iterations = interval + len(prompts)
            steps = [(decode, interval / iterations), *((prompt.work(), 1 / iterations) for prompt in prompts)]
            seconds = interval * running / one.rate / iterations
            log.observations.append(Observation(seconds, steps, "mixed" if prompts else "generation"))
        before, prompts = one, []
