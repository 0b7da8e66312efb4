"""Retraction: running requests lose their pages because the next decode step does not fit (`retract_decode` of SGLang
0.5.23)."""

from ifbbench.engine.plan import Limit, Pause
from ifbbench.engine.request import Request
from ifbbench.schedulers.sglang.order import max_outputs
from ifbbench.schedulers.sglang.ratio import RETRACT_STEPS
from ifbbench.schedulers.sglang.running import rows_of
from ifbbench.schedulers.sglang.slots import has_room
from ifbbench.schedulers.sglang.state import Decision, SglangState


def retract(state: SglangState, decision: Decision) -> None:
    """Running requests lose their pages until the others have room, but one at least, and all but one at most. If that
    one does not fit either, it is `decision.aborted`."""
    kept = sorted(state.running, key=lambda request: _keeping(state, request), reverse=True)
    while len(kept) > 1 and (not decision.paused or not has_room(state, rows_of(kept))):
        victim = kept.pop()
        pause(state, decision, victim, len(kept))
        decision.paused.append(Pause(victim, kept[0], Limit.KV_BLOCKS))
    state.running.keep(kept)
    if not has_room(state, state.running.rows):
        decision.aborted = kept[0]
    remaining = kept if decision.aborted is None else []
    state.ratio.retracted([(request.num_outputs, max_outputs(request)) for request in remaining])
    for paused in decision.paused:
        if not is_kept_in_host(state, paused.victim):
            state.enqueue(paused.victim)


def _keeping(state: SglangState, request: Request) -> tuple[float, ...]:
    """The larger, the later a running request is retracted."""
    by_length = request.num_outputs, -request.original_prompt_len
    return (request.priority, *by_length) if state.rules.retracts_by_priority else by_length


def is_kept_in_host(state: SglangState, request: Request) -> bool:
    """Whether host memory takes what a request loses: of one whose prompt another engine has computed. Where keys and
    values are computed, these copies are not built, and it computes its tokens again."""
    return request.remote_len > 0 and not state.limits.reads_block_tables


def pause(state: SglangState, decision: Decision, victim: Request, remaining: int) -> None:
    """A running request loses its pages, and will compute its tokens again, or get them from host memory. Its outputs
    in flight are ignored. remaining: how many requests run on; room is made for their next tokens."""
    state.part()
    row, table = victim.slot, state.table
    computed = state.computed_by(victim)
    for iteration in decision.in_flight:
        iteration.dropped.add(row)
    for scheduled in state.in_flight:
        scheduled.drop(row)
    state.kv_cache.release(row, computed)
    state.kv_cache.make_room(remaining * RETRACT_STEPS)
    table.generated[row] = table.confirmed[row]
    if is_kept_in_host(state, victim):
        victim.pauses += 1
        state.in_host.append(victim)
        return
    state.judged[victim] = victim.prompt_len
    victim.cached_before_pause = max(victim.cached_before_pause, computed)
    victim.pause(state.limits.max_seq_len)
