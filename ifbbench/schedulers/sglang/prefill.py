"""Prefill batches (`get_new_batch_prefill` of SGLang 0.5.23): which prompts an iteration runs, and how much of each."""

from collections.abc import Sequence

from ifbbench.engine.interfaces import SchedulerStalled
from ifbbench.engine.plan import Limit
from ifbbench.engine.request import Request
from ifbbench.schedulers.sglang.admission import Need, PrefillPass, Running, Verdict
from ifbbench.schedulers.sglang.decode import mix
from ifbbench.schedulers.sglang.order import max_outputs
from ifbbench.schedulers.sglang.preemption import preempt_for
from ifbbench.schedulers.sglang.radix_tree import Match
from ifbbench.schedulers.sglang.retraction import is_kept_in_host
from ifbbench.schedulers.sglang.state import Decision, SglangState

# Fewer tokens that only the host has are computed again (`load_back_threshold`).
MIN_LOADED = 10
LIMITS = {Verdict.NO_TOKEN: Limit.KV_BLOCKS, Verdict.OTHER: Limit.NUM_TOKENS}


def decide_prefill(state: SglangState, decision: Decision) -> bool:
    """Decide a prefill batch; whether there is one."""
    state.awaits_only = False
    if state.rules.preempts or not len(state.running):
        state.is_full = False
    if (state.is_full or not state.queue) and state.chunked is None:
        return False
    state.limit_of_head = state.left_out = None
    if _num_allocatable(state) <= 0 and state.chunked is None and not state.rules.preempts:
        state.is_full, state.limit_of_head = True, Limit.BATCH_SIZE
        return False
    state.order.sort(state.queue)
    batch = _new_pass(state)
    if state.chunked is not None:
        decision.chosen.append(state.chunked)
        _continue(state, state.chunked, batch)
    _try_waiting(state, decision, batch)
    taken = set(decision.chosen)
    state.queue = [request for request in state.queue if request not in taken]
    for pause in decision.paused:
        if not is_kept_in_host(state, pause.victim):
            state.enqueue(pause.victim)
    if not decision.chosen:
        return False
    _take_pages(state, decision.chosen)
    state.last = decision.chosen
    if state.rules.mixes_chunks and len(state.running):
        decision.rows = mix(state)
    return True


def _new_pass(state: SglangState) -> PrefillPass:
    table, rows, tree, deferred = state.table, state.running.rows, state.kv_cache.tree, state.table.deferred_confirmed
    # Lists: where speed matters few requests run, and arrays of few values are slower.
    outputs: list[int] = table.confirmed[rows].tolist()
    maximum: list[int] = table.reserved[rows].tolist()
    ends, prompt_len = list[bool](), list[int]()
    if state.rules.ignores_eos:
        stops: list[int] = table.stop_after[rows].tolist()
        ends = [stop == maximum[index] for index, stop in enumerate(stops)]
    if tree is None:  # outputs of before a retraction count too
        prompt_len = table.original_prompt_len[rows].tolist()
        for index, joined in enumerate(table.joined[rows].tolist()):
            outputs[index] += joined
            maximum[index] += joined
    if deferred:
        for index, request in enumerate(state.running.requests):
            if request.in_generation:  # those with the last output in flight are counted one by one
                outputs[index] += deferred
    return PrefillPass(
        state.rules,
        state.kv_cache.page_size,
        lambda: state.kv_cache.available,
        Running(prompt_len, outputs, maximum, ends),
        state.ratio.current,
        len(rows) if state.rules.mixes_chunks else 0,
        tree is not None,
    )


def _num_allocatable(state: SglangState) -> int:
    """Requests that may join the running ones. Those whose pages are being sent have rows, too."""
    return state.limits.max_batch_size - len(state.running) - len(state.kept)


def _continue(state: SglangState, request: Request, batch: PrefillPass) -> None:
    """The prompt that is computed in chunks gets its next one."""
    limit = state.order.chunk_limit(request.remaining_context, state.queue, batch.chunk or 0)
    request.set_chunk(batch.continuing(_need_of(state, request, request.position), limit))
    if request.is_last_chunk:
        state.chunked = None


def _try_waiting(state: SglangState, decision: Decision, batch: PrefillPass) -> None:
    """Try the waiting requests in order, up to the first that does not fit."""
    preempts, num_awaiting = state.rules.preempts, 0
    for request in state.queue:
        state.left_out = request if decision.awaits else None
        if batch.state() is Verdict.OTHER:
            state.limit_of_head = Limit.NUM_TOKENS
            return
        if len(decision.chosen) >= _num_allocatable(state):
            state.is_full = True
        if state.is_full and not (preempts and preempt_for(state, decision, request, batch)):
            state.limit_of_head = Limit.BATCH_SIZE
            return
        if state.storage is not None and not state.storage.may_try(request):
            decision.awaits = True
            num_awaiting += 1
            continue
        verdict = _try(state, decision, request, batch)
        if verdict is not Verdict.CONTINUE:
            if verdict is Verdict.NO_TOKEN:
                state.is_full = len(decision.chosen) > 0 or len(state.running) > 0
            state.limit_of_head = LIMITS[verdict]
            return
    state.awaits_only = num_awaiting == len(state.queue) and not preempts


def _try(state: SglangState, decision: Decision, request: Request, batch: PrefillPass) -> Verdict:
    """Judge a waiting request, and start it if it is taken. What it reuses is locked while it is judged."""
    match = state.kv_cache.match(request, request.prompt_len - 1)
    if state.storage is not None and state.storage.has_lost(request, match):
        decision.has_lost = True
        return Verdict.CONTINUE
    if match is not None and 0 < match.host_length < MIN_LOADED:
        match = match.on_device()
    state.kv_cache.lock(match)
    need = _need_of(state, request, *((0, 0) if match is None else (match.length, match.host_length)))
    state.judged[request] = need.new_tokens + need.loaded
    # An aligned cut may leave tokens of the chunk. SGLang itself cuts a second prompt with them if that ignores the
    # end token, and never runs the first one again.
    verdict, tokens = batch.judge(need, may_cut=state.chunked is None)
    if tokens:
        _start(state, decision, request, match, tokens)
    else:
        state.kv_cache.unlock(match)
    return verdict


def _start(state: SglangState, decision: Decision, request: Request, match: Match | None, tokens: int) -> None:
    """A waiting request enters with its first `tokens` tokens that are not in `match`."""
    from_host = 0 if match is None else match.host_length
    if match is not None and from_host:
        match = state.kv_cache.load(match)
    reused = 0 if match is None else match.length
    if state.storage is not None:
        state.storage.started(request, reused)
    decision.chosen.append(request)
    if request.table is None:
        order = request.order
        request.enter(state.table, 0)
        request.order = order
        request.reused_tokens, request.host_reused_tokens = reused, from_host
        decision.entered.append(request)
    del state.judged[request]
    request.position = request.prepopulated = reused
    state.kv_cache.start(request, match)
    request.set_chunk(tokens)
    if not request.is_last_chunk:
        state.chunked = request


def _take_pages(state: SglangState, chosen: Sequence[Request]) -> None:
    """Take pages for the chunks of a prefill batch. With several tokens to a page, SGLang makes room for one more page
    of each request."""
    cache, needed = state.kv_cache, 0
    for request in chosen:
        needed += request.chunk
    cache.make_room(needed if cache.page_size == 1 else needed + len(chosen) * cache.page_size)
    for request in chosen:
        count = cache.missing(request.slot, request.position + request.chunk)
        if count > cache.free.count:
            raise SchedulerStalled(f"SGLang's scheduler: the KV cache has no room for the chunk of {request!r}")
        cache.grow(request.slot, count)


def _need_of(state: SglangState, request: Request, on_device: int, on_host: int = 0) -> Need:
    """What decides whether a request is taken, of which so many tokens are in the tree."""
    outputs, cached = request.prompt_len - request.original_prompt_len, on_device + on_host
    return Need(request.prompt_len - cached, cached, max_outputs(request), outputs, state.ignores_eos(request), on_host)
