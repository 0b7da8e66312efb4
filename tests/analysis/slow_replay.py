"""A slow replay of a recorded run: what every request did in every iteration, and why, from trace and settings alone.

Of the recording it uses only when iterations began. Decisions come from the literal transcription of the schedulers
(`tests.engine.reference`), so that nothing here shares code with the engine, its recorder or the analyses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.engine import reference
from tests.engine.reference import Entry

SLOTS_BEYOND_THE_BATCH = 8


@dataclass
class Member:
    """A request of the trace and where it stands. made: output tokens so far. ever: positions computed at any time."""

    request_id: int
    arrival_s: float
    prompt_len: int
    output_len: int
    priority: float
    entry: Entry
    entered: int = -1
    made: int = 0
    ever: int = 0
    is_paused: bool = False

    @property
    def order(self) -> tuple[float, int]:
        return (-self.priority, self.entered)

    @property
    def is_done(self) -> bool:
        return self.made == self.output_len


@dataclass
class Decision:
    """What one iteration did.

    chunks: context tokens by request; again: how many of them had been computed before. generating: ids.
    paused: (victim, beneficiary, reason, blocks that the victim held). left_out: the first request that did not run in
    full, and why. waiting: of each request that had arrived and only waited, the limit that held the line and the
    request at its head (None if it is that one). Behind a request that is paused in this iteration, the next one that
    does not fit may be called the head as well: waiting_or is the same with that one.
    """

    chunks: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    generating: list[int] = field(default_factory=list)
    paused: list[tuple[int, int, str, int]] = field(default_factory=list)
    left_out: tuple[int, str] | None = None
    waiting: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    waiting_or: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    behind_paused: tuple[int, str] | None = None
    blocks_used: int = 0


class SlowReplay:
    """Replays `trace` (lines of trace.jsonl) under `config` (of run.json), iterations beginning at `starts_s`."""

    def __init__(self, trace: list[dict[str, Any]], config: dict[str, Any], num_blocks: int) -> None:
        self.config, self.num_blocks = config, num_blocks
        self.queue = [self._member(row) for row in trace]
        self.active: list[Member] = []
        self.is_static = config["type"] == "v1"
        self.new_block = count()
        self.number = count()

    def decisions(self, starts_s: list[float]) -> Iterator[Decision]:
        for start_s in starts_s:
            self._admit(start_s)
            yield self._iterate(start_s)

    def _member(self, row: dict[str, Any]) -> Member:
        limit = min(row["max_new_tokens"], self.config["max_seq_len"] - row["prompt_len"])
        entry = Entry(row["request_id"], True, row["prompt_len"], limit)
        return Member(
            row["request_id"],
            row["arrival_s"],
            row["prompt_len"],
            min(row["output_len"], limit),
            row.get("priority", 0.5),
            entry,
        )

    def _arrived(self, now_s: float) -> list[Member]:
        return sorted((one for one in self.queue if one.arrival_s <= now_s), key=lambda one: -one.priority)

    def _admit(self, now_s: float) -> None:
        size = self.config["max_batch_size"]
        for member in self._arrived(now_s):
            last = max(self.active, key=lambda one: one.order, default=None)
            overtakes = last is not None and member.priority > last.priority
            if len(self.active) >= size + (SLOTS_BEYOND_THE_BATCH if overtakes else 0):
                break
            self.queue.remove(member)
            member.entered = next(self.number)
            self.active.append(member)
            self.active.sort(key=lambda one: one.order)

    def _iterate(self, start_s: float) -> Decision:
        decision = Decision()
        members = {member.request_id: member for member in self.active}
        if self.is_static and any(member.made for member in self.active):
            generating = [one.entry for one in self.active if one.made and not one.is_done]
            heads = [(one.request_id, "static_batch") for one in self.active if not one.made][:1]
            context: list[Entry] = []
        else:
            context, generating, heads = self._schedule(decision, members)
        queued = self._arrived(start_s)
        line = sorted([*self.active, *queued], key=lambda one: -one.priority)  # stable: equal ones as they arrived
        order = {one.request_id: place for place, one in enumerate(line)}
        heads.sort(key=lambda head: order[head[0]])
        behind_paused = [] if decision.behind_paused is None else [decision.behind_paused]
        more_heads = sorted([*heads, *behind_paused], key=lambda head: order[head[0]])
        if queued and not heads:
            heads = [(queued[0].request_id, "batch_size")]
        if heads:
            decision.left_out = heads[0]
        ran = {entry.request_id for entry in (*context, *generating)}
        for member in [*self.active, *queued]:
            if member.request_id in ran or member.is_paused or not member.entry.in_context:
                continue  # a generation request that does not run is skipped; it does not wait
            decision.waiting[member.request_id] = self._wait(member, heads, order)
            decision.waiting_or[member.request_id] = self._wait(member, more_heads, order)
        self._apply(decision, members, context, generating)
        return decision

    def _wait(self, member: Member, heads: list[tuple[int, str]], order: dict[int, int]) -> tuple[str, int | None]:
        before = [head for head in heads if order[head[0]] <= order[member.request_id]]
        if not before:  # of a higher priority than all that is active, with no slot left for it
            return ("batch_size", None)
        head, limit = before[-1]
        return (limit, None if head == member.request_id else head)

    def _schedule(
        self, decision: Decision, members: dict[int, Member]
    ) -> tuple[list[Entry], list[Entry], list[tuple[int, str]]]:
        """Context entries with their chunks set, generation entries, and the requests at the head of each line."""
        config, size = self.config, self.config["max_batch_size"]
        entries = [member.entry for member in self.active]
        used = len({block for entry in entries for block in entry.blocks})
        length = config["max_seq_len"]
        cache = reference.Cache(config["tokens_per_block"], length, length, 1, 0, self.num_blocks - used)
        policy = reference.POLICIES["guaranteed_no_evict" if self.is_static else config["policy"]]
        fitting = policy(entries, cache, reference.Limits(size))
        out = {entry.request_id for entry in fitting.paused}
        fits = {entry.request_id for entry in fitting.requests}
        full = "batch_size" if len(fits) == size else "kv_blocks"
        heads = []
        for victim, beneficiary, cause in zip(fitting.paused, fitting.beneficiaries, fitting.causes, strict=True):
            decision.paused.append((victim.request_id, beneficiary.request_id, cause, len(victim.blocks)))
        left = next((entry for entry in entries if entry.request_id not in fits), None)
        if left is not None and left.request_id in out:
            heads.append((left.request_id, next(pause[2] for pause in decision.paused if pause[0] == left.request_id)))
            behind = next((entry for entry in entries if entry.request_id not in fits | out), None)
            decision.behind_paused = None if behind is None else (behind.request_id, full)
        elif left is not None:
            static = config["policy"] == "static_batch" and any(not entry.in_context for entry in fitting.requests)
            heads.append((left.request_id, "static_batch" if static and left.in_context else full))
        is_chunked = config["enable_chunked_context"] and not self.is_static
        chunking = config["context_chunking_policy"] if is_chunked else None
        limits = reference.BatchLimits(
            size,
            None if self.is_static else config["max_num_tokens"],
            chunking,
            config["context_chunk_unit"] or 1,
            config["max_num_tokens"] if chunking else None,
        )
        selected = reference.micro_batch(fitting.requests, set(), limits)
        chosen = {entry.request_id: entry for entry in (*selected.context, *selected.generation)}
        for place, entry in enumerate(sorted(fitting.requests, key=lambda entry: members[entry.request_id].order)):
            in_full = entry.request_id in chosen and (
                not entry.in_context or entry.position + entry.chunk == entry.prompt_len
            )
            if not in_full:
                heads.append((entry.request_id, "batch_size" if place >= size else "num_tokens"))
                break
        for victim in fitting.paused:
            self._pause(members[victim.request_id])
        return selected.context, selected.generation, heads

    def _pause(self, member: Member) -> None:
        entry = member.entry
        cached = entry.position if entry.in_context else entry.prompt_len + entry.generated - 1
        member.ever = max(member.ever, cached)
        grown = min(self.config["max_input_len"], entry.prompt_len + entry.generated)
        entry.max_new_tokens -= grown - entry.prompt_len
        entry.prompt_len, entry.position, entry.generated = grown, 0, 0
        entry.in_context, member.is_paused = True, True
        entry.blocks, entry.blocks_per_beam = [], 0

    def _apply(
        self, decision: Decision, members: dict[int, Member], context: list[Entry], generating: list[Entry]
    ) -> None:
        for entry in context:
            member = members[entry.request_id]
            member.is_paused = False
            if entry.position == 0:
                self._hold(entry, entry.prompt_len)
            decision.chunks[entry.request_id] = entry.chunk
            decision.again[entry.request_id] = max(0, min(entry.position + entry.chunk, member.ever) - entry.position)
            entry.position += entry.chunk
            if entry.position == entry.prompt_len:
                entry.in_context, entry.generated = False, 1
                member.made = max(member.made, entry.prompt_len + 1 - member.prompt_len)
        for entry in generating:
            member = members[entry.request_id]
            self._hold(entry, entry.prompt_len + entry.generated)
            if entry.prompt_len + entry.generated <= member.ever:
                decision.again[entry.request_id] = 1
            entry.generated += 1
            decision.generating.append(entry.request_id)
            member.made = max(member.made, entry.prompt_len + entry.generated - member.prompt_len)
        decision.blocks_used = len({block for member in self.active for block in member.entry.blocks})
        if not self.is_static or all(member.is_done for member in self.active if member.made):
            self.active = [member for member in self.active if not member.is_done]

    def _hold(self, entry: Entry, tokens: int) -> None:
        missing = -(-tokens // self.config["tokens_per_block"]) - len(entry.blocks)
        entry.blocks += [next(self.new_block) for _ in range(missing)]
        entry.blocks_per_beam = len(entry.blocks)
