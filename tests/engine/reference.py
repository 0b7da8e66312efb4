"""The scheduling rules written down literally and slowly, over plain data: what the fast schedulers are held to.

Follows TensorRT-LLM's `CapacityScheduler` and `MicroBatchScheduler` rule by rule, with no thought for speed. Three
upstream faults are left out, as in the engine: the sink bubble does not count as generated tokens, part-prefilled
requests continue where nothing else could ever run, and the spare block of windows with beams is counted, as are the
blocks that beams take when their window wraps.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Entry:
    """A request as a scheduler sees it. `blocks`: every reference to a KV block that it holds, over all beams."""

    request_id: int
    in_context: bool
    prompt_len: int
    max_new_tokens: int
    position: int = 0
    generated: int = 0
    drafts: int = 0
    beam_width: int = 1
    lora: int | None = None
    blocks: list[int] = field(default_factory=list)
    blocks_per_beam: int = 0
    chunk: int = 0

    @property
    def started(self) -> bool:
        return not self.in_context or self.position > 0


@dataclass(frozen=True)
class Cache:
    tokens_per_block: int
    window: int
    max_seq_len: int
    max_beam_width: int
    sink: int
    free: int

    @property
    def bubble(self) -> int:
        return -self.sink % self.tokens_per_block

    @property
    def capacity(self) -> int:
        several_beams = self.max_seq_len > self.window and self.max_beam_width > 1
        return self.window + self.bubble + (self.tokens_per_block if several_beams else 0)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    def place(self, registered: int) -> int:
        first = self.sink + self.bubble
        return registered if registered < self.capacity else first + (registered - first) % (self.capacity - first)

    def blocks_of_beams(self, prompt_len: int, new_tokens: int, beam_width: int) -> int:
        """Different blocks once so many tokens were generated: token by token, each to the block that holds it."""
        registered = prompt_len + self.bubble
        all_blocks = {self.place(number) // self.tokens_per_block for number in range(registered)}
        last = self.place(registered - 1)
        own = set() if (last + 1) % self.tokens_per_block == 0 else {last // self.tokens_per_block}
        if prompt_len < self.sink:
            own = {place // self.tokens_per_block for place in range(prompt_len, registered)}
        own |= {self.place(registered + number) // self.tokens_per_block for number in range(new_tokens)}
        return len(all_blocks | own) + len(own) * (beam_width - 1)

    def one_step_need(self, entry: Entry) -> int:
        if entry.in_context and entry.started:
            return 0
        if entry.in_context:
            if entry.beam_width > 1:
                return self.blocks_of_beams(
                    entry.prompt_len + min(entry.drafts, entry.max_new_tokens), 0, entry.beam_width
                )
            tokens = entry.prompt_len + min(entry.drafts, entry.max_new_tokens) + self.bubble
            tokens = min(tokens, self.capacity)
            partial = tokens % self.tokens_per_block != 0
            return tokens // self.tokens_per_block + (entry.beam_width if partial else 0)
        cached = entry.prompt_len + entry.generated - 1 + self.bubble
        left = entry.max_new_tokens - (entry.generated - 1)
        after = cached + min(entry.drafts + 1, left)
        if cached >= self.capacity and entry.beam_width > 1 and left > 0:
            index, within = divmod(self.place(cached), self.tokens_per_block)
            is_shared = len(set(entry.blocks[index :: entry.blocks_per_beam])) == 1
            return entry.beam_width - 1 if within == 0 and is_shared else 0
        if after > self.capacity:
            return 0
        return (self.blocks(after) - self.blocks(cached)) * entry.beam_width

    def remaining_to_completion(self, entry: Entry) -> int:
        if entry.beam_width > 1:
            total = self.blocks_of_beams(entry.prompt_len, entry.max_new_tokens, entry.beam_width)
            return total - len(set(entry.blocks))
        total = self.blocks(min(entry.prompt_len + entry.max_new_tokens + self.bubble, self.capacity))
        return total - entry.blocks_per_beam


@dataclass(frozen=True)
class Limits:
    max_num_requests: int
    pages_per_task: int = 0
    max_pages: int = 0


@dataclass
class Fitting:
    """beneficiaries: of each pause, the request that did not fit. causes: of each pause, what that one lacked."""

    requests: list[Entry] = field(default_factory=list)
    paused: list[Entry] = field(default_factory=list)
    beneficiaries: list[Entry] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


def _pages_fit(tasks: set[int], entry: Entry, limits: Limits) -> bool:
    if entry.lora is None or entry.lora in tasks:
        return True
    return limits.pages_per_task <= limits.max_pages - len(tasks) * limits.pages_per_task


def guaranteed_no_evict(entries: list[Entry], cache: Cache, limits: Limits, static: bool = False) -> Fitting:
    fitting, pending = Fitting(), []
    available, tasks = cache.free, set[int]()
    for entry in entries:
        if len(fitting.requests) == limits.max_num_requests:
            break
        if entry.in_context:
            pending.append(entry)
            continue
        fitting.requests.append(entry)
        available -= cache.remaining_to_completion(entry)
        tasks |= {entry.lora} if entry.lora is not None else set()
    if static and fitting.requests:
        return fitting
    _admit_pending(pending, fitting, available, tasks, cache, limits)
    if not fitting.requests:
        for entry in (entry for entry in pending if entry.started):
            _admit_pending([entry], fitting, available, tasks, cache, limits)
            if fitting.requests:
                behind = [other for other in pending[pending.index(entry) + 1 :] if other.started]
                available -= cache.remaining_to_completion(entry)
                _admit_pending(behind, fitting, available, tasks, cache, limits)
                break
    return fitting


def _admit_pending(
    pending: list[Entry], fitting: Fitting, available: int, tasks: set[int], cache: Cache, limits: Limits
) -> None:
    for entry in pending:
        if len(fitting.requests) == limits.max_num_requests:
            return
        need = cache.remaining_to_completion(entry)
        if need > available:
            return
        if not _pages_fit(tasks, entry, limits):
            continue
        fitting.requests.append(entry)
        available -= need
        if entry.lora is not None:
            tasks.add(entry.lora)


def static_batch(entries: list[Entry], cache: Cache, limits: Limits) -> Fitting:
    return guaranteed_no_evict(entries, cache, limits, static=True)


def max_utilization(entries: list[Entry], cache: Cache, limits: Limits) -> Fitting:
    fitting, tasks = Fitting(), set[int]()
    scheduling_free, claimed_blocks = cache.free, 0
    references = Counter(block for entry in entries for block in entry.blocks)
    index, end = 0, len(entries)
    while index < end:
        entry = entries[index]
        need = cache.one_step_need(entry)
        if (
            len(fitting.requests) < limits.max_num_requests
            and claimed_blocks + need <= scheduling_free
            and _pages_fit(tasks, entry, limits)
        ):
            fitting.requests.append(entry)
            claimed_blocks += need
            tasks |= {entry.lora} if entry.lora is not None else set()
            index += 1
            continue
        started = [place for place in range(index, end) if entries[place].started]
        if not started:
            break
        end = started[-1]
        fitting.paused.append(entries[end])
        fitting.beneficiaries.append(entry)
        is_full = len(fitting.requests) == limits.max_num_requests
        fitting.causes.append("batch_size" if is_full else "kv_blocks")
        for block in entries[end].blocks:
            references[block] -= 1
            scheduling_free += references[block] == 0
    return fitting


POLICIES = {
    "guaranteed_no_evict": guaranteed_no_evict,
    "max_utilization": max_utilization,
    "static_batch": static_batch,
}


@dataclass(frozen=True)
class BatchLimits:
    max_batch_size: int
    max_num_tokens: int | None
    chunking_policy: str | None = None
    unit: int = 1
    longest: int | None = None


@dataclass
class Selected:
    context: list[Entry] = field(default_factory=list)
    generation: list[Entry] = field(default_factory=list)


def micro_batch(fitting: list[Entry], in_flight: set[int], limits: BatchLimits) -> Selected:
    """Select from `fitting`, set the chunks of the selected contexts and cut their drafts."""
    selected = Selected()
    budget = float("inf") if limits.max_num_tokens is None else limits.max_num_tokens
    tokens = candidate_tokens = 0
    all_fit, beam_width = True, None
    for entry in fitting:
        if entry.request_id in in_flight:
            continue
        if len(selected.context) + len(selected.generation) == limits.max_batch_size:
            break
        if entry.in_context and limits.chunking_policy:
            entry.chunk = entry.prompt_len - entry.position
            cost = entry.chunk + entry.drafts
            if limits.longest is not None and cost > limits.longest:
                cost, all_fit = limits.longest, False
            candidate_tokens += cost
            selected.context.append(entry)
        elif entry.in_context:
            if tokens + entry.prompt_len + entry.drafts > budget:
                break
            entry.chunk = entry.prompt_len
            tokens += entry.prompt_len + entry.drafts
            selected.context.append(entry)
        else:
            if tokens + entry.beam_width + entry.drafts > budget:
                break
            if beam_width not in (None, entry.beam_width):
                continue
            beam_width = entry.beam_width
            tokens += entry.beam_width + entry.drafts
            selected.generation.append(entry)
    if candidate_tokens > budget - tokens:
        all_fit = False
    if limits.chunking_policy and not all_fit:
        size_chunks(selected.context, budget - tokens, limits)
    selected.context = [entry for entry in selected.context if entry.chunk > 0]
    return selected


def size_chunks(entries: list[Entry], capacity: float, limits: BatchLimits) -> None:
    longest = float("inf") if limits.longest is None else limits.longest
    for entry in entries:
        entry.chunk = 0
    if limits.chunking_policy == "equal_progress":
        _equal_progress(entries, capacity, longest, limits.unit)
    else:
        _first_come_first_served(entries, capacity, longest, limits.unit)
    _fit_drafts(entries, capacity, longest, limits.unit)


def _equal_progress(entries: list[Entry], capacity: float, longest: float, unit: int) -> None:
    total, progress = 0, True
    while total < capacity and progress:
        progress = False
        for entry in entries:
            before = entry.chunk
            entry.chunk = min(before + unit, entry.prompt_len - entry.position)
            increment = entry.chunk - before
            if total + increment > capacity or entry.chunk > longest:
                entry.chunk = before
            elif increment > 0:
                total += increment
                progress = True


def _first_come_first_served(entries: list[Entry], capacity: float, longest: float, unit: int) -> None:
    for entry in entries:
        remainder = entry.prompt_len - entry.position
        size = min(remainder, capacity, longest)
        entry.chunk = int(size if size == remainder else size // unit * unit)
        capacity -= entry.chunk


def _fit_drafts(entries: list[Entry], capacity: float, longest: float, unit: int) -> None:
    used: float = sum(entry.chunk for entry in entries)
    for entry in entries:
        if entry.position + entry.chunk != entry.prompt_len or entry.drafts == 0:
            continue
        remainder = entry.chunk % unit
        room = min(unit - remainder if remainder else 0, longest - entry.chunk, capacity - used)
        used += room
        entry.drafts = int(min(entry.drafts, room))
