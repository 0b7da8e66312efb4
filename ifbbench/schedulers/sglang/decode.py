"""Decode batches (`update_running_batch` of SGLang 0.5.23): one token of every running request."""

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.schedulers.sglang.retraction import retract
from ifbbench.schedulers.sglang.slots import has_room, take_slots
from ifbbench.schedulers.sglang.state import Decision, SglangState


def decide_decode(state: SglangState, decision: Decision) -> None:
    """Decide a decode batch of all running requests. `decision.rows` is empty if there is none now."""
    before, running = len(state.running), state.running
    decision.num_ending = state.leave_finishing()
    if not len(running):
        state.is_full = False
        return
    if has_room(state, running.rows):
        state.ratio.decay()
    elif decision.num_ending:  # their slots will be free soon
        state.is_full = False
        return
    else:
        retract(state, decision)
    if len(running) < before or decision.aborted is not None:
        state.is_full = False
    if decision.aborted is None:
        take_slots(state, running.rows)
        decision.rows = running.rows


def mix(state: SglangState) -> Rows:
    """[rows] of the running requests, which ride in the prefill batch if the cache has room for all of them (Mixed
    batches)."""
    if state.leave_finishing():
        state.is_full = False
    rows = state.running.rows
    if not len(rows) or not has_room(state, rows):
        return NO_ROWS
    take_slots(state, rows)
    state.last = state.last + state.running.requests
    state.running.keep([])
    return rows
