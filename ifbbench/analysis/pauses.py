"""The pause ledger: what each pause cost its victim and gave its beneficiary, and requests paused repeatedly."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.files import replace_file
from ifbbench.rundir.rows import Id, Span
from ifbbench.rundir.timeline import NO_REQUEST, PauseEvent

THRASHING_PAUSES = 3


@dataclass(frozen=True)
class LedgerEntry:
    """One pause.

    blocks_freed: KV blocks that the victim held; None for a cache without blocks.
    tokens_recomputed: tokens that the victim computed again after it resumed, up to its next pause.
    lost_s: time from the pause until the victim had computed again what it lost, or until its next pause.
    gained_s: how long the beneficiary ran from the pause until the victim resumed; 0 if both are the same request.
    nth: how many times the victim had been paused, this time included.
    """

    iteration: int
    time_s: float
    victim: Id
    beneficiary: Id
    limit: str
    blocks_freed: int | None
    tokens_recomputed: int
    lost_s: float
    gained_s: float
    nth: int


@dataclass(frozen=True)
class PauseLedger:
    """All pauses of a run in order of time."""

    entries: list[LedgerEntry]

    @property
    def tokens_recomputed(self) -> int:
        return sum(entry.tokens_recomputed for entry in self.entries)

    def costliest(self) -> list[LedgerEntry]:
        """The entries by the time that their victims lost, the most first."""
        return sorted(self.entries, key=lambda entry: (-entry.lost_s, -entry.tokens_recomputed, entry.iteration))

    def thrashing(self) -> list[tuple[Id, int]]:
        """Requests that were paused at least THRASHING_PAUSES times, with the number, the most paused first."""
        counts = Counter(entry.victim for entry in self.entries)
        found = [(request_id, count) for request_id, count in counts.items() if count >= THRASHING_PAUSES]
        return sorted(found, key=lambda item: (-item[1], str(item[0])))

    def chains(self) -> list[list[Id]]:
        """Requests each of which made room for the next and was itself made room for: [first victim, …, last
        beneficiary] of pauses in one iteration or in consecutive ones, the longest first."""
        chains: list[list[Id]] = []
        open_chains: list[tuple[int, list[Id]]] = []
        for entry in self.entries:
            if entry.victim == entry.beneficiary:
                continue
            open_chains = [(last, chain) for last, chain in open_chains if entry.iteration - last <= 1]
            chain = next((chain for _, chain in open_chains if chain[-1] == entry.victim), None)
            if chain is None:
                chain = [entry.victim]
                chains.append(chain)
            chain.append(entry.beneficiary)
            open_chains.append((entry.iteration, chain))
        return sorted((chain for chain in chains if len(chain) > 2), key=len, reverse=True)

    def write_csv(self, path: Path) -> None:
        """Write a row for each pause, with the fields of LedgerEntry."""
        text = StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(LedgerEntry)])
        writer.writeheader()
        writer.writerows(map(asdict, self.entries))
        replace_file(path, text.getvalue())


def pause_ledger(run: RecordedRun) -> PauseLedger:
    """The ledger of a run; empty if no request was paused."""
    victims = {pause.victim for pause in run.iterations.pauses}
    pauses_of: dict[Id, list[_Pause]] = {victim: _pauses_of(run, victim) for victim in victims}
    nth: Counter[Id] = Counter()
    entries = []
    for pause in run.iterations.pauses:
        own = pauses_of[pause.victim]
        if nth[pause.victim] >= len(own):
            continue  # the iteration was written, its span was not: the run was killed between the two
        entries.append(_entry(run, pause, own[nth[pause.victim]], nth[pause.victim] + 1))
        nth[pause.victim] += 1
    return PauseLedger(entries)


@dataclass(frozen=True)
class _Pause:
    """What the victim's spans say of one of its pauses.

    held: positions that its blocks were for when it was paused; in the context phase, the whole prompt.
    computed: positions computed at any time before.
    span: span of the pause.
    again: spans of recomputation, up to the next pause.
    target: positions to compute until the next token.
    """

    held: int
    computed: int
    span: Span
    again: list[Span]
    target: int


def _pauses_of(run: RecordedRun, victim: Id) -> list[_Pause]:
    spans = run.spans.get(victim, [])
    row = run.row_of.get(victim, {})
    prompt_len = int(row.get("prompt_len", run.trace[victim].prompt_len))
    indices = [index for index, span in enumerate(spans) if span.phase == "paused"]
    produced = computed = 0
    position = int(row.get("reused_tokens", 0))
    found = []
    for number, index in enumerate(indices):
        begin = indices[number - 1] + 1 if number else 0
        for span in spans[begin:index]:
            produced += span.produced
            if span.phase in ("context", "recompute"):
                position += span.tokens
        # The latest output token is not in the cache: the step that follows computes it.
        ran = any(span.phase == "generation" or span.produced for span in spans[begin:index])
        target = prompt_len + produced
        cached = target - 1 if ran else min(position, target)
        computed = max(computed, cached)
        end = indices[number + 1] if number + 1 < len(indices) else len(spans)
        again = [span for span in spans[index + 1 : end] if span.phase == "recompute"]
        found.append(_Pause(cached if ran else target, computed, spans[index], again, target))
        position = 0
    return found


def _entry(run: RecordedRun, event: PauseEvent, pause: _Pause, nth: int) -> LedgerEntry:
    iterations = run.iterations
    time_s = iterations.start_of(event.iteration)
    resumed_s = iterations.start_of(pause.span.last + 1)
    ends_s = iterations.end_of(pause.again[-1].last) if pause.again else resumed_s
    tokens = sum(span.tokens for span in pause.again)
    # What a complete recomputation computes for the first time is new work.
    new = pause.target - pause.computed if any(span.produced for span in pause.again) else 0
    size = run.config.get("tokens_per_block")
    has_blocks = bool(run.data.run.get("num_kv_blocks"))
    is_own = event.beneficiary == event.victim
    return LedgerEntry(
        event.iteration,
        time_s,
        event.victim,
        event.beneficiary,
        _cause(run, event),
        -(-pause.held // int(size)) if has_blocks and size else None,
        max(min(tokens - new, pause.computed), 0),
        ends_s - time_s,
        0.0 if is_own else _ran_s(run, run.spans.get(event.beneficiary, ()), time_s, resumed_s),
        nth,
    )


def _cause(run: RecordedRun, event: PauseEvent) -> str:
    """The limit for which the beneficiary did not fit. Recorded is that of the first request left out, which mostly is
    a victim of the same iteration; otherwise it was KV blocks."""
    code = int(run.iterations.left_out[run.iterations.position(event.iteration)])
    request_id, limit = run.iterations.left_out_pairs[code] if code != NO_REQUEST else (None, "kv_blocks")
    return limit if request_id == event.victim else "kv_blocks"


def _ran_s(run: RecordedRun, spans: Sequence[Span], from_s: float, until_s: float) -> float:
    """Seconds in which a request ran between two times."""
    total = 0.0
    for span in spans:
        if span.phase in ("context", "recompute", "generation"):
            begin, end = run.iterations.start_of(span.first), run.iterations.end_of(span.last)
            total += max(min(end, until_s) - max(begin, from_s), 0.0)
    return total
